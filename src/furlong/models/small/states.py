"""Small sizes of recurrent layers, in the values of a config whose other widths are small.

They follow from each other: the heads of a state space make up its inner width, and that is a
multiple of the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from furlong.families import (
    INNER_CHUNKS,
    STATE_EXPANSIONS,
    STATE_GROUPS,
    STATE_HEAD_DIMS,
    STATE_HEADS,
    STATE_RANKS,
    STATE_SIZES,
    Family,
)

_SIZE = 8
"""Entries of a state and of a head of linear attention, tokens of an inner chunk."""
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_SMALL = dict.fromkeys(
    (*STATE_SIZES, *INNER_CHUNKS, "linear_key_head_dim", "linear_value_head_dim",
     "linear_head_dim", "adapter_rank"), _SIZE,
) | {"linear_num_heads": 2}  # fmt: skip
_OF_HIDDEN = ("lru_width", "attention_hidden_size")


def shrink_states(family: Family, values: dict[str, Any], hidden: int) -> None:
    """Make the recurrent layers small, in place; `hidden` is the model's own width, and
    `values["hidden_size"]` the small one."""
    if family.recurrent == "none":
        return
    narrow = values["hidden_size"]
    values.pop("linear_attn_config", None)  # what a checkpoint says of what other keys hold, too
    for key, most in _SMALL.items():
        if isinstance(values.get(key), int):
            values[key] = min(values[key], most)
    for key in _OF_HIDDEN:
        if values.get(key):
            values[key] = values[key] * narrow // hidden
    for key in STATE_RANKS:
        if isinstance(values.get(key), int):
            values[key] = math.ceil(narrow / 16)
    if values.get(_KEY_HEADS):
        shared = values[_VALUE_HEADS] // values[_KEY_HEADS]
        values[_KEY_HEADS] = min(values[_KEY_HEADS], 2)
        values[_VALUE_HEADS] = values[_KEY_HEADS] * shared
    if family.recurrent in ("mamba", "mamba2"):
        _shrink_heads(family, values, hidden)


def _shrink_heads(family: Family, values: dict[str, Any], hidden: int) -> None:
    """Few heads in few groups, as wide as makes up the inner width."""
    heads_key = _first(values, STATE_HEADS)
    if heads_key is None:
        return
    inner = int(values["hidden_size"] * values[_first(values, STATE_EXPANSIONS) or ""])
    if values.get("mamba_d_ssm"):
        inner = values["mamba_d_ssm"] = max(1, round(values["mamba_d_ssm"] / hidden * 4)) * (
            values["hidden_size"] // 4
        )
    num_groups = 1
    if groups_key := _first(values, STATE_GROUPS):
        num_groups = values[groups_key] = min(values[groups_key], 2)
    num_heads = values[heads_key] = min(values[heads_key], 2 * num_groups)
    own_dim = None if family.attends else "head_dim"
    if dim_key := _first(values, (*STATE_HEAD_DIMS, *filter(None, [own_dim]))):
        values[dim_key] = inner // num_heads


def _first(values: dict[str, Any], keys: Iterable[str]) -> str | None:
    """The key that a config has."""
    return next((key for key in keys if values.get(key)), None)
