"""Exchanges between the processes of a pool, on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.ops.exchange import Exchange


class PoolExchange(Exchange, Protocol):
    """The exchanges of a step: those of its places, and the sum of its losses."""

    def summed(self, x: Tensor) -> Tensor:
        """The sum of x over the pool."""
        ...


class AllToAll:
    """Implements `PoolExchange` by one process group for each size of a place."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup], pool: dist.ProcessGroup) -> None:
        """`groups`: for each size of a place, the one that this process is in."""
        self._groups, self._pool = groups, pool

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        x = x.contiguous()
        into = x.new_empty((sum(recv_rows), x.shape[1]))
        work = dist.all_to_all_single(
            into, x, list(recv_rows), list(send_rows), group=self._groups[size], async_op=True
        )

        return partial(_arrived, work, into, x)

    def summed(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._pool)
        return total


def _arrived(work: dist.Work, into: Tensor, sent: Tensor) -> Tensor:
    """Rows that come in, when they are there; `sent` lives until it has gone."""
    work.wait()
    return into
