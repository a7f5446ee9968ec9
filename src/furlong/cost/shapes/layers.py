"""The layers of a model one by one, from its config and its family's row: MLPs and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furlong.errors import ConfigError
from furlong.families import NUM_ACTIVE_EXPERTS, NUM_EXPERTS, Family, Flag


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's MLP, or its experts."""

    width: int
    """Columns of one expert, or of the dense MLP."""
    num_matrices: int = 3
    """Number of matrices: 3 with a gate (SwiGLU and its kin), 2 without."""
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
        """Parameters of the matrices that one token is multiplied with."""
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


def attention_vectors(
    config: Mapping[str, Any],
    family: Family,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
) -> int:
    """Parameters of one layer's attention outside its matrices."""
    q, kv = heads * head_dim, kv_heads * head_dim
    count = q + 2 * kv if _is_set(config, family.qkv_bias) else 0
    count += hidden if _is_set(config, family.out_bias) else 0
    if family.qk_norm == "head":
        count += 2 * head_dim
    asked = config.get("use_qk_norm") or config.get("qk_layernorm")
    if family.qk_norm == "width" or (family.qk_norm == "heads" and asked):
        count += q + kv
    return count + (heads if family.sinks else 0)


def layer_windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, None where it sees everything."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window", family.default_window)
    types = config.get("layer_types")
    if types:
        slides = ["sliding" in str(kind) for kind in types]
    elif isinstance(family.windows, int):
        slides = [(layer + 1) % family.windows != 0 for layer in range(num_layers)]
    elif family.windows == "late":
        first = int(config.get("max_window_layers") or 0)
        late = bool(config.get("use_sliding_window"))
        slides = [late and layer >= first for layer in range(num_layers)]
    else:
        slides = [family.windows == "all"] * num_layers
    return tuple(int(window) if window and has_window else None for has_window in slides)


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
        num_experts=_count(config, *NUM_EXPERTS),
        num_active=_count(config, NUM_ACTIVE_EXPERTS),
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


def _is_set(config: Mapping[str, Any], flag: Flag) -> bool:
    """The value of a flag for one config."""
    return flag if isinstance(flag, bool) else bool(config.get(*flag))


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The value of the first key that is there and not 0. Raises ConfigError if none is."""
    for key in keys:
        if config.get(key):
            return int(config[key])
    raise ConfigError(
        given=f"no {keys[0]}",
        required=f"{' or '.join(keys)} in the config of {config.get('model_type')}",
        source="the model's config",
        change="give the model's own config.json",
    )
