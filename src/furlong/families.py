"""The decoder families of transformers: the keys of their configs, and a row per `model_type`.

Read off the modules that transformers 5 builds; the tests compare the parameters that are counted
by a row with transformers' own. A family without a row is trained if the engine's self-check finds
it exact; its work and memory are predicted as if it were a Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Keys by their meaning: families spell them differently. MLP widths are ends of keys.
ATTENTION_DROPOUTS = (
    "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob",
)  # fmt: skip
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NUM_ACTIVE_EXPERTS = "num_experts_per_tok"
NUM_SHARED_EXPERTS = "n_shared_experts"
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
WINDOWS = ("sliding_window", "window_size")
CAUSAL_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Values of `layer_types` for layers in which tokens meet in causal attention only."""

Flag = bool | tuple[str, bool]
"""A constant, or a key of the config with the value that it has when absent."""


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers writes the layers of one `model_type`. The defaults are Llama's."""

    refused: str = ""
    """Why no model of this type can be built, as the end of "which ..."; "" for all others."""
    gated: bool = True
    """Whether an MLP has three matrices (SwiGLU and its kin) or two."""
    mlp_saves: int | None = None
    """Tensors of the MLP's width that a graph saves; None: 4 with a gate, 2 without."""
    mlp_bias: Flag = ("mlp_bias", False)
    experts: bool = False
    """Whether layers have experts in the place of one MLP."""
    norm: Literal["rms", "rms32", "layer", "layer32"] = "rms"
    """rms32: times the weight in float32 (Gemma, OLMo); layer: torch's own, with a bias; layer32:
    Cohere's, without one."""
    num_norms: int = 2
    """Norms of a layer; the third and fourth only add to the residual stream."""
    qk_norm: Literal["none", "head", "heads", "width"] = "none"
    """head: a norm over head_dim, shared by the heads; heads: one per head where the config asks
    for it; width: over all heads together."""
    qkv_bias: Flag = ("attention_bias", False)
    fused_qkv: bool = False
    """Whether v is a view of one q, k, v tensor and keeps all of it."""
    out_bias: Flag = ("attention_bias", False)
    sinks: bool = False
    head_bias: bool = False
    tied: bool = False
    default_head_dim: int | None = None
    windows: Literal["none", "all", "late"] | int = "none"
    """Layers with the sliding window where the config lists no layer types; n: all but each n-th,
    late: those from `max_window_layers` on."""
    default_window: int | None = None


_BIASED: Flag = ("attention_bias", True)
FAMILIES: dict[str, Family] = {
    "cohere": Family(norm="layer32", num_norms=1, qk_norm="heads", mlp_bias=False, tied=True),
    "exaone4": Family(
        qkv_bias=False, out_bias=False, qk_norm="head", windows=4, default_window=4096
    ),
    "gemma": Family(norm="rms32", tied=True, default_head_dim=256),
    "gemma2": Family(
        norm="rms32", num_norms=4, tied=True, default_head_dim=256, windows=2, default_window=4096
    ),
    "gemma3_text": Family(
        norm="rms32", num_norms=4, qk_norm="head", tied=True, default_head_dim=256, windows=6,
        default_window=4096,
    ),
    "glm4": Family(num_norms=4, qkv_bias=_BIASED, out_bias=False, default_head_dim=128),
    "gpt_neox": Family(
        gated=False, norm="layer", fused_qkv=True, qkv_bias=_BIASED, out_bias=_BIASED, mlp_bias=True
    ),
    "gpt_oss": Family(
        qkv_bias=_BIASED, out_bias=_BIASED, mlp_bias=True, mlp_saves=7, experts=True, sinks=True,
        default_head_dim=64, windows=2, default_window=128,
    ),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", default_window=4096
    ),
    "mixtral": Family(qkv_bias=False, out_bias=False, experts=True, windows="all"),
    "olmo2": Family(norm="rms32", qk_norm="width"),
    "olmo3": Family(norm="rms32", qk_norm="width", windows=4, default_window=4096),
    "phi": Family(
        gated=False, mlp_saves=5, norm="layer", num_norms=1, qkv_bias=True, out_bias=True,
        mlp_bias=True, head_bias=True,
    ),
    "phi3": Family(fused_qkv=True, qkv_bias=False, out_bias=False, mlp_bias=False, windows="all"),
    "qwen2": Family(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="late", default_window=4096
    ),
    "qwen2_moe": Family(
        qkv_bias=("qkv_bias", True), out_bias=False, mlp_bias=False, experts=True, windows="late",
        default_window=4096,
    ),
    "qwen3": Family(qk_norm="head", default_head_dim=128, windows="late", default_window=4096),
    "qwen3_moe": Family(
        qk_norm="head", mlp_bias=False, experts=True, windows="late", default_window=4096
    ),
    "rwkv": Family(refused="asks a hub for a kernel while it is built"),
    "smollm3": Family(tied=True, windows="late"),
    "stablelm": Family(
        norm="layer", qk_norm="heads", qkv_bias=("use_qkv_bias", False), out_bias=False,
        mlp_bias=False,
    ),
    "starcoder2": Family(
        gated=False, norm="layer", qkv_bias=("use_bias", True), out_bias=("use_bias", True),
        mlp_bias=("use_bias", True), tied=True, windows="all",
    ),
}  # fmt: skip


def family_of(model_type: str) -> Family:
    """The row of a `model_type`, Llama's where it has none."""
    return FAMILIES.get(model_type, Family())


def own_key(config: Any, name: str) -> str:
    """The key under which a transformers config saves a standard attribute."""
    return str((getattr(config, "attribute_map", None) or {}).get(name, name))


def cut_layers(config: Any, values: dict[str, Any], num_layers: int) -> None:
    """Cut the values of a transformers config, and its lists with an entry per layer, to the first
    layers; in place."""
    key = own_key(config, "num_hidden_layers")
    before = values[key]
    for name, value in values.items():
        if isinstance(value, list) and len(value) == before and "factor" not in name:
            values[name] = value[:num_layers]
    values[key] = min(before, num_layers)
