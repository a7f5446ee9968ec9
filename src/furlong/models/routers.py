"""Routers of mixtures of experts, and the losses of them that a config asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROUTER_LOGITS = "output_router_logits"
COEFFICIENT = "router_aux_loss_coef"
Z_COEFFICIENT = "router_z_loss_coef"
"""The key of Switch Transformers; no decoder of transformers computes a z-loss."""
EXPERTS = ("num_experts", "num_local_experts")
_TOP_K = "num_experts_per_tok"


@dataclass(frozen=True, slots=True)
class Router:
    """A module whose output has router logits (T, E)."""

    name: str
    """Its name in the decoder."""
    module: nn.Module
    index: int
    """Where the logits are, if it returns a tuple."""

    def logits(self, output: Any) -> Tensor | None:
        found = output[self.index] if isinstance(output, tuple) else output
        return found.flatten(0, -2) if isinstance(found, Tensor) else None


@dataclass(frozen=True, slots=True)
class RouterRule:
    """The losses of a model's routers: their coefficients, and the experts."""

    coefficient: float
    """Factor of the load-balancing loss."""
    num_experts: int
    top_k: int
    """Experts that each token chooses."""
    z_coefficient: float = 0.0
    """Factor of the z-loss, the mean square of log-sum-exps over all tokens and routers (Zoph et
    al., ST-MoE, 2022, equation 5)."""

    def loss(self, logits: Iterable[Tensor]) -> Tensor:
        """Return the load-balancing loss, without its coefficient, of the logits (T, E) of each
        router."""
        sums = torch.stack([self.sums(own) for own in logits]).sum(0)
        choices, of_experts, _ = self.means(sums)
        return self.num_experts * (choices @ of_experts)

    def means(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means over tokens and routers of what `sums` has: (E,), (E,) and (1,)."""
        choices, of_experts, squares = (sums[:-1] / sums[-1]).split(
            (self.num_experts, self.num_experts, 1)
        )
        return choices, of_experts, squares

    def sums(self, logits: Tensor) -> Tensor:
        """Return a tensor (2 E + 2,), float64, of router logits (T, E): how many tokens choose each
        expert, the sum of each expert's probabilities, that of squared log-sum-exps, and T."""
        weights = logits.softmax(-1)
        chosen = weights.topk(self.top_k, -1).indices.flatten()
        wide = torch.float64
        choices = torch.zeros(self.num_experts, dtype=wide, device=weights.device)
        choices.scatter_add_(0, chosen, choices.new_ones(len(chosen)))
        squares = logits.to(wide).logsumexp(-1).square().sum(0, keepdim=True)
        num_rows = choices.new_full((1,), len(weights))
        return torch.cat([choices, weights.to(wide).sum(0), squares, num_rows])


def routers_of(decoder: nn.Module) -> list[Router]:
    """Return the modules of which transformers records router logits (`_can_record_outputs`)."""
    specs = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", [])
    found = []
    for name, module in decoder.named_modules():
        for spec in specs if isinstance(specs, list) else [specs]:
            kind: Any = getattr(spec, "target_class", spec)
            index, within = getattr(spec, "index", 1), getattr(spec, "layer_name", None)
            is_within = within is None or f".{within.strip('.')}." in f".{name}."
            if is_within and isinstance(kind, type) and issubclass(type(module), kind):
                found.append(Router(name, module, index))
    return found


def rule_of(model: Any) -> RouterRule | None:
    """Return the router losses that a model's config asks for (`output_router_logits`); None if it
    asks for none, or names no experts."""
    text = model.config.get_text_config()
    if not getattr(text, ROUTER_LOGITS, False):
        return None
    values = [_first(model, text, keys) for keys in ((COEFFICIENT,), EXPERTS, (_TOP_K,))]
    if any(value is None for value in values):
        return None
    coefficient, num_experts, top_k = values
    z_coefficient = _first(model, text, (Z_COEFFICIENT,)) or 0.0
    return RouterRule(float(coefficient), int(num_experts), int(top_k), float(z_coefficient))


def _first(model: Any, text: Any, keys: tuple[str, ...]) -> Any:
    """Return the first of the attributes `keys` of a model, which its forward reads, or else of its
    config."""
    found = (getattr(place, key, None) for place in (model, text) for key in keys)
    return next((value for value in found if isinstance(value, int | float)), None)
