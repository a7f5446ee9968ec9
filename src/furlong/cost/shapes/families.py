"""What config.json leaves unsaid: biases, norms, windows and experts of each decoder family.

Read off the modules that transformers 5 builds for each `model_type`; the tests compare the counts
of parameters with transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from furlong.errors import ConfigError

Flag = bool | tuple[str, bool]
"""A constant, or a key of the config with the value that it has when absent."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's MLP, or its experts."""

    width: int
    """Of one expert, or of the dense MLP."""
    num_matrices: int = 3
    """3 with a gate (SwiGLU and its kin), 2 without."""
    num_experts: int = 1
    num_active: int = 1
    """Experts that one token visits."""
    shared_width: int = 0
    """Width of an expert that every token visits too."""
    bias: bool = False
    router: bool = False
    router_bias: bool = False

    @property
    def active_width(self) -> int:
        """Width of what one token passes through."""
        return self.width * self.num_active + self.shared_width

    def active_parameters(self, hidden: int) -> int:
        """Of the matrices that one token is multiplied with."""
        routing = hidden * self.num_experts if self.router else 0
        gate = hidden if self.shared_width else 0
        return self.num_matrices * hidden * self.active_width + routing + gate

    def parameters(self, hidden: int, *, idle_only: bool = False) -> int:
        """All parameters; with `idle_only` those of the experts that a token does not visit."""
        biases = (self.num_matrices - 1) * self.width + hidden if self.bias else 0
        expert = self.num_matrices * hidden * self.width + biases
        if idle_only:
            return expert * (self.num_experts - self.num_active)
        routing = hidden * self.num_experts if self.router else 0
        routing += self.num_experts if self.router_bias else 0
        shared = self.num_matrices * hidden * self.shared_width
        return expert * self.num_experts + routing + shared + (hidden if self.shared_width else 0)


@dataclass(frozen=True, slots=True)
class Family:
    """The defaults are Llama's."""

    gated: bool = True
    norms_per_layer: int = 2
    norm_bias: bool = False
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    mlp_bias: Flag = ("mlp_bias", False)
    qk_norm: Literal["none", "head", "heads", "width"] = "none"
    """head: a norm over head_dim, shared by the heads; heads: one per head where the config asks
    for it; width: over all heads together."""
    sinks: bool = False
    head_bias: bool = False
    tied: bool = False
    default_head_dim: int | None = None
    windows: Literal["none", "all", "late", "even", "five of six", "three of four"] = "none"
    """Which layers have the sliding window where the config lists no layer types."""
    default_window: int | None = None
    experts: bool = False
    """Whether layers have experts in the place of one MLP."""

    def attention_vectors(
        self, config: Mapping[str, Any], *, heads: int, kv_heads: int, head_dim: int, hidden: int
    ) -> int:
        """Parameters of one layer's attention outside its matrices."""
        q, kv = heads * head_dim, kv_heads * head_dim
        count = q + 2 * kv if _is_set(config, self.qkv_bias) else 0
        count += hidden if _is_set(config, self.out_bias) else 0
        if self.qk_norm == "head":
            count += 2 * head_dim
        asked = config.get("use_qk_norm") or config.get("qk_layernorm")
        if self.qk_norm == "width" or (self.qk_norm == "heads" and asked):
            count += q + kv
        return count + (heads if self.sinks else 0)


