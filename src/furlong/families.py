"""The decoder families of transformers: the keys of their configs, and a row per `model_type`.

Read off the modules that transformers 5 builds; the tests compare the parameters that are counted
by a row with transformers' own. A family without a row is trained if the engine's self-check finds
it exact; its work and memory are predicted as if it were a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# Keys by their meaning: families spell them differently. MLP widths are ends of keys.
ATTENTION_DROPOUTS = (
    "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob",
)  # fmt: skip
MLP_WIDTHS = ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NUM_ACTIVE_EXPERTS = "num_experts_per_tok"
ACTIVE_EXPERTS = (NUM_ACTIVE_EXPERTS, "num_experts_per_token")
NUM_SHARED_EXPERTS = "n_shared_experts"
SHARED_EXPERTS = (NUM_SHARED_EXPERTS, "num_shared_experts")
SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)  # fmt: skip
LAYER_KINDS = ("layer_types", "layers_block_type")
STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
STATE_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
STATE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
STATE_EXPANSIONS = ("mamba_expand", "expand")
STATE_RANKS = ("mamba_dt_rank", "time_step_rank")
CONV_WIDTHS = (
    "linear_conv_kernel_dim", "short_conv_kernel_size", "mamba_d_conv", "conv_kernel",
    "conv_L_cache", "conv1d_width",
)  # fmt: skip
CONV_BIASES = ("mamba_conv_bias", "use_conv_bias")
PROJECTION_BIASES = ("use_bias", "add_bias_linear", "mamba_proj_bias")
INNER_CHUNKS = ("mamba_chunk_size", "chunk_size", "block_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
WINDOWS = ("sliding_window", "window_size")
ATTENTION_BLOCK = "attention_chunk_size"
TEMPERATURE_STEP = "floor_scale"
"""Tokens after which queries grow by one more step (Llama 4's temperature)."""
LATENT_WIDTHS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""Widths of latent attention: of its latents, and of one head behind them."""
ROUTER_GROUPS = ("n_group", "topk_group")
NUM_DENSE_LAYERS = "first_k_dense_replace"
CHUNKED = "chunked_attention"
"""The value of `layer_types` for layers in which a token sees its own attention block only, of
`attention_chunk_size` (ATTENTION_BLOCK) tokens."""
CAUSAL_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", CHUNKED}
"""Values of `layer_types` for layers in which tokens meet in causal attention only."""
RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
"""Values of `layer_types` for layers in which tokens meet in a state, some also in attention."""
TOKEN_LAYER_TYPES = {"mlp", "moe"}
"""Values of `layer_types` for layers in which tokens do not meet."""

INDEXERS = ("index_", "indexer_")
"""Beginnings of the keys of a learned indexer, which picks the keys that a token sees."""

Flag = bool | tuple[str, bool]
"""A constant, or a key of the config with the value that it has when absent."""
Recurrent = Literal[
    "none", "gated delta", "key delta", "low-rank key delta", "mamba", "mamba2", "conv",
    "lightning", "rg-lru",
]  # fmt: skip
"""The ways in which a state goes from token to token: a delta rule with a gate per head (Gated
DeltaNet) or per key (Kimi Delta Attention), a state space, a short convolution alone, linear
attention with a fixed decay (MiniMax), a gated recurrence (Griffin)."""


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
    not_in_chunks: str = ""
    """Why no model of this type is trained in chunks, as the end of "which ..."; "" for others."""
    whole: str = ""
    """Why its decoder is not divided between layers, as the end of "which ..."; "" for others."""
    attention: Literal["heads", "latent", "none"] = "heads"
    """latent: K,V of all heads are made of one narrow vector per token."""
    gate: Literal["none", "wide", "heads"] = "none"
    """The gate that scales attention's output: as wide as that, or one number per head."""
    recurrent: Recurrent = "none"
    parts: Literal["both", "one", "parallel", "shared"] = "both"
    """both: a layer mixes tokens, then comes its MLP; one: either (Nemotron-H); parallel: attention
    and recurrence side by side, then the MLP; shared: recurrence alone, in some layers behind a
    block of attention and MLP whose weights all of these share (Zamba)."""
    varied: bool = False
    """Whether layers differ in head dim, share keys and values, and have embeddings of their own
    (Gemma 4)."""
    mlp_divisor: int = 1
    """How much narrower an MLP is than the config says."""
    shared_experts: int = 0
    """Experts that every token visits, where the config names no number."""
    shared_gate: bool = True
    """Whether a gate scales what the shared expert gives."""


_INDEXED = Family(
    attention="latent", experts=True,
    not_in_chunks="picks the keys of each token with a learned indexer",
)  # fmt: skip
_EMBEDS = "adds the original embeddings again in later layers"
_QWEN3_NEXT = Family(
    recurrent="gated delta", norm="rms32", qk_norm="head", gate="wide", mlp_bias=False,
    experts=True, default_head_dim=256,
)  # fmt: skip
_MAMBA = Family(recurrent="mamba", attention="none", parts="one", num_norms=1, tied=True)
_DEEPSEEK = Family(attention="latent", experts=True, mlp_bias=False, shared_gate=False)
_BIASED: Flag = ("attention_bias", True)
FAMILIES: dict[str, Family] = {
    "axk2": _INDEXED,
    "bailing_hybrid": Family(
        recurrent="key delta", attention="latent", gate="heads", experts=True, shared_gate=False
    ),
    "bamba": Family(recurrent="mamba2"),
    "cohere": Family(norm="layer32", num_norms=1, qk_norm="heads", mlp_bias=False, tied=True),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": _INDEXED,
    "dots3_note": _INDEXED,
    "dots3_note_text": _INDEXED,
    "exaone4": Family(
        qkv_bias=False, out_bias=False, qk_norm="head", windows=4, default_window=4096
    ),
    "falcon_h1": Family(recurrent="mamba2", parts="parallel"),
    "falcon_mamba": _MAMBA,
    "gemma": Family(norm="rms32", tied=True, default_head_dim=256),
    "gemma2": Family(
        norm="rms32", num_norms=4, tied=True, default_head_dim=256, windows=2, default_window=4096
    ),
    "gemma3_text": Family(
        norm="rms32", num_norms=4, qk_norm="head", tied=True, default_head_dim=256, windows=6,
        default_window=4096,
    ),
    "gemma4_text": Family(
        norm="rms32", num_norms=4, qk_norm="head", tied=True, default_head_dim=256, windows=6,
        default_window=512, varied=True,
        whole="feeds token ids and shared keys and values to later layers",
    ),
    "glm4": Family(num_norms=4, qkv_bias=_BIASED, out_bias=False, default_head_dim=128),
    "glm5_next": _INDEXED,
    "glm5_next_text": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "gpt_neox": Family(
        gated=False, norm="layer", fused_qkv=True, qkv_bias=_BIASED, out_bias=_BIASED, mlp_bias=True
    ),
    "gpt_oss": Family(
        qkv_bias=_BIASED, out_bias=_BIASED, mlp_bias=True, mlp_saves=7, experts=True, sinks=True,
        default_head_dim=64, windows=2, default_window=128,
    ),
    "granite": Family(),
    "granitemoehybrid": Family(recurrent="mamba2", experts=True, shared_gate=False),
    "hy_v4": _INDEXED,
    "jamba": Family(recurrent="mamba", experts=True),
    "kimi_linear": Family(
        recurrent="low-rank key delta", attention="latent", experts=True, shared_gate=False
    ),
    "lfm2": Family(
        recurrent="conv", qk_norm="head", qkv_bias=False, out_bias=False, mlp_bias=False, tied=True
    ),
    "lfm2_moe": Family(
        recurrent="conv", qk_norm="head", qkv_bias=False, out_bias=False, mlp_bias=False, tied=True,
        experts=True,
    ),
    "lfm3": Family(
        recurrent="conv", num_norms=4, qk_norm="head", gate="heads", mlp_bias=False, tied=True,
        default_window=256,
    ),
    "llama": Family(),
    "llama4_text": Family(experts=True, mlp_bias=False, shared_experts=1, shared_gate=False),
    "mamba": _MAMBA,
    "mamba2": Family(recurrent="mamba2", attention="none", parts="one", num_norms=1),
    "minimax": Family(recurrent="lightning", qkv_bias=False, out_bias=False, experts=True),
    "mistral": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", default_window=4096
    ),
    "mistral_large4": _INDEXED,
    "mistral_large4_text": _INDEXED,
    "mixtral": Family(qkv_bias=False, out_bias=False, experts=True, windows="all"),
    "nemotron_h": Family(
        recurrent="mamba2", parts="one", gated=False, norm="rms32", num_norms=1, experts=True,
        shared_gate=False,
    ),
    "olmo2": Family(norm="rms32", qk_norm="width"),
    "olmo3": Family(norm="rms32", qk_norm="width", windows=4, default_window=4096),
    "olmo_hybrid": Family(recurrent="gated delta", norm="rms32", qk_norm="width"),
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
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": replace(_QWEN3_NEXT, experts=False),
    "qwen3_moe": Family(
        qk_norm="head", mlp_bias=False, experts=True, windows="late", default_window=4096
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen4_exp_text": _INDEXED,
    "recurrent_gemma": Family(
        recurrent="rg-lru", norm="rms32", out_bias=True, mlp_bias=True, mlp_divisor=2, tied=True,
        whole="scales whatever enters its first layer",
    ),
    "rwkv": Family(
        refused="asks a hub for a kernel while it is built",
        not_in_chunks="keeps its state outside of transformers' cache",
    ),
    "smollm3": Family(tied=True, windows="late"),
    "stablelm": Family(
        norm="layer", qk_norm="heads", qkv_bias=("use_qkv_bias", False), out_bias=False,
        mlp_bias=False,
    ),
    "starcoder2": Family(
        gated=False, norm="layer", qkv_bias=("use_bias", True), out_bias=("use_bias", True),
        mlp_bias=("use_bias", True), tied=True, windows="all",
    ),
    "xlstm": Family(not_in_chunks="keeps its state outside of transformers' cache"),
    "zamba": Family(recurrent="mamba", parts="shared", num_norms=1, tied=True, whole=_EMBEDS),
    "zamba2": Family(recurrent="mamba2", parts="shared", num_norms=1, tied=True, whole=_EMBEDS),
}  # fmt: skip


def family_of(model_type: str) -> Family:
    """The row of a `model_type`, Llama's where it has none."""
    return FAMILIES.get(model_type, Family())


def is_set(config: Mapping[str, Any], flag: Flag) -> bool:
    """The value of a flag for one config."""
    return flag if isinstance(flag, bool) else bool(config.get(*flag))


def own_key(config: Any, name: str) -> str:
    """The key under which a transformers config saves a standard attribute."""
    return str((getattr(config, "attribute_map", None) or {}).get(name, name))


def for_all_layers(config: Any, name: str, default: Any = None) -> Any:
    """An attribute of a transformers config, the default also where layers differ in it."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers' own, of a config that has one value per layer
        return default
