"""The norm of gradients of which each process holds a part, and their clipping."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from furlong.runtime.parallel.ranks import Ranks


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    ranks: Ranks | None = None,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> float:
    """The L2 norm of all gradients before clipping, the same on all processes, which call it
    together; above `max_norm` (None: no bound) they are scaled down to it.

    `counted_elsewhere`: parameters that another stage has, too, and counts.
    """
    clipped = list(parameters)
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    norm = get_total_norm(
        [p.grad for p in clipped if p.grad is not None and id(p) not in elsewhere]
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if ranks is not None and ranks.pp > 1:
        # of no gradients it lies on the CPU, where others of the group do not wait
        square = norm.to(clipped[0].device).double().square()
        dist.all_reduce(square, group=ranks.mesh["pp"].get_group())
        norm = square.sqrt()
    if max_norm is not None:
        clip_grads_with_norm_(clipped, max_norm, norm)
    return float(norm)
