"""The sleep backend: the real runtime on a tiny model, whose cells take a cost model's seconds.

Nothing in the runtime knows of it. A layer's norm sleeps for the matrices, the attention backend
for the kernels, in proportion to the (query, key) pairs of each call; the head sleeps when its
action begins. So each process of a pool takes its own seconds, in the order in which its work comes
between exchanges. What the runtime itself computes meanwhile counts as part of them.

Messages and all-to-alls are real, but tiny. Each carries the time at which it was sent in its first
column, and its receiver waits until the modelled link would have brought it: a message starts when
it is sent, its receive is posted and the one before it is through; an all-to-all when the last
process has come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from furlong.cost.model import CostModel
from furlong.cost.seconds import ChunkTable, PassPart, chunk_table
from furlong.ops.backends.base import Backend, Block, lse_dtype
from furlong.ops.sequence_parallel import Exchange
from furlong.plan.plan import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Send,
)
from furlong.runtime.distributed.comms import Comms

now_s = time.perf_counter
"""A clock that all processes of a machine share."""


def sleep_until(moment_s: float) -> None:
    if (left_s := moment_s - now_s()) > 0:
        time.sleep(left_s)


@dataclass(frozen=True)
class Shares:
    """Seconds of one pass on this process."""

    layer_s: float = 0.0
    """In each layer that runs, beside its attention."""
    pair_s: float = 0.0
    """For each (query, key) pair in each layer whose attention runs, over all heads."""
    exchange_s: dict[int, float] | None = None
    """By size of a place, of one all-to-all on its link."""


NOTHING = Shares()


class Pace:
    """The seconds of one plan's actions on this process, and the sleep that makes them pass."""

    def __init__(self, model: CostModel, plan: ChunkPlan, rank: int, process: int) -> None:
        shape, tile = model.shape, model.hardware.tile_tokens
        self._plan, self._rank, self._process = plan, rank, process
        self._num_heads = shape.num_heads
        self._costs, self._alone = model.costs(plan), model.costs(plan, free=("all-to-all",))
        table = chunk_table(plan.chunks, shape, plan.sp_size, tile)
        self._table, self._without_keys = table, _without_keys(table)
        pairs = chunk_table(plan.chunks, shape, plan.sp_size)
        self._pairs = sum((*pairs.local_keys.values(), *pairs.shared_keys.values()))
        self._forward = self._backward = NOTHING
        self._debt_s, self._mark_s = 0.0, time.thread_time()
        self.action: Action | None = None

    def begin(self, action: Action) -> None:
        """An action begins: its head sleeps at once."""
        if self.action is None:  # what came before the step is no part of it
            self._mark_s = time.thread_time()
        self.action, self._forward, self._backward = action, NOTHING, NOTHING
        if isinstance(action, (Forward, Recompute, RebuildKV, Backward)):
            for part in self._costs.parts(action):
                if part.work in ("head", "head and back"):
                    self.sleep(self._seconds(self._costs, part, action, self._table))
                elif part.work == "backward":
                    self._backward = self._shares(part, action)
                else:
                    self._forward = self._shares(part, action)

    def layer(self, *, backward: bool) -> None:
        """A layer's matrices run."""
        self.sleep(self._of(backward).layer_s)

    def attend(self, num_heads: int, num_pairs: float, *, backward: bool) -> None:
        """Attention of some heads runs."""
        self.sleep(self._of(backward).pair_s * num_pairs * num_heads / self._num_heads)

    def exchange_s(self, size: int) -> float:
        """Seconds of an all-to-all that is started now."""
        both = self._backward.exchange_s, self._forward.exchange_s
        return next((found[size] for found in both if found is not None), 0.0)

    def sleep(self, seconds: float) -> None:
        """Let seconds pass since the last time, less those that the thread has computed."""
        due_s = seconds - (time.thread_time() - self._mark_s) - self._debt_s
        if due_s > 0:
            started_s = now_s()
            time.sleep(due_s)
            self._debt_s = now_s() - started_s - due_s  # the system wakes nobody in time
        else:
            self._debt_s = -due_s
        self._mark_s = time.thread_time()

    def transfer_s(self, action: Recv) -> float:
        sent = Send(action.payload, action.chunk, action.stage, self._rank)
        return self._costs.transfer_s(sent, action.peer)

    def reduce_s(self, stage: int) -> float:
        return self._costs.compute_s(Reduce(stage), self._rank)

    def _of(self, backward: bool) -> Shares:
        return self._backward if backward else self._forward

    def _shares(self, part: PassPart, action: Any) -> Shares:
        height = self._plan.stages[action.stage]
        num_layers = part.layers if part.work == "first layers" else height
        attending = num_layers - part.remembered - (part.work == "to last kv")
        attending = height if part.work == "backward" else max(0, attending)
        rest_s = self._seconds(self._alone, part, action, self._without_keys)
        attention_s = self._seconds(self._alone, part, action, self._table) - rest_s
        pairs = float(self._pairs[self._process, action.chunk]) * attending
        return Shares(
            layer_s=rest_s / num_layers,
            pair_s=attention_s / pairs if pairs else 0.0,
            exchange_s={
                size: self._exchanges_s(part, action, size) / max(1, 2 * attending)
                for size in self._table.exchanged_tokens
            },
        )

    def _exchanges_s(self, part: PassPart, action: Any, size: int) -> float:
        """Seconds of all all-to-alls of one size in a pass."""
        table = self._without_keys
        only = {n: x if n == size else 0 * x for n, x in table.exchanged_tokens.items()}
        table = replace(table, exchanged_tokens=only)
        waits_s = self._seconds(self._costs, part, action, table)
        return waits_s - self._seconds(self._alone, part, action, table)

    def _seconds(self, costs: Any, part: PassPart, action: Any, table: ChunkTable) -> float:
        (seconds,) = costs.process_seconds((part,), action.stage, table)
        return float(seconds[self._process, action.chunk])


