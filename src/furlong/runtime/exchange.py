"""Exchanges between the processes of a pool, on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """Implements `ops.exchange.Exchange` by one process group for each size of a place."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """`groups`: for each size of a place, the one that this process is in."""
        self._groups = groups

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        x = x.contiguous()
        into = x.new_empty((sum(recv_rows), x.shape[1]))
        work = dist.all_to_all_single(
            into, x, list(recv_rows), list(send_rows), group=self._groups[size], async_op=True
        )

        return partial(_arrived, work, into, x)


def _arrived(work: dist.Work, into: Tensor, sent: Tensor) -> Tensor:
    """Rows that come in, when they are there; `sent` lives until it has gone."""
    work.wait()
    return into
