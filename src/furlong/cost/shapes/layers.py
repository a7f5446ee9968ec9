"""The layers of a model one by one, from its config and its family's row: MLPs and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furlong.cost.shapes.kinds import LayerKind, is_plain
from furlong.errors import ConfigError
from furlong.families import (
    ACTIVE_EXPERTS,
    NUM_EXPERTS,
    SHARED_EXPERTS,
    SHARED_WIDTHS,
    Family,
    is_set,
)

NO_ATTENTION = 1
"""The window of a layer without attention: a token sees itself alone."""


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
    shared_gate: bool = True
    """Whether a gate scales what the shared expert gives."""

    @property
    def active_width(self) -> int:
        """Width of what one token passes through."""
        return self.width * self.num_active + self.shared_width

    def active_parameters(self, hidden: int) -> int:
        """Parameters of the matrices that one token is multiplied with."""
        routing = hidden * self.num_experts if self.router else 0
        return self.num_matrices * hidden * self.active_width + routing + self._gate(hidden)

    @property
    def unvisited(self) -> float:
        """Share of the experts that a token does not visit."""
        return 1 - self.num_active / self.num_experts

    def parameters(self, hidden: int, *, idle_only: bool = False) -> int:
        """All parameters; with `idle_only` those of the experts that a token does not visit."""
        biases = (self.num_matrices - 1) * self.width + hidden if self.bias and self.width else 0
        expert = self.num_matrices * hidden * self.width + biases
        if idle_only:
            return expert * (self.num_experts - self.num_active)
        routing = hidden * self.num_experts if self.router else 0
        routing += self.num_experts if self.router_bias else 0
        shared = self.num_matrices * hidden * self.shared_width
        return expert * self.num_experts + routing + shared + self._gate(hidden)

    def _gate(self, hidden: int) -> int:
        """Parameters of the shared expert's gate."""
        return hidden if self.shared_width and self.shared_gate else 0


def layer_windows(
    config: Mapping[str, Any], family: Family, kinds: tuple[LayerKind, ...] = ()
) -> tuple[int | None, ...]:
    """The window of each layer in tokens; `kinds`: those of a family whose layers differ."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window", family.default_window)
    types = config.get("layer_types")
    if kinds:
        window = window or config.get("attention_window_size")
        return tuple(_window_of(kind, config, window) for kind in kinds)
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


def _window_of(kind: LayerKind, config: Mapping[str, Any], window: int | None) -> int | None:
    match kind:
        case "full" | "hybrid":
            return None
        case "sliding":
            return int(window) if window else None
        case "chunked":
            return int(config["attention_chunk_size"])
        case "recurrent" | "mlp" | "experts":
            return NO_ATTENTION


def layer_mlps(
    config: Mapping[str, Any], family: Family, kinds: tuple[LayerKind, ...] = ()
) -> tuple[Mlp, ...]:
    """The MLP of each layer; some layers of a mixture of experts may be dense, and some layers of
    hybrids have none."""
    num_layers = int(config["num_hidden_layers"])
    bias = is_set(config, family.mlp_bias)
    matrices = 3 if family.gated else 2
    dense = Mlp(_dense_width(config, family), matrices, bias=bias)
    if family.parts == "shared":  # the block's MLP counts with its attention
        return (Mlp(0),) * num_layers
    if family.parts == "one":
        mlps = {"mlp": dense}
        if "experts" in kinds:
            mlps["experts"] = _experts(config, family, matrices, bias)
        return tuple(mlps.get(kind, Mlp(0)) for kind in kinds)
    has_experts = family.experts and any(config.get(key) for key in NUM_EXPERTS)
    if not has_experts:
        if family.experts and is_plain(family):
            _count(config, *NUM_EXPERTS)  # refuses
        alone = config.get("shared_intermediate_size")  # Granite's, where it has no experts
        return (Mlp(int(alone), matrices, bias=bias) if alone else dense,) * num_layers
    sparse = _experts(config, family, matrices, bias)
    chosen = _has_experts(config, range(num_layers))
    return tuple(sparse if has else dense for has in chosen)


def _experts(config: Mapping[str, Any], family: Family, matrices: int, bias: bool) -> Mlp:
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return Mlp(
        width=width,
        num_matrices=matrices,
        num_experts=_count(config, *NUM_EXPERTS),
        num_active=_count(config, *ACTIVE_EXPERTS),
        shared_width=_shared_width(config, family, width),
        bias=bias,
        router=True,
        router_bias=family.sinks,  # gpt-oss alone has either
        shared_gate=family.shared_gate,
    )


def _shared_width(config: Mapping[str, Any], family: Family, width: int) -> int:
    """Width of the experts that every token visits."""
    for key in SHARED_WIDTHS:
        if config.get(key):
            return int(config[key])
    if family.shared_gate:
        return 0
    number = next((config[key] for key in SHARED_EXPERTS if key in config), family.shared_experts)
    return int(number or 0) * width


def _dense_width(config: Mapping[str, Any], family: Family) -> int:
    """Width of an MLP without experts."""
    width = int(config.get("intermediate_size_mlp") or config.get("intermediate_size") or 0)
    width //= family.mlp_divisor
    if config.get("block_auto_adjust_ff_dim"):  # LFM2, as Llama's own code does
        width = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * width / 3))
        step = int(config.get("block_multiple_of") or 1)
        width = -(-width // step) * step
    return width


def _has_experts(config: Mapping[str, Any], layers: range) -> list[bool]:
    """Whether each layer has experts, by whichever key the config tells it."""
    names, listed = config.get("mlp_layer_types"), config.get("moe_layers")
    if names:
        return [name == "sparse" for name in names]
    if listed is not None:
        return [layer in listed for layer in layers]
    dense = config.get("first_k_dense_replace", config.get("num_dense_layers"))
    if dense is not None:
        return [layer >= dense for layer in layers]
    if period := config.get("expert_layer_period"):
        offset = int(config.get("expert_layer_offset") or 0)
        several = _count(config, *NUM_EXPERTS) > 1
        return [several and layer % period == offset for layer in layers]
    dense_layers = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return [layer not in dense_layers and (layer + 1) % int(step) == 0 for layer in layers]


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
