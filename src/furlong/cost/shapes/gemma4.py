"""Gemma 4's layers: head dims of their own, shared keys and values, embeddings of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.cost.shapes.layers import Mlp
from furlong.cost.shapes.mixers import MixerShape, attention_mixer
from furlong.families import Family


@dataclass(frozen=True, slots=True)
class Gemma4Layers:
    """The layers, and what the decoder has at its entrance for them."""

    mixers: tuple[MixerShape, ...]
    mlps: tuple[Mlp, ...]
    entrance_parameters: int


def gemma4_layers(
    config: Mapping[str, Any], family: Family, *, windows: tuple[int | None, ...], mlp: Mlp
) -> Gemma4Layers:
    """The layers of a config with these windows; `mlp`: its dense one."""
    num_layers, hidden = len(windows), int(config["hidden_size"])
    narrow = int(config.get("hidden_size_per_layer_input") or 0)
    num_own = num_layers - int(config.get("num_kv_shared_layers") or 0)
    mixers, mlps = [], []
    for layer, window in enumerate(windows):
        mixer = _mixer(config, family, layer, is_full=window is None, is_shared=layer >= num_own)
        own = replace(mlp, width=2 * mlp.width) if layer >= num_own and _is_double(config) else mlp
        if config.get("enable_moe_block"):
            own, norms = _with_experts(config, own, hidden)
            mixer = replace(mixer, vectors=mixer.vectors + norms)
        if narrow:  # what the layer takes of its own embedding
            mixer = replace(
                mixer, matrices=mixer.matrices + 2 * hidden * narrow,
                vectors=mixer.vectors + hidden, saved=mixer.saved + 4 * narrow + 2 * hidden,
            )  # fmt: skip
        mixers.append(mixer)
        mlps.append(own)
    vocab = int(config.get("vocab_size_per_layer_input") or config["vocab_size"])
    entrance = narrow * num_layers * (vocab + hidden) + narrow
    return Gemma4Layers(tuple(mixers), tuple(mlps), entrance)


def _mixer(
    config: Mapping[str, Any], family: Family, layer: int, *, is_full: bool, is_shared: bool
) -> MixerShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    sizes = _own_sizes(config, layer, is_full)
    dim = int(sizes.get("head_dim") or family.default_head_dim or hidden // heads)
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    mixer = attention_mixer(config, family, hidden=hidden, heads=heads, kv_heads=kv_heads, dim=dim)
    kv, has_bias = kv_heads * dim, bool(config.get("attention_bias"))
    if is_shared:  # no keys, no values, no norm of keys
        gone, vectors = 2 * hidden * kv, dim + (2 * kv if has_bias else 0)
    elif is_full and config.get("attention_k_eq_v"):
        gone, vectors = hidden * kv, kv if has_bias else 0
    else:
        return mixer
    return replace(
        mixer, matrices=mixer.matrices - gone, before_kv=mixer.before_kv - gone,
        vectors=mixer.vectors - vectors,
    )  # fmt: skip


def _own_sizes(config: Mapping[str, Any], layer: int, is_full: bool) -> dict[str, Any]:
    """Head dim and key-value heads of one layer."""
    sizes = {name: config.get(name) for name in ("head_dim", "num_key_value_heads")}
    listed = config.get("per_layer_config")
    if isinstance(listed, dict):
        return sizes | next((own for key, own in listed.items() if int(key) == layer), {})
    if is_full:
        sizes["head_dim"] = config.get("global_head_dim", 512)
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    return sizes


def _is_double(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_double_wide_mlp"))


def _with_experts(config: Mapping[str, Any], dense: Mlp, hidden: int) -> tuple[Mlp, int]:
    """Experts beside the dense MLP, and the parameters of their norms and scales."""
    num_experts = int(config.get("num_experts") or 1)
    both = Mlp(
        width=int(config.get("moe_intermediate_size") or dense.width),
        num_matrices=dense.num_matrices,
        num_experts=num_experts,
        num_active=int(config.get("top_k_experts") or 1),
        shared_width=dense.width,
        router=True,
        shared_gate=False,
    )
    return both, 4 * hidden + num_experts
