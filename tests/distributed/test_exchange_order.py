"""Exchanges on a switch that behaves as NCCL does: one order never hangs, several do."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.executors import executor_of
from helpers.placed import OfAPool, plan_of
from helpers.random_chunks import random_chunks
from helpers.switch import DeadlockError, Switch, SwitchExchange, run_pool
from helpers.tiny_families import build
from torch import Tensor

from furlong.models.decoder import HFDecoder
from furlong.ops.attention import AttentionRule, chunk_attention
from furlong.ops.backends.reference import Reference
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import ChunkRows, rows_of
from furlong.planners.options import ChunkOptions

N, K, H = 4, 2, 8
NESTED = Chunk(
    (
        Slice(0, 0, 9, Place(0, 4)),
        Slice(1, 0, 6, Place(0, 2)), Slice(2, 0, 5, Place(2, 2)),
        Slice(3, 0, 4, Place(0, 1)), Slice(4, 0, 5, Place(0, 1)), Slice(5, 0, 3, Place(3, 1)),
    )
)  # fmt: skip


class NothingBefore:
    """The layer of a chunk of whole sequences."""

    def keeps(self, slice_index: int) -> bool:
        return False

    def prefix(self, slice_index: int, window: int | None, *, gradients: bool) -> Any:
        return iter(())

    def later_grads(self, slice_index: int) -> None:
        return None


def attend(rows: ChunkRows, exchange: Any, backend: Any = None) -> None:
    """Forward and backward of one layer."""
    q, k, v = (torch.randn(n, rows.num_rows, H).requires_grad_() for n in (N, K, K))
    out, _ = chunk_attention(
        q, k, v, rows=rows, layer_kv=NothingBefore(), rule=AttentionRule(0.4),
        backend=backend or Reference(), exchange=exchange,
    )  # fmt: skip
    out.sum().backward()


def rows_in(chunk: Chunk, sp_size: int) -> list[ChunkRows]:
    return [rows_of(chunk, p, sp_size=sp_size, q_heads=N, kv_heads=K) for p in range(sp_size)]


def run_chunk(pool: list[ChunkRows]) -> Switch:
    switch = Switch(len(pool))
    run_pool(switch, lambda exchange: attend(pool[exchange.process], exchange))
    return switch


def test_one_order_never_hangs_and_orders_of_their_own_mostly_do():
    draw = random.Random(0)
    num_hung = num_several = 0
    for case in range(16):
        sp_size = (8, 6)[case % 2]  # in a pool of 6 places of 2 and 3 overlap
        _, (chunk, *_) = random_chunks(
            draw, sp_size, num_chunks=1, num_sequences=draw.randint(3, 9), max_tokens=6
        )
        pool = rows_in(chunk, sp_size)
        switch = run_chunk(pool)
        for place in {piece.place for piece in chunk.slices if piece.place.size > 1}:
            lists = [switch.log[p].count((place.first, place.size)) for p in range(sp_size)]
            inside = range(place.first, place.stop)
            assert lists == [4 if p in inside else 0 for p in range(sp_size)], "two ways, twice"
        several = [p for p, rows in enumerate(pool) if len(rows.exchanged) > 1]
        num_several += len(several) > 1
        shuffled = [replace(x, levels=tuple(draw.sample(x.levels, len(x.levels)))) for x in pool]
        orders = {tuple(level.size for level in x.exchanged) for x in shuffled}
        try:
            run_chunk(shuffled)
        except DeadlockError:
            num_hung += 1
            assert len(orders) > 1
    assert num_several > 8 and num_hung > num_several // 2, (num_several, num_hung)


@dataclass
class Noted:
    """An exchange and a backend that note what happens when."""

    exchange: SwitchExchange
    events: list[str] = field(default_factory=list)

    def start(self, x: Tensor, send_rows: Any, recv_rows: Any, size: int) -> Callable[[], Tensor]:
        self.events.append(f"start {size}")
        way = self.exchange.start(x, send_rows, recv_rows, size)

        def wait() -> Tensor:
            self.events.append(f"wait {size}")
            return way()

        return wait

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Any) -> tuple[Tensor, Tensor]:
        self.events.append(f"attend {q.shape[1]}")
        return Reference().forward(q, k, v, block)

    def backward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.events.append(f"attend {given[1].shape[1]}")
        return Reference().backward(*given)


ORDER = [
    "start 4", "start 2", "attend 4", "wait 4", "attend 9", "start 4", "wait 2", "attend 6",
    "start 2", "attend 5", "wait 4", "wait 2",
]  # fmt: skip


def test_own_work_stands_between_the_start_and_the_end_of_every_way():
    """Process 0 has 9 rows of all four, 6 of two, and slices of 4 and 5 tokens of its own."""
    pool, switch = rows_in(NESTED, 4), Switch(4)
    noted = [Noted(SwitchExchange(switch, p)) for p in range(4)]
    run_pool(switch, lambda x: attend(pool[x.process], noted[x.process], noted[x.process]))
    assert noted[0].events == ORDER * 2
    assert [e for e in noted[1].events if "start" in e] == [e for e in ORDER * 2 if "start" in e]


@dataclass
class CountedByAction:
    exchange: SwitchExchange
    num_started: int = 0

    def start(self, *given: Any) -> Callable[[], Tensor]:
        self.num_started += 1
        return self.exchange.start(*given)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        # in and out of three layers; of a forward up to the last K,V, these alone travel there
        ("kv", {"F0.0": 5, "F1.0": 0, "R1.0": 6, "B1.0": 6, "R0.0": 6, "B0.0": 6}),
        # two layers are remembered: nothing travels until the backward
        ("attention", {"F0.0": 5, "F1.0": 0, "R1.0": 6, "B1.0": 6, "R0.0": 2, "B0.0": 6}),
    ],
)
def test_a_recompute_exchanges_nothing_that_is_remembered(keep, expected):
    model = build("llama")
    lens = [12]
    chunks = [Chunk((Slice(0, a, b, Place(0, 2)),)) for a, b in ((0, 7), (7, 12))]
    plan = plan_of(lens, chunks, 2, ChunkOptions(size=8, keep=keep, num_retained=0), num_layers=3)
    copies, sequences = [model, deepcopy(model)], batch(lens)

    def process(exchange: SwitchExchange) -> list[int]:
        whole, counted, found = HFDecoder(copies[exchange.process]), CountedByAction(exchange), []
        with whole.installed():
            executor = executor_of(
                whole, plan, sequences, comms=OfAPool(), process=exchange.process, exchange=counted
            )
            executor.run(lambda: found.append(counted.num_started))
        return found

    for totals in run_pool(Switch(2), process):
        each = [b - a for a, b in zip([0, *totals], totals, strict=False)]
        names = [f"{type(a).__name__[0]}{a.chunk}.0" for a in plan.actions[0][:-1]]
        assert dict(zip(names, each, strict=False)) == expected
