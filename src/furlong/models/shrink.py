"""Shrink a transformers config to a tiny model of the same family, with its features and ratios.

Kept are config class, pattern of layer types, ratio of heads, RoPE type, tied heads, softcaps,
scales, biases, and whether there are experts and a window. Small are heads, widths, experts,
vocabulary, and the number of layers unless all are wanted; the window is shorter than the sequences
of the self-check. Sizes of recurrent layers depend on each other: the heads of a state space make
up its inner width, a multiple of the hidden size. Dropout is off, since
outputs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from furlong.errors import UnsupportedModelError
from furlong.families import (
    ATTENTION_BLOCK,
    ATTENTION_DROPOUTS,
    INNER_CHUNKS,
    SPECIAL_TOKENS,
    family_of,
    for_all_layers,
)

VOCAB_SIZE = 260
WINDOW = 12
HEAD_DIM = 8
LONGEST_TOKENS = 61
SHORTEST_TOKENS = 9
MAX_LAYERS = 8

# Keys of all families with their largest values in a tiny model. Lengths are in tokens, shorter
# than the sequences of the self-check and of `furlong verify`.
_LENGTHS = {"sliding_window": WINDOW, "window_size": WINDOW, ATTENTION_BLOCK: 8, "floor_scale": 4}
_SMALL = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4) | {
    "num_experts_per_tok": 2, "top_k_experts": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": HEAD_DIM,
    "q_lora_rank": HEAD_DIM, "v_head_dim": HEAD_DIM, "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM, "hidden_size_per_layer_input": HEAD_DIM,
}  # fmt: skip
_SMALL_STATES = dict.fromkeys(
    (*INNER_CHUNKS, "mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim",
     "linear_value_head_dim", "linear_head_dim", "adapter_rank"), 8,
) | {"linear_num_heads": 2}  # fmt: skip
# Ends of keys of widths; keys of the heads and groups of state spaces.
_MLP_WIDTHS = (
    "intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner",
)  # fmt: skip
_OF_HIDDEN = ("lru_width", "attention_hidden_size")
_STATE_RANKS = ("mamba_dt_rank", "time_step_rank")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_STATE_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_STATE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
# Lists with one entry per layer; lists of layer numbers.
_KINDS = ("layer_types", "mlp_layer_types")
_NUMBERS = ("attn_layer_indices", "hybrid_layer_ids")
# Overrides of keys, by layer number.
_OVERRIDES = "per_layer_config"


def _shrink_states(values: dict[str, Any], hidden: int, *, attends: bool) -> None:
    """Shrink the recurrent layers in place.

    `hidden`: the original hidden size, while `values["hidden_size"]` is the small one; `attends`:
    whether the model has attention heads too.
    """
    narrow = values["hidden_size"]
    values.pop("linear_attn_config", None)  # some checkpoints repeat other keys there
    for key, most in _SMALL_STATES.items():
        if isinstance(values.get(key), int):
            values[key] = min(values[key], most)
    for key in _OF_HIDDEN:
        if values.get(key):
            values[key] = values[key] * narrow // hidden
    for key in _STATE_RANKS:
        if isinstance(values.get(key), int):
            values[key] = math.ceil(narrow / 16)
    if values.get(_KEY_HEADS):
        shared = values[_VALUE_HEADS] // values[_KEY_HEADS]
        values[_KEY_HEADS] = min(values[_KEY_HEADS], 2)
        values[_VALUE_HEADS] = values[_KEY_HEADS] * shared
    # few heads in few groups, whose widths add up to the inner width
    heads_key, expand = _first(values, _STATE_HEADS), _first(values, ("mamba_expand", "expand"))
    if heads_key is None or expand is None:  # LFM2's config has head counts that nothing reads
        return
    inner = int(values["hidden_size"] * values[expand])
    if values.get("mamba_d_ssm"):
        inner = values["mamba_d_ssm"] = max(1, round(values["mamba_d_ssm"] / hidden * 4)) * (
            values["hidden_size"] // 4
        )
    num_groups = 1
    if groups_key := _first(values, _STATE_GROUPS):
        num_groups = values[groups_key] = min(values[groups_key], 2)
    num_heads = values[heads_key] = min(values[heads_key], 2 * num_groups)
    dims = _STATE_HEAD_DIMS if attends else (*_STATE_HEAD_DIMS, "head_dim")
    if dim_key := _first(values, dims):
        values[dim_key] = inner // num_heads


def _first(values: dict[str, Any], keys: Iterable[str]) -> str | None:
    """Return the first of `keys` for which the config has a value, or None."""
    return next((key for key in keys if values.get(key)), None)


def shown_layers(config: Any) -> Sequence[int]:
    """Return the numbers of a few layers of a transformers config, in which each layer type occurs.

    They are the leading layers, up to one more than needed to show all types, if these are at most
    `MAX_LAYERS`; else the first layers of each type. A block that layers share is shown twice.
    """
    before = config.num_hidden_layers
    lists = [getattr(config, name, None) or [""] * before for name in _KINDS]
    kinds = list(zip(*lists, strict=True))
    each = 2 if family_of(config.model_type).shares_block else 1
    seen = sorted(n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < each)
    if (first := max(3, seen[-1] + 2)) <= MAX_LAYERS:
        if first < before and config.to_dict().get(_OVERRIDES):  # Gemma 4 sets the last one's type
            return [*range(first - 1), before - 1]
        return range(min(before, first))
    keys = (*_NUMBERS, *(own_key(config, name) for name in _KINDS))
    # without lists a rule gives types by layer number, and only leading layers keep theirs
    is_listed = any(config.to_dict().get(key) is not None for key in keys)
    return seen if is_listed else range(min(before, MAX_LAYERS))


def keep_layers(config: Any, values: dict[str, Any], kept: Sequence[int]) -> None:
    """Restrict `values` of a transformers config to the layers `kept`, in place: the number of
    layers, lists with one entry per layer, and lists of layer numbers."""
    key, before = own_key(config, "num_hidden_layers"), config.num_hidden_layers
    for name, value in values.items():
        if name in _NUMBERS:
            values[name] = [n for n, old in enumerate(kept) if old in (value or ())]
        elif isinstance(value, list) and len(value) == before and "factor" not in name:
            values[name] = [value[n] for n in kept]
        elif name == _OVERRIDES:
            by_number = {int(n): own for n, own in (value or {}).items()}
            values[name] = {new: by_number[n] for new, n in enumerate(kept) if n in by_number}
    if key in values:  # Nemotron-H has no such key: it counts its list of layer types
        values[key] = len(kept)


def own_key(config: Any, name: str) -> str:
    """Return the key under which a transformers config stores a standard attribute."""
    return str((getattr(config, "attribute_map", None) or {}).get(name, name))


def shrink_config(config: Any, *, max_seq_len: int, all_layers: bool = False) -> Any:
    """Return the config of a tiny model of the same kind, for sequences of `SHORTEST_TOKENS` to
    `LONGEST_TOKENS` tokens.

    Args:
        config: the transformers config of a decoder.
        max_seq_len: tokens of the run's longest sequence, by which longrope chooses short or long
            factors; the tiny model makes the same choice.
        all_layers: keep the number of layers.

    Of a config with images beside text, the decoder's part is made small. Raises
    UnsupportedModelError for a config without a decoder, or that cannot be made small.
    """
    if (text := config.get_text_config()) is not config:
        small = shrink_config(text, max_seq_len=max_seq_len, all_layers=all_layers)
        return with_text(config, small)
    values = config.to_dict()
    for name in ("num_hidden_layers", "hidden_size"):
        if not isinstance(for_all_layers(config, name), int):
            raise _refused(config, f"names no {name}")
    for key in ("quantization_config", "dtype", "torch_dtype", "architectures"):
        values.pop(key, None)
    num_positions = values.get("max_position_embeddings")
    if not all_layers:
        keep_layers(config, values, shown_layers(config))
    for key, longest in _LENGTHS.items():
        length = values.get(key)
        # a window of at least all positions masks nothing, and stays
        masks = key != "sliding_window" or not num_positions or (length or 0) < num_positions
        if isinstance(length, int | float) and masks:
            values[key] = min(length, longest)
    _shrink_widths(config, values)
    _shrink_tokens(values)
    _shrink_rope(values, max_seq_len)
    for key in values.keys() - ATTENTION_DROPOUTS:
        if ("dropout" in key or "pdrop" in key) and isinstance(values[key], float):
            values[key] = 0.0
    try:
        return type(config).from_dict(values)
    except (ValueError, StrictDataclassError) as error:  # sizes that depend on each other
        raise _refused(config, f"cannot be made small: {error}") from error


def with_text(config: Any, text: Any) -> Any:
    """Return a copy of a config with another text config in it. Raises UnsupportedModelError for a
    config that holds none."""
    own = config.get_text_config()
    if not (keys := [key for key, value in vars(config).items() if value is own]):
        raise _refused(config, "holds a decoder inside another model")
    changed = deepcopy(config)
    setattr(changed, keys[0], text)
    return changed


def _shrink_widths(config: Any, values: dict[str, Any]) -> None:
    """Shrink heads and widths in place, in nearly the same proportions."""
    hidden_name = own_key(config, "hidden_size")
    hidden = values[hidden_name]
    attends = isinstance(values.get(own_key(config, "num_attention_heads")), int)
    narrow = _shrink_heads(config, values, hidden) if attends else 4 * HEAD_DIM
    values[hidden_name] = narrow
    small = {own_key(config, name): most for name, most in _SMALL.items()}
    for key, value in values.items():
        if key.endswith(_MLP_WIDTHS) and isinstance(value, int | list):
            widths = value if isinstance(value, list) else [value]  # Gemma 3n has one per layer
            few = [8 * max(1, round(width / hidden * narrow / 8)) for width in widths]
            values[key] = few if isinstance(value, list) else few[0]
        elif key in small and isinstance(value, int):
            values[key] = min(value, small[key])
    if family_of(config.model_type).recurrent != "none":
        _shrink_states(values, hidden, attends=attends)


def _shrink_heads(config: Any, values: dict[str, Any], hidden: int) -> int:
    """Shrink the attention heads in place, and return the hidden size that goes with them."""
    heads_name, dim_name = own_key(config, "num_attention_heads"), own_key(config, "head_dim")
    num_heads, head_dim = values[heads_name], values.get(dim_name)
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    few_kv_heads = min(num_kv_heads, 2)
    few_heads = few_kv_heads * (num_heads // num_kv_heads)
    own_ratio = hidden / (num_heads * (head_dim or hidden // num_heads))
    narrow = 8 * max(1, round(few_heads * HEAD_DIM * own_ratio / 8))
    if not head_dim or head_dim * num_heads == hidden:
        narrow = few_heads * HEAD_DIM
    if head_dim:
        values[dim_name] = HEAD_DIM
    if values.get("num_key_value_heads"):
        values["num_key_value_heads"] = few_kv_heads
    for own in (values.get(_OVERRIDES) or {}).values():
        if head_dim and own.get(dim_name):
            own[dim_name] = HEAD_DIM * own[dim_name] // head_dim
        if own.get("num_key_value_heads"):
            own["num_key_value_heads"] = min(own["num_key_value_heads"], few_kv_heads)
    values[heads_name] = few_heads
    return narrow


def _shrink_tokens(values: dict[str, Any]) -> None:
    values["vocab_size"] = VOCAB_SIZE
    if values.get("vocab_size_per_layer_input"):
        values["vocab_size_per_layer_input"] = VOCAB_SIZE
    for token_id, key in enumerate(SPECIAL_TOKENS):
        if values.get(key) is not None:
            values[key] = token_id


def _shrink_rope(values: dict[str, Any], max_seq_len: int) -> None:
    parameters = values.get("rope_parameters") or {}
    of_types = [own for own in parameters.values() if isinstance(own, dict)] or [parameters]
    ratio = 0.0
    for own in (own for own in of_types if own.get("rope_type") == "longrope"):
        head_dim = values.get("head_dim") or HEAD_DIM
        num_pairs = int(head_dim * (own.get("partial_rotary_factor") or 1.0)) // 2
        original = own["original_max_position_embeddings"]
        # transformers chooses by the largest position of a call: its reference for the tiny model
        # must choose as the run does
        small = SHORTEST_TOKENS - 1 if max_seq_len > original else 2 * LONGEST_TOKENS
        for key in ("short_factor", "long_factor"):
            step = len(own[key]) / num_pairs
            own[key] = [own[key][int(i * step)] for i in range(num_pairs)]
        ratio = ratio or values["max_position_embeddings"] / original
        values["max_position_embeddings"] = int(ratio * small)
        own["original_max_position_embeddings"] = small
        if "original_max_position_embeddings" in values:
            values["original_max_position_embeddings"] = small


def _refused(config: Any, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        given=f"the config of model type {config.model_type}, which {what}",
        required="the config of one causal decoder",
        source="model.name, config.json",
        change="choose a causal language model",
    )
