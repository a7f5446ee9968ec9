"""Bytes of every action of a plan, by what they are for; implements the checker's Memory.

memory = PlanMemory(shape, training, budget_bytes)
check(plan, memory)                    # refuses a plan that does not fit
memory.curve(plan, rank).peak          # the parts where the rank needs most
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.rules import MemoryRules
from furlong.cost.memory.stored_layers import gathered_tokens
from furlong.cost.memory.traffic import PlanTraffic
from furlong.cost.memory.walk import walk
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import ChunkPlan, Forward


class PlanMemory(MemoryRules):
    """The memory of any plan of one model, on devices with one budget."""

    def budget_bytes(self, rank: int) -> int:
        return self.device_budget_bytes

    def peak_bytes_of_actions(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """For each action of the rank, the peak of device bytes in use while it runs."""
        return self.curve(plan, rank).device_bytes

    def curve(self, plan: ChunkPlan, rank: int) -> MemoryCurve:
        """Bytes in every tier while each action of the rank runs; of a pool those of the process
        that needs most."""
        return self.walk(plan, rank)[0]

    def traffic(self, plan: ChunkPlan, rank: int) -> PlanTraffic:
        """Bytes that the rank moves between tiers; of a pool those of the process that moves
        most."""
        return self.walk(plan, rank)[1]

    def walk(self, plan: ChunkPlan, rank: int) -> tuple[MemoryCurve, PlanTraffic]:
        """The curve and the traffic, from one walk."""
        heap = self.heap.held_bytes(self.shape, self.training, plan, rank)
        overhead = self.overhead_bytes + heap
        unlike = _unlike(plan, rank, self.shape)
        walks = [walk(self, plan, rank, process, overhead) for process in unlike]
        if len(walks) == 1:
            return walks[0]
        curves = [curve for curve, _ in walks]
        worst = np.stack([curve.device.sum(axis=1) for curve in curves]).argmax(axis=0)
        device = np.stack([curve.device for curve in curves])[worst, np.arange(len(worst))]
        host = np.stack([curve.host for curve in curves]).max(axis=0)
        disk = np.stack([curve.disk for curve in curves]).max(axis=0)
        most = max((moved for _, moved in walks), key=lambda t: float((t.read + t.written).sum()))
        return MemoryCurve(device, host, disk), most


def _unlike(plan: ChunkPlan, rank: int, shape: ModelShape) -> list[int]:
    """One process of the pool for all that hold as many tokens of every chunk of the rank, exchange
    as many, get as many of others, and hold as many of every cut sequence."""
    if plan.sp_size == 1:
        return [0]
    rows: list[NDArray[np.float64]] = []
    for chunk in {a.chunk: None for a in plan.actions[rank] if isinstance(a, Forward)}:
        tokens, gathered, exchanged = np.zeros((3, plan.sp_size))
        for piece in plan.chunks[chunk].slices:
            who = slice(piece.place.first, piece.place.stop)
            tokens[who] += piece.num_tokens / piece.place.size
            gathered[who] += gathered_tokens(piece, piece.place.first, shape)
            if piece.place.size > 1:
                exchanged[who] += piece.num_tokens / piece.place.size
            if piece.seq_id in plan.groups:
                share = np.zeros(plan.sp_size)
                share[who] = 1 / piece.place.size
                rows.append(share)
        rows += tokens, gathered, exchanged
    processes: list[int] = np.unique(rows, axis=1, return_index=True)[1].tolist() if rows else [0]
    return processes
