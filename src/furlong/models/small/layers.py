"""Fewer layers of a model: which ones show all that it has, and a config cut to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.families import family_of, own_key

MAX_LAYERS = 8
_KINDS = ("layer_types", "mlp_layer_types")
_NUMBERS = ("attn_layer_indices", "hybrid_layer_ids")
"""Keys of lists with the numbers of layers."""


def shown_layers(config: Any) -> Sequence[int]:
    """The numbers of few layers of a transformers config that are of every type, and one more.

    The first ones where these are few enough, else the first ones of every type. A block that
    layers share is shown in two of them.
    """
    before = config.num_hidden_layers
    lists = [getattr(config, name, None) or [""] * before for name in _KINDS]
    kinds = list(zip(*lists, strict=True))
    each = 2 if family_of(config.model_type).shares_block else 1
    seen = sorted(n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < each)
    if (first := max(3, seen[-1] + 2)) <= MAX_LAYERS:
        return range(min(before, first))
    return seen if _lists_layers(config) else range(min(before, MAX_LAYERS))


def cut_layers(config: Any, values: dict[str, Any], kept: Sequence[int]) -> None:
    """Cut the values of a transformers config to some of its layers: their number, lists with an
    entry per layer, and lists of layers; in place."""
    key, before = own_key(config, "num_hidden_layers"), config.num_hidden_layers
    for name, value in values.items():
        if name in _NUMBERS:
            values[name] = [n for n, old in enumerate(kept) if old in (value or ())]
        elif isinstance(value, list) and len(value) == before and "factor" not in name:
            values[name] = [value[n] for n in kept]
    if key in values:  # Nemotron-H counts its list
        values[key] = len(kept)


def _lists_layers(config: Any) -> bool:
    """Whether a config has its types of layers as a list, not as a rule."""
    keys = (*_NUMBERS, *(own_key(config, name) for name in _KINDS))
    return any(config.to_dict().get(key) is not None for key in keys)