def _without_keys(table: ChunkTable) -> ChunkTable:
    nothing = [
        {window: np.zeros_like(x) for window, x in keys.items()}
        for keys in (table.local_keys, table.shared_keys)
    ]
    return replace(table, local_keys=nothing[0], shared_keys=nothing[1])


class Clocked:
    """Where a model's layers and kernels find the pace of the plan that runs; None: they rest."""

    pace: Pace | None = None


class SleepingBackend(Backend):
    """Attention kernels that take their time and compute nothing."""

    def __init__(self, clocked: Clocked) -> None:
        self._clocked = clocked

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        self._sleep(q, k, block, backward=False)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=lse_dtype(q.dtype))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._sleep(q, k, block, backward=True)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _sleep(self, q: Tensor, k: Tensor, block: Block, *, backward: bool) -> None:
        assert block.window is None and self._clocked.pace is not None
        num_rows, num_keys = q.shape[1], k.shape[1]
        seen = num_rows * num_keys
        if not block.is_full(num_rows, num_keys):
            assert block.is_causal(num_rows, num_keys)
            seen = num_rows * (num_rows + 1) // 2
        self._clocked.pace.attend(q.shape[0], seen, backward=backward)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clocked: Clocked) -> Tensor:
        ctx.clocked = clocked
        if clocked.pace is not None:
            clocked.pace.layer(backward=False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.clocked.pace is not None:
            ctx.clocked.pace.layer(backward=True)
        return gradient, None


class SleepingNorm(nn.Module):
    """Stands for the matrices of a layer, in front of its attention."""

    def __init__(self, clocked: Clocked) -> None:
        super().__init__()
        self._clocked = clocked

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self._clocked)


@dataclass
class StampedExchange:
    """All-to-alls that arrive when the modelled link would have brought them."""

    inner: Exchange
    pace: Pace

    def __getattr__(self, name: str) -> Any:
        """All else is as it is."""
        return getattr(self.inner, name)

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        started_s, takes_s = now_s(), self.pace.exchange_s(size)
        x = x.clone()
        x[:, 0] = started_s
        way = self.inner.start(x, send_rows, recv_rows, size)

        def wait() -> Tensor:
            arrived = way()
            last_s = max(started_s, float(arrived[:, 0].max())) if len(arrived) else started_s
            sleep_until(last_s + takes_s)
            return torch.zeros_like(arrived)

        return wait


class StampedComms:
    """A process's comms, whose messages arrive when the modelled link would have brought them; one
    receive is posted ahead."""

    def __init__(self, inner: Comms, pace: Pace) -> None:
        self._inner, self._pace = inner, pace
        self._free_s: dict[int, float] = {}
        """By peer, when the last message from it had come and the next was posted."""

    def __getattr__(self, name: str) -> Any:
        """All else is as it is."""
        return getattr(self._inner, name)

    def send(self, action: Send, x: Tensor) -> None:
        x = torch.zeros_like(x)
        x[0, 0] = now_s()
        self._inner.send(action, x)

    def recv(self, action: Recv) -> Tensor:
        x = self._inner.recv(action)
        begins_s = max(float(x[0, 0]), self._free_s.get(action.peer, 0.0))
        sleep_until(begins_s + self._pace.transfer_s(action))
        self._free_s[action.peer] = now_s()
        return torch.zeros_like(x)

    def reduce(self, stage: int) -> None:
        self._inner.reduce(stage)
        time.sleep(self._pace.reduce_s(stage))
