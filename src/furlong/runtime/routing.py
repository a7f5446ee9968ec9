"""Router logits of mixtures of experts: the router losses of a step, and outputs of a call.

The loss of transformers averages over all tokens of a batch and over all routers. For E experts, of
which each token chooses k,

    aux = E * sum_e f_e p_e

with f_e the mean number of times that a token chooses expert e (no gradient), and p_e its mean
probability. Once f is known, the loss is a sum over chunks. So a step first evaluates its batch for
f (`RouterLoads`), on any layout; the backward of each chunk then adds the loss's gradient at its
router logits. A batch is all sequences of one step, on all processes. The z-loss of a config with
`router_z_loss_coef` is the mean square of log-sum-exps, over the same tokens and routers.

    T tokens of a chunk, E experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.decoder import HFDecoder
from furlong.models.routers import RouterRule
from furlong.models.support import set_in_config
from furlong.plan.plan import ChunkPlan
from furlong.plan.rows import ChunkRows
from furlong.runtime.batch import Batch


class Routing(Protocol):
    """Consumer of the router logits (T, E) of a chunk's tokens on this process."""

    def meet(self, router: str, logits: Tensor, rows: ChunkRows) -> None:
        """Take the logits of a pass without a graph."""
        ...

    def gradient(self, router: str, logits: Tensor, rows: ChunkRows) -> Tensor:
        """Return the gradient of a loss with respect to the logits of a pass with a graph."""
        ...


@dataclass(frozen=True, slots=True)
class RouterLoads:
    """How a batch loads its experts, over all routers and processes."""

    fractions: Tensor
    """(E,) float64: mean number of times that a token chooses the expert; the sum is k."""
    num_rows: float
    """Tokens times routers."""
    aux_loss: float
    """The load-balancing loss, without its coefficient."""
    z_loss: float
    """The z-loss, without its coefficient."""
    num_labels: int
    """Labels of the batch, by which its loss counts where several batches add up."""


class RouterLoss:
    """The router losses of one step. Implements `Routing`."""

    def __init__(
        self, rule: RouterRule, device: torch.device, loads: RouterLoads | None, divisor: int
    ) -> None:
        """
        Args:
            loads: What an evaluation of the same batch has returned; None: this is that evaluation.
            divisor: Tokens that the step's summed loss is divided by.
        """
        self._rule, self.loads, self._divisor = rule, loads, divisor
        self._sums = torch.zeros(2 * rule.num_experts + 2, dtype=torch.float64, device=device)
        """Sums as of `RouterRule.sums`."""

    def meet(self, router: str, logits: Tensor, rows: ChunkRows) -> None:
        if self.loads is None:
            self._sums += self._rule.sums(logits)

    def gradient(self, router: str, logits: Tensor, rows: ChunkRows) -> Tensor:
        loads, rule = self.loads, self._rule
        assert loads is not None, "a step with gradients begins with an evaluation"
        share = loads.num_labels / self._divisor / loads.num_rows
        # without autograd: a checkpoint counts what its layers save
        logits = logits.detach()
        weights = logits.softmax(-1)
        slopes = loads.fractions * (rule.coefficient * rule.num_experts * share)
        slopes = slopes.to(weights).expand_as(weights)
        found = torch.ops.aten._softmax_backward_data(slopes, weights, -1, weights.dtype)
        if rule.z_coefficient:
            found += weights * logits.logsumexp(-1, keepdim=True) * (2 * rule.z_coefficient * share)
        return found.to(logits.dtype)  # type: ignore[no-any-return]

    def total(self, num_labels: int, add_up: Callable[[Tensor], Tensor]) -> float:
        """Return the loss of all processes, summed over `num_labels` labels. `add_up`: an
        all-reduce."""
        rule = self._rule
        if self.loads is None:
            sums = add_up(self._sums)
            num_rows = float(sums[-1])
            if not num_rows:
                raise _refusal(rule, "no router in the model's layers", "use a model with experts")
            fractions, of_experts, squares = rule.means(sums)
            aux_loss = rule.num_experts * float(fractions @ of_experts)
            self.loads = RouterLoads(fractions, num_rows, aux_loss, float(squares), num_labels)
        loads = self.loads
        loss = rule.coefficient * loads.aux_loss + rule.z_coefficient * loads.z_loss
        return loss * num_labels

    @property
    def metrics(self) -> dict[str, float]:
        """The losses without their coefficients, by name."""
        assert self.loads is not None
        z_loss = {"z_loss": self.loads.z_loss} if self._rule.z_coefficient else {}
        return {"aux_loss": self.loads.aux_loss} | z_loss


def router_loss(
    rule: RouterRule, model: HFDecoder, plan: ChunkPlan, loads: RouterLoads | None, divisor: int
) -> RouterLoss:
    """Return the router loss of a step. Raises ConfigError for plans that sample or branch, and for
    those that train and were not evaluated before."""
    if model.compiled:
        raise _refusal(rule, "compiled layers", "compile no layers")
    if plan.sampled:
        raise _refusal(rule, "sampled chunks", "remove chunks.sample")
    if plan.trees:
        raise _refusal(rule, "sequences that branch", "plan each answer with its prompt")
    if plan.trained and loads is None:
        change = "run a plan of Engine.plan(..., backward=False) on the batch first and pass its "
        change += "result's `loads`, or call forward_backward"
        raise _refusal(rule, "a plan with backwards alone", change)
    return RouterLoss(rule, model.device, loads, divisor)


def _refusal(rule: RouterRule, what: str, change: str) -> ConfigError:
    return ConfigError(
        given=f"{what}, and a router loss of {rule.num_experts} experts "
        f"(output_router_logits=True, router_aux_loss_coef={rule.coefficient:g})",
        required="how often all tokens of the batch choose each expert, counted before a backward",
        source="the plan of the step, and the model's config",
        change=f"{change}, or {set_in_config({'output_router_logits': False})}",
    )


class RouterOutputs:
    """Router logits as outputs of a call, from which the caller computes a loss. Implements
    `Routing`."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._outputs: dict[str, list[Tensor]] = {}
        self.cotangents: Mapping[str, Sequence[Tensor | None]] = {}
        """By router, the gradient of the caller's loss with respect to each output; None: zeros.
        The caller sets it before the backward."""

    def meet(self, router: str, logits: Tensor, rows: ChunkRows) -> None:
        if self.cotangents:  # a forward before the backward, of which nothing is output
            return
        if router not in self._outputs:
            given, width = self._batch.sequences, logits.shape[1]  # those of others are empty
            self._outputs[router] = [logits.new_zeros((len(s.input_ids), width)) for s in given]
        for index, run, row in self._batch.runs(rows):
            self._outputs[router][index][run.start : run.stop] = logits[row : row + len(run)]

    def gradient(self, router: str, logits: Tensor, rows: ChunkRows) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)  # sequences may share rows
        found = torch.zeros_like(logits, dtype=wide)
        for index, run, row in self._batch.runs(rows):
            own = self.cotangents[router][index]
            if own is not None:
                found[row : row + len(run)] += own[run.start : run.stop]
        return found.to(logits.dtype)

    def finish(self) -> dict[str, list[Tensor]]:
        """Return by router the logits (T, E) of each sequence; drop this object's references to
        them (see `OutputHead.finish`)."""
        found, self._outputs = self._outputs, {}
        return found
