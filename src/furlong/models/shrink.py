"""A model's config with small sizes: the same family, features and ratios, few numbers.

Kept: config class, pattern of layer types, ratio of heads, RoPE type, tied heads, softcaps, scales,
biases, whether there are experts and a window. Small: heads, widths, experts, vocabulary, and the
number of layers unless all are wanted; the window is shorter than the sequences of the proof.
Dropout is off: it has no truth to compare.
"""

from __future__ import annotations

from typing import Any

from furlong.errors import UnsupportedModelError
from furlong.families import (
    ATTENTION_DROPOUTS,
    MLP_WIDTHS,
    NUM_ACTIVE_EXPERTS,
    NUM_EXPERTS,
    NUM_SHARED_EXPERTS,
    SPECIAL_TOKENS,
    WINDOWS,
    cut_layers,
    own_key,
)
from furlong.models.support import rope_types

VOCAB_SIZE = 260
WINDOW = 12
HEAD_DIM = 8
MAX_LAYERS = 8
LONGEST_TOKENS = 61
SHORTEST_TOKENS = 9
_EXPERTS = dict.fromkeys(NUM_EXPERTS, 4) | {NUM_ACTIVE_EXPERTS: 2, NUM_SHARED_EXPERTS: 1}


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
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(values.get(own_key(config, name)), int):
            raise _refused(config, f"names no {name}")
    for key in ("quantization_config", "dtype", "torch_dtype", "architectures"):
        values.pop(key, None)
    if not all_layers:
        _shrink_layers(config, values)
    for key in WINDOWS:
        if isinstance(values.get(key), int):
            values[key] = min(values[key], WINDOW)
    _shrink_widths(config, values)
    _shrink_tokens(values)
    _shrink_rope(config, values, max_seq_len)
    for key in values.keys() - ATTENTION_DROPOUTS:
        if ("dropout" in key or "pdrop" in key) and isinstance(values[key], float):
            values[key] = 0.0
    return type(config).from_dict(values)


def _shrink_layers(config: Any, values: dict[str, Any]) -> None:
    """Cut a config to the layers that show every type of layer and one more."""
    before = values[own_key(config, "num_hidden_layers")]
    types = values.get("layer_types") or ["attention"] * before
    shown = 1 + max(types.index(kind) for kind in set(types))
    cut_layers(config, values, min(MAX_LAYERS, max(3, shown + 1)))


def _shrink_widths(config: Any, values: dict[str, Any]) -> None:
    """Few heads in the same groups, narrow layers in nearly the same proportions."""
    heads_name, hidden_name = own_key(config, "num_attention_heads"), own_key(config, "hidden_size")
    num_heads, hidden = values[heads_name], values[hidden_name]
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    few_kv_heads = min(num_kv_heads, 2)
    few_heads = few_kv_heads * (num_heads // num_kv_heads)
    head_dim = values.get("head_dim")
    own_ratio = hidden / (num_heads * (head_dim or hidden // num_heads))
    narrow = 8 * max(1, round(few_heads * HEAD_DIM * own_ratio / 8))
    if not head_dim or head_dim * num_heads == hidden:
        narrow = few_heads * HEAD_DIM
    if head_dim:
        values["head_dim"] = HEAD_DIM
    if values.get("num_key_value_heads"):
        values["num_key_value_heads"] = few_kv_heads
    values[heads_name], values[hidden_name] = few_heads, narrow
    for key, value in values.items():
        if key.endswith(MLP_WIDTHS) and isinstance(value, int):
            values[key] = 8 * max(1, round(value / hidden * narrow / 8))
        elif key in _EXPERTS and isinstance(value, int):
            values[key] = min(value, _EXPERTS[key])


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
