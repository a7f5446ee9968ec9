"""The kind of every layer of a decoder, read from its config as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from furlong.errors import ConfigError
from furlong.families import LAYER_KINDS, Family

LayerKind = Literal["full", "sliding", "chunked", "recurrent", "hybrid", "mlp", "experts"]
"""hybrid: attention and recurrence in one layer; mlp, experts: a layer without either."""

_NAMES: dict[str, LayerKind] = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding",
    "chunked_attention": "chunked", "linear_attention": "recurrent", "mamba": "recurrent",
    "recurrent": "recurrent", "conv": "recurrent", "hybrid": "hybrid", "mlp": "mlp",
    "moe": "experts",
}  # fmt: skip
_LETTERS: dict[str, LayerKind] = {"M": "recurrent", "*": "full", "-": "mlp", "E": "experts"}


def is_plain(family: Family) -> bool:
    """Whether all layers of a family have attention with heads of their own, and an MLP."""
    return family.recurrent == "none" and family.attention == "heads"


def completed(
    config: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], tuple[LayerKind, ...]]:
    """A config with the sizes that every decoder has, though a family names none or names them
    otherwise; and the kinds of its layers, none where all are alike or differ in windows only."""
    values = dict(config)
    if "tie_embedding" in values:
        values.setdefault("tie_word_embeddings", values["tie_embedding"])
    if is_plain(family) and not values.get("attention_chunk_size"):
        return values, ()
    kinds = _listed(values, family)
    if kinds:
        values["num_hidden_layers"] = values.get("num_hidden_layers") or len(kinds)
    if family.attention == "none":
        values["num_attention_heads"] = values["num_key_value_heads"] = 1
    width = values.get("block_ff_dim") or values.get("moe_intermediate_size")
    values["intermediate_size"] = (
        values.get("intermediate_size") or width or values.get("hidden_size")
    )
    if not isinstance(values.get("num_hidden_layers"), int):
        return values, kinds  # refused with the other sizes
    return values, layer_kinds(values, family)


def layer_kinds(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """The kind of each layer. Raises ConfigError where the config does not tell them."""
    found = _listed(config, family) or _numbered(config, family)
    if not found:
        raise ConfigError(
            given="no layer_types",
            required=f"the kind of each layer of a {config.get('model_type')}",
            source="the model's config",
            change="give the config.json that transformers saves with the model",
        )
    return found


def _listed(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Kinds that the config lists layer by layer; none if it does not."""
    for key in LAYER_KINDS:
        if names := config.get(key):
            return tuple(_known(str(name), family) for name in names)
    if letters := config.get("hybrid_override_pattern"):
        return tuple(_LETTERS[letter] for letter in str(letters) if letter in _LETTERS)
    return ()


def _known(name: str, family: Family) -> LayerKind:
    if name in _NAMES:
        return _NAMES[name]
    reason = family.not_in_chunks or "has layers of a kind that is not known here"
    raise ConfigError(
        given=f"layers of type {name}, in a model which {reason}",
        required=f"layers of type {', '.join(_NAMES)}",
        source="the model's config",
        change="train a model of another family",
    )


def _numbered(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    """Kinds that follow from a layer's number."""
    layers = range(int(config["num_hidden_layers"]))
    if family.parts == "parallel":
        return _alike("hybrid", layers)
    if family.attention == "none":
        return _alike("recurrent", layers)
    if family.recurrent == "none":
        return _chunked(config, layers)
    cycle = config.get("block_types")  # the attention among them has the window
    if cycle:
        names = [str(cycle[layer % len(cycle)]) for layer in layers]
        cycled: list[LayerKind] = [
            "sliding" if name == "attention" else _NAMES[name] for name in names
        ]
        return tuple(cycled)
    if (full := _full_layers(config, layers)) is None:
        return ()
    kinds: list[LayerKind] = ["full" if layer in full else "recurrent" for layer in layers]
    return tuple(kinds)


def _alike(kind: LayerKind, layers: range) -> tuple[LayerKind, ...]:
    return tuple(kind for _ in layers)


def _chunked(config: Mapping[str, Any], layers: range) -> tuple[LayerKind, ...]:
    """Kinds where no layer is recurrent: those with RoPE are chunked, if the config has blocks."""
    if not config.get("attention_chunk_size"):
        return _alike("full", layers)
    every = int(config.get("no_rope_layer_interval") or 4)
    with_rope = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    kinds: list[LayerKind] = ["chunked" if with_rope[layer] else "full" for layer in layers]
    return tuple(kinds)


def _full_layers(config: Mapping[str, Any], layers: range) -> set[int] | None:
    """Numbers of the layers with full attention, None where no key tells them."""
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(key) is not None:
            return set(config[key])
    own = config.get("linear_attn_config")
    if isinstance(own, dict) and own.get("full_attn_layers"):
        return {layer - 1 for layer in own["full_attn_layers"]}
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset") or 0
        return {layer for layer in layers if layer % period == offset}
    for key in ("full_attention_interval", "layer_group_size"):
        if every := config.get(key):
            return {layer for layer in layers if (layer + 1) % every == 0}
    return set() if "attn_layer_indices" in config else None
