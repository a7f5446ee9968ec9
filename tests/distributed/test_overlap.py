"""Own work hides exchanges: the seconds that they cost, with kernels that sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.placed_cases import gloo_exchange
from helpers.ranks import run_ranks
from torch import Tensor

from furlong.ops.attention import AttentionRule, chunk_attention
from furlong.ops.backends.base import Backend
from furlong.ops.sequence_parallel import AllToAll
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import rows_of

OWN_S, BACKWARD = 0.03, 2.5
"""Seconds of a process's own slices, forward, and how many times that backward."""
CHUNK = Chunk(
    (
        Slice(0, 0, 40, Place(0, 2)),
        Slice(1, 0, 30, Place(0, 1)), Slice(2, 0, 30, Place(0, 1)),
        Slice(3, 0, 30, Place(1, 1)), Slice(4, 0, 30, Place(1, 1)),
    )
)  # fmt: skip
NUM_OWN_ROWS = 60


class Sleeping(Backend):
    """Kernels that take their time and compute nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Any) -> tuple[Tensor, Tensor]:
        time.sleep(OWN_S * q.shape[1] / NUM_OWN_ROWS)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, q, k, v = given[:4]
        time.sleep(BACKWARD * OWN_S * q.shape[1] / NUM_OWN_ROWS)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class NothingBefore:
    def keeps(self, slice_index: int) -> bool:
        return False

    def prefix(self, slice_index: int, window: int | None, *, gradients: bool) -> Any:
        return iter(())

    def later_grads(self, slice_index: int) -> None:
        return None


@dataclass
class Delayed:
    """Exchanges that take at least `delay_s`; where they are `serial`, nothing runs beside them."""

    exchange: AllToAll
    delay_s: float
    serial: bool

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        ready_s = time.perf_counter() + self.delay_s
        way = self.exchange.start(x, send_rows, recv_rows, size)

        def wait() -> Tensor:
            arrived = way()
            time.sleep(max(0.0, ready_s - time.perf_counter()))
            return arrived

        if not self.serial:
            return wait
        arrived = wait()
        return lambda: arrived


def step_s(rank: int, exchange: AllToAll, delay_s: float, serial: bool) -> float:
    """Seconds of one layer, forward and backward."""
    rows = rows_of(CHUNK, rank, sp_size=2, q_heads=4, kv_heads=2)
    q, k, v = (torch.zeros(n, rows.num_rows, 8).requires_grad_() for n in (4, 2, 2))
    dist.barrier()
    started_s = time.perf_counter()
    out, _ = chunk_attention(
        q, k, v, rows=rows, layer_kv=NothingBefore(), rule=AttentionRule(1.0), backend=Sleeping(),
        exchange=Delayed(exchange, delay_s, serial),
    )  # fmt: skip
    out.backward(torch.zeros_like(out))
    dist.barrier()
    return time.perf_counter() - started_s


def hidden_shares(rank: int, delays_s: Sequence[float]) -> list[float]:
    """For each delay, the part that is hidden of what own work can hide."""
    exchange = gloo_exchange(rank, 2)
    shares = []
    for delay_s in delays_s:
        saved_s = [
            step_s(rank, exchange, delay_s, True) - step_s(rank, exchange, delay_s, False)
            for _ in range(6)
        ]
        halves_s = OWN_S / 2, BACKWARD * OWN_S / 2
        most_s = sum(2 * min(delay_s, half_s) for half_s in halves_s)  # a way in and one back
        shares.append(median(saved_s) / most_s)
    return shares


@pytest.mark.slow
def test_own_work_hides_exchanges():
    shares = run_ranks(hidden_shares, [0.5 * OWN_S, OWN_S, 2 * OWN_S], num_ranks=2)
    assert min(min(own) for own in shares) >= 0.6, shares
