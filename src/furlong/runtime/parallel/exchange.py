"""Exchanges between the processes of a pool, on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """Implements `ops.exchange.Exchange` by one process group for each size of a place."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """`groups`: for each size of a place, the one that this process is in."""
        self._groups = groups
        self._under_way: dict[int, dist.Work] = {}
        self.num_started = 0
        self.forms: set[tuple[int, torch.dtype]] = set()
        """Head dims and dtypes of all that has travelled."""

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        x = x.contiguous()
        into = x.new_empty((sum(recv_rows), x.shape[1]))
        work = dist.all_to_all_single(
            into, x, list(recv_rows), list(send_rows), group=self._groups[size], async_op=True
        )
        self.num_started += 1
        self.forms.add((x.shape[1], x.dtype))
        self._under_way[self.num_started] = work
        return partial(self._arrived, self.num_started, into, x)

    def settle(self) -> None:
        """Wait for what has been started and nobody waits for any more."""
        for number in [*self._under_way]:
            self._under_way.pop(number).wait()

    def _arrived(self, number: int, into: Tensor, sent: Tensor) -> Tensor:
        """Rows that come in, when they are there; `sent` lives until it has gone."""
        self._under_way.pop(number).wait()
        return into