def _is_set(config: Mapping[str, Any], flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else bool(config.get(*flag))


_QWEN3 = Family(qk_norm="head", default_head_dim=128, windows="late", default_window=4096)
_GEMMA2 = Family(
    norms_per_layer=4, tied=True, default_head_dim=256, windows="even", default_window=4096
)
_OLMO = Family(qk_norm="width")
FAMILIES: dict[str, Family] = {
    "cohere": Family(norms_per_layer=1, qk_norm="heads", tied=True, mlp_bias=False),
    "exaone4": Family(
        qkv_bias=False, out_bias=False, qk_norm="head", windows="three of four", default_window=4096
    ),
    "gemma": Family(tied=True, default_head_dim=256),
    "gemma2": _GEMMA2,
    "gemma3_text": Family(
        norms_per_layer=4, tied=True, default_head_dim=256, qk_norm="head",
        windows="five of six", default_window=4096,
    ),
    "glm4": Family(
        norms_per_layer=4, qkv_bias=("attention_bias", True), out_bias=False, default_head_dim=128
    ),
    "gpt_neox": Family(
        gated=False, norm_bias=True, mlp_bias=True,
        qkv_bias=("attention_bias", True), out_bias=("attention_bias", True),
    ),
    "gpt_oss": Family(
        qkv_bias=("attention_bias", True), out_bias=("attention_bias", True), mlp_bias=True,
        sinks=True, default_head_dim=64, windows="even", default_window=128,
        experts=True,
    ),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", default_window=4096
    ),
    "mixtral": Family(
        qkv_bias=False, out_bias=False, windows="all", experts=True
    ),
    "olmo2": _OLMO,
    "olmo3": Family(qk_norm="width", windows="three of four", default_window=4096),
    "phi": Family(
        gated=False, norm_bias=True, norms_per_layer=1, qkv_bias=True, out_bias=True,
        mlp_bias=True, head_bias=True,
    ),
    "phi3": Family(qkv_bias=False, out_bias=False, mlp_bias=False, windows="all"),
    "qwen2": Family(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows="late", default_window=4096
    ),
    "qwen2_moe": Family(
        qkv_bias=("qkv_bias", True), out_bias=False, mlp_bias=False, windows="late",
        default_window=4096, experts=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": Family(
        qk_norm="head", windows="late", default_window=4096, experts=True,
        mlp_bias=False,
    ),
    "smollm3": Family(tied=True, windows="late"),
    "stablelm": Family(
        norm_bias=True, qkv_bias=("use_qkv_bias", False), out_bias=False, mlp_bias=False,
        qk_norm="heads",
    ),
    "starcoder2": Family(
        gated=False, norm_bias=True, qkv_bias=("use_bias", True), out_bias=("use_bias", True),
        mlp_bias=("use_bias", True), tied=True, windows="all",
    ),
}  # fmt: skip


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that is there: transformers has written either of them."""
    for key in keys:
        if config.get(key):
            return int(config[key])
    raise ConfigError(
        given=f"no {keys[0]}",
        required=f"{' or '.join(keys)} in the config of {config.get('model_type')}",
        source="the model's config",
        change="give the model's own config.json",
    )


def layer_windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it sees everything."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window", family.default_window)
    if not window:
        return (None,) * num_layers
    types = config.get("layer_types")
    if types:
        return tuple(int(window) if "sliding" in str(kind) else None for kind in types)
    if family.windows == "late" and not config.get("use_sliding_window"):
        return (None,) * num_layers
    first_late = int(config.get("max_window_layers") or 0)
    layers = range(num_layers)
    slides = {
        "none": [False for _ in layers],
        "all": [True for _ in layers],
        "late": [layer >= first_late for layer in layers],
        "even": [layer % 2 == 0 for layer in layers],
        "five of six": [layer % 6 != 5 for layer in layers],
        "three of four": [layer % 4 != 3 for layer in layers],
    }[family.windows]
    return tuple(int(window) if has_window else None for has_window in slides)


def layer_mlps(config: Mapping[str, Any], family: Family) -> tuple[Mlp, ...]:
    """The MLP of each layer; some layers of a mixture of experts may be dense."""
    num_layers = int(config["num_hidden_layers"])
    bias = _is_set(config, family.mlp_bias)
    matrices = 3 if family.gated else 2
    dense = Mlp(int(config["intermediate_size"]), matrices, bias=bias)
    if not family.experts:
        return (dense,) * num_layers
    sparse = Mlp(
        width=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        num_matrices=matrices,
        num_experts=_count(config, "num_experts", "num_local_experts"),
        num_active=_count(config, "num_experts_per_tok"),
        shared_width=int(config.get("shared_expert_intermediate_size") or 0),
        bias=bias,
        router=True,
        router_bias=family.sinks,  # gpt-oss alone has either
    )
    dense_layers = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return tuple(
        dense if layer in dense_layers or (layer + 1) % step else sparse
        for layer in range(num_layers)
    )
