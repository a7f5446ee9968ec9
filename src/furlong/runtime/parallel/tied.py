"""Tied embeddings in a pipeline: the first and the last stage each hold the weight.

Both hold it under the name of the input embeddings, and start with equal values. The first one's
gradient is that of the embedding, the last one's that of the head; after their sum both optimizers
make the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from furlong.models.causal_lm import CausalLM


@dataclass(frozen=True)
class TiedWeight:
    """This process's copy of a weight that two stages hold, if it has one."""

    group: dist.ProcessGroup | None
    """The first and the last stage of this pipeline; None for a process without a copy."""
    is_second: bool = False
    """Whether the copy is the last stage's."""

    def add_up(self, model: CausalLM) -> None:
        """Add the gradients of both copies up, in place: after every Reduce, before clipping."""
        weight = model.tied_weight
        if self.group is None or weight is None or not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad = weight.grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=self.group)

    @contextmanager
    def adding_up(self, model: CausalLM) -> Iterator[None]:
        """Within it runs a step, of which the gradients of both copies are then added up; what
        there was before it is a sum of both already."""
        weight = model.tied_weight
        if self.group is None or weight is None or not weight.requires_grad:
            yield
            return
        before, weight.grad = weight.grad, None
        try:
            yield
            self.add_up(model)
        except BaseException:
            weight.grad = before
            raise
        if before is not None:
            weight.grad = before if weight.grad is None else before.add_(weight.grad)

    def counted_elsewhere(self, model: CausalLM) -> list[nn.Parameter]:
        """This process's parameters that the first stage counts in the norm of all gradients."""
        weight = model.tied_weight
        return [weight] if self.is_second and weight is not None else []


def open_tied(pipelines: Sequence[Sequence[int]], *, tied: bool) -> TiedWeight:
    """The tied weight of this process. `pipelines` as in `links.open_links`; collective as that is.

    `tied`: whether the model's config ties its head to its input embeddings.
    """
    me, found = dist.get_rank(), TiedWeight(None)
    if not tied or len(pipelines[0]) == 1:
        return found
    for own in pipelines:
        ends = [own[0], own[-1]]
        group = dist.new_group(
            ends, group_desc=f"tied embeddings of processes {ends[0]}, {ends[1]}"
        )
        if me in ends:
            found = TiedWeight(group, is_second=me == ends[1])
    return found
