"""Bytes of every action of a plan, by what they are for; implements the checker's Memory.

memory = PlanMemory(shape, training, budget_bytes)
check(plan, memory)                    # refuses a plan that does not fit
memory.curve(plan, rank).peak          # the parts where the rank needs most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory.activations import Activations
from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.heap import NO_HEAP, Heap
from furlong.cost.memory.stored_layers import gathered_tokens
from furlong.cost.memory.traffic import PlanTraffic
from furlong.cost.memory.training import Training
from furlong.cost.memory.walk import MemoryRules, walk
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import ChunkPlan, Forward

_TILE_LOGITS = {False: 2**27, True: 2**22}
_LEAST_TILE_TOKENS = {False: 64, True: 128}
"""Of a tile of the loss; on a CPU (True), where it also has a most, and elsewhere."""
_MOST_CPU_TILE_TOKENS = 256


@dataclass(frozen=True)
class PlanMemory:
    """The memory of any plan of one model, on devices with one budget."""

    shape: ModelShape
    training: Training
    device_budget_bytes: int
    activations: Activations | None = None
    """Default: what transformers' modules save (`activations.eager`)."""
    activation_factor: float = 1.0
    """Multiplies the graphs: measured over counted bytes."""
    overhead_bytes: int = 0
    """Counted as buffers all through the step: a framework's own."""
    heap: Heap = NO_HEAP
    """What it holds is counted as buffers, too."""
    whole_logits: bool = False
    """Whether the loss holds the logits of a whole chunk and not of a tile (other frameworks)."""

    device_type: str = "cuda"
    """cuda or cpu: it decides how large segments of the store and tiles of the loss are."""

    def budget_bytes(self, rank: int) -> int:
        return self.device_budget_bytes

    @property
    def tile_tokens(self) -> int | None:
        """Rows of a tile of the loss, as `ops.loss` cuts it; None where it is not cut."""
        if self.whole_logits:
            return None
        on_cpu = self.device_type == "cpu"
        tokens = max(_TILE_LOGITS[on_cpu] // self.shape.vocab_size, _LEAST_TILE_TOKENS[on_cpu])
        return min(tokens, _MOST_CPU_TILE_TOKENS) if on_cpu else tokens

    def bytes_after(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """For each action of the rank, the peak of device bytes in use while it runs."""
        return self.curve(plan, rank).device_bytes

    def curve(self, plan: ChunkPlan, rank: int) -> MemoryCurve:
        """The same by parts, with the host's; of a pool the process that needs most."""
        return self.walk(plan, rank)[0]

    def traffic(self, plan: ChunkPlan, rank: int) -> PlanTraffic:
        """Bytes that the rank moves between tiers; of a pool the process that moves most."""
        return self.walk(plan, rank)[1]

    def walk(self, plan: ChunkPlan, rank: int) -> tuple[MemoryCurve, PlanTraffic]:
        """Both, from one walk."""
        walks = self._walks(plan, rank)
        if len(walks) == 1:
            return walks[0]
        curves = [curve for curve, _ in walks]
        worst = np.stack([curve.device.sum(axis=1) for curve in curves]).argmax(axis=0)
        device = np.stack([curve.device for curve in curves])[worst, np.arange(len(worst))]
        host = np.stack([curve.host for curve in curves]).max(axis=0)
        disk = np.stack([curve.disk for curve in curves]).max(axis=0)
        most = max((moved for _, moved in walks), key=lambda t: float((t.read + t.written).sum()))
        return MemoryCurve(device, host, disk), most

    def _walks(self, plan: ChunkPlan, rank: int) -> list[tuple[MemoryCurve, PlanTraffic]]:
        """Those of the processes of the pool; one for all that hold the same."""
        held = self.heap.held_bytes(self.shape, self.training, plan, rank)
        rules = MemoryRules(
            shape=self.shape,
            training=self.training,
            activations=self.activations,
            activation_factor=self.activation_factor,
            overhead_bytes=self.overhead_bytes + held,
            tile_tokens=self.tile_tokens,
            device_type=self.device_type,
        )
        return [walk(rules, plan, rank, process) for process in _unlike(plan, rank, self.shape)]


def _unlike(plan: ChunkPlan, rank: int, shape: ModelShape) -> list[int]:
    """One process of the pool for all that hold as many tokens of every chunk of the rank, get as
    many of others, and hold as many of every cut sequence."""
    if plan.sp_size == 1:
        return [0]
    rows: list[NDArray[np.float64]] = []
    for chunk in {a.chunk: None for a in plan.actions[rank] if isinstance(a, Forward)}:
        tokens, gathered = np.zeros(plan.sp_size), np.zeros(plan.sp_size)
        for piece in plan.chunks[chunk].slices:
            who = slice(piece.place.first, piece.place.stop)
            tokens[who] += piece.num_tokens / piece.place.size
            gathered[who] += gathered_tokens(piece, piece.place.first, shape)
            if piece.seq_id in plan.groups:
                share = np.zeros(plan.sp_size)
                share[who] = 1 / piece.place.size
                rows.append(share)
        rows += tokens, gathered
    processes: list[int] = np.unique(rows, axis=1, return_index=True)[1].tolist() if rows else [0]
    return processes


@dataclass(frozen=True)
class TierMemory:
    """The same plan's bytes in a tier below the device: of all processes of an sp group, the one
    that needs most. Implements the checker's Memory too."""

    device: PlanMemory
    tier: Literal["host", "disk"]
    tier_budget_bytes: int

    def budget_bytes(self, rank: int) -> int:
        return self.tier_budget_bytes

    def bytes_after(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        in_use: list[int] = getattr(self.device.curve(plan, rank), self.tier).tolist()
        return in_use
