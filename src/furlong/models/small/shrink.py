"""A model's config with small sizes: the same family, features and ratios, few numbers.

Kept: config class, pattern of layer types, ratio of heads, RoPE type, tied heads, softcaps, scales,
biases, whether there are experts and a window. Small: heads, widths, experts, vocabulary, and the
number of layers unless all are wanted; the window is shorter than the sequences of the proof.
Dropout is off: it has no truth to compare.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError

from furlong.errors import UnsupportedModelError
from furlong.families import (
    ATTENTION_BLOCK,
    ATTENTION_DROPOUTS,
    LATENT_WIDTHS,
    MLP_WIDTHS,
    NUM_ACTIVE_EXPERTS,
    NUM_DENSE_LAYERS,
    NUM_EXPERTS,
    NUM_SHARED_EXPERTS,
    ROUTER_GROUPS,
    SPECIAL_TOKENS,
    TEMPERATURE_STEP,
    WINDOWS,
    family_of,
    own_key,
)
from furlong.models.small.layers import cut_layers, shown_layers
from furlong.models.small.states import shrink_states
from furlong.models.support import rope_types

VOCAB_SIZE = 260
WINDOW = 12
HEAD_DIM = 8
_LENGTHS = dict.fromkeys(WINDOWS, WINDOW) | {ATTENTION_BLOCK: 8, TEMPERATURE_STEP: 4}
"""Lengths in tokens, longest: shorter than the sequences of the self-check and of the proof."""
LONGEST_TOKENS = 61
SHORTEST_TOKENS = 9
_SMALL = (
    dict.fromkeys(NUM_EXPERTS, 4)
    | {NUM_ACTIVE_EXPERTS: 2, NUM_SHARED_EXPERTS: 1, NUM_DENSE_LAYERS: 1}
    | dict.fromkeys(ROUTER_GROUPS, 1)
    | dict.fromkeys(LATENT_WIDTHS, HEAD_DIM)
)


def shrink_config(config: Any, *, max_seq_len: int, all_layers: bool = False) -> Any:
    """The config of a small model of the same kind, for sequences of `SHORTEST_TOKENS` to
    `LONGEST_TOKENS`.

    `config` is the transformers config of a decoder; `all_layers` keeps their number. RoPE of type
    longrope keeps its choice: long factors if the run's `max_seq_len` lies beyond the original
    length.
    Raises UnsupportedModelError for a config without the numbers of a decoder.
    """
    if config.get_text_config() is not config:
        raise _refused(config, "holds a decoder inside another model")
    values = config.to_dict()
    family = family_of(config.model_type)
    wanted = ["hidden_size"] + ["num_attention_heads"] * (family.attends)
    lacking = [name for name in wanted if not isinstance(values.get(own_key(config, name)), int)]
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        lacking.insert(0, "num_hidden_layers")
    if lacking:
        raise _refused(config, f"names no {lacking[0]}")
    for key in ("quantization_config", "dtype", "torch_dtype", "architectures"):
        values.pop(key, None)
    if not all_layers:
        cut_layers(config, values, shown_layers(config))
    for key, longest in _LENGTHS.items():
        if isinstance(values.get(key), int | float):
            values[key] = min(values[key], longest)
    _shrink_widths(config, values)
    _shrink_tokens(values)
    _shrink_rope(config, values, max_seq_len)
    for key in values.keys() - ATTENTION_DROPOUTS:
        if ("dropout" in key or "pdrop" in key) and isinstance(values[key], float):
            values[key] = 0.0
    try:
        return type(config).from_dict(values)
    except (ValueError, StrictDataclassError) as error:  # sizes that a family ties together
        raise _refused(config, f"cannot be made small: {error}") from error


def _shrink_widths(config: Any, values: dict[str, Any]) -> None:
    """Few heads in the same groups, narrow layers in nearly the same proportions."""
    family, hidden_name = family_of(config.model_type), own_key(config, "hidden_size")
    hidden = values[hidden_name]
    has_heads = family.attends
    narrow = _shrink_heads(config, values, hidden) if has_heads else 4 * HEAD_DIM
    values[hidden_name] = narrow
    small = {own_key(config, name): most for name, most in _SMALL.items()}
    for key, value in values.items():
        if key.endswith(MLP_WIDTHS) and isinstance(value, int):
            values[key] = 8 * max(1, round(value / hidden * narrow / 8))
        elif key in small and isinstance(value, int):
            values[key] = min(value, small[key])
    shrink_states(family, values, hidden)


def _shrink_heads(config: Any, values: dict[str, Any], hidden: int) -> int:
    """The model's width that goes with few heads of attention, which are written in place."""
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
    values[heads_name] = few_heads
    return narrow


def _shrink_tokens(values: dict[str, Any]) -> None:
    values["vocab_size"] = VOCAB_SIZE
    for token_id, key in enumerate(SPECIAL_TOKENS):
        if values.get(key) is not None:
            values[key] = token_id


def _shrink_rope(config: Any, values: dict[str, Any], max_seq_len: int) -> None:
    parameters = values.get("rope_parameters") or {}
    if "longrope" not in rope_types(config):
        return
    head_dim = values.get("head_dim") or HEAD_DIM
    share = parameters.get("partial_rotary_factor") or 1.0
    original = parameters["original_max_position_embeddings"]
    # transformers decides by the longest position of a call, and its truth must decide as the run.
    small = SHORTEST_TOKENS - 1 if max_seq_len > original else 2 * LONGEST_TOKENS
    for key in ("short_factor", "long_factor"):
        step = len(parameters[key]) / (int(head_dim * share) // 2)
        parameters[key] = [
            parameters[key][int(i * step)] for i in range(int(head_dim * share) // 2)
        ]
    ratio = values["max_position_embeddings"] / original
    values["max_position_embeddings"] = int(ratio * small)
    parameters["original_max_position_embeddings"] = small
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = small


def _refused(config: Any, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        given=f"the config of model type {config.model_type}, which {what}",
        required="the config of one causal decoder",
        source="model.name, config.json",
        change="choose a causal language model",
    )
