"""The values of a config.json, checked before a shape is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.errors import ConfigError
from furlong.families import NUM_ACTIVE_EXPERTS, NUM_EXPERTS
from furlong.units import count_words

MAX_LAYERS = 512
MAX_SIZE = 2**24
"""Heads, widths, experts and entries of a vocabulary: more than any model has."""
MAX_POSITIONS = 2**40

NEEDED_SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size",
)  # fmt: skip
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", *NUM_EXPERTS,
    NUM_ACTIVE_EXPERTS, "moe_intermediate_size", "decoder_sparse_step",
    "shared_expert_intermediate_size", "max_position_embeddings",
)  # fmt: skip


def check_values(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for sizes that are missing, no whole numbers or beyond any model's."""
    for key in NEEDED_SIZES:
        _check_size(config, key, source, lowest=1)
    for key in _OPTIONAL:
        if config.get(key) is not None:
            _check_size(config, key, source, lowest=0)
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    if not config.get("head_dim") and heads > config["hidden_size"]:
        raise _wrong(
            count_words(heads, "head"), f"at most hidden_size = {config['hidden_size']}", source
        )
    if heads % (config.get("num_key_value_heads") or heads):
        key_value_heads = config["num_key_value_heads"]
        given = f"{count_words(heads, 'head')} on num_key_value_heads = {key_value_heads}"
        raise _wrong(given, "a divisor of the heads", source)
    num_experts = next((config[key] for key in NUM_EXPERTS if config.get(key)), 0)
    active = config.get(NUM_ACTIVE_EXPERTS)
    if num_experts and active and active > num_experts:
        given = f"{NUM_ACTIVE_EXPERTS} = {active} of {num_experts}"
        raise _wrong(given, "no more than there are experts", source)
    types, dense = config.get("layer_types"), config.get("mlp_only_layers")
    if types and not (isinstance(types, list) and len(types) == num_layers):
        raise _wrong("layer_types", f"a list of {num_layers} names, one per layer", source)
    if dense and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise _wrong("mlp_only_layers", "a list of layers", source)


def rope_original(config: Mapping[str, Any]) -> int | None:
    """Positions before any scaling, None where the config names no number."""
    for holder in (config.get("rope_parameters"), config.get("rope_scaling"), config):
        value = holder.get("original_max_position_embeddings") if isinstance(holder, dict) else None
        if type(value) is int and 0 < value <= MAX_POSITIONS:
            return value
    return None


def _check_size(config: Mapping[str, Any], key: str, source: str, *, lowest: int) -> None:
    value = config.get(key)
    most = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
    if type(value) is int and lowest <= value <= most.get(key, MAX_SIZE):
        return
    raise ConfigError(
        given=f"{key} = {value!r}"[:100] if key in config else f"no {key}",
        required=f"{', '.join(NEEDED_SIZES)} as whole numbers; {key}: from {lowest}"
        f" to {most.get(key, MAX_SIZE):,}",
        source=source,
        change="give the config.json of a decoder of the Llama kind",
    )


def _wrong(given: str, required: str, source: str) -> ConfigError:
    return ConfigError(
        given=given,
        required=required,
        source=source,
        change="mend config.json, or use the model's own",
    )
