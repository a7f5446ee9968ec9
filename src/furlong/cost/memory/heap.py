"""Freed memory that the C library's heap holds, in a process that computes on a CPU.

glibc takes blocks of up to 32 MiB from its heap once such a one has been freed, and gives little
back: blocks that live longer (gradients, stored K,V) lie between those of a graph that is gone, and
the next graph does not find room in all of the holes. Plans with a lower tier, which are there for
memory, give back what the next actions do not need (`runtime.memory.heap`); others keep it, for
time.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.cost.memory.cells import stage_bytes
from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.passes import passes
from furlong.plan.values import ON_DEVICE, Backward, ChunkPlan, Forward, Recompute

SPARE = 0.1
SPARE_BYTES = 2**22
"""Bytes that a plan with a lower tier leaves free beyond what its next actions need, and a share of
that."""
_LARGEST_BLOCK = 2**25
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger blocks go back to the system when they are freed."""


@dataclass(frozen=True, slots=True)
class Heap:
    """The heap as it was measured; it holds nothing where it was not, and on a GPU."""

    blocks: float = 0.0
    """Number of freed blocks of the largest size that it holds."""
    share: float = 0.0
    """Share that it holds of one layer of the largest graph, where more than one cell makes a
    graph: a layer's backward frees its part of the graph while it takes as much for gradients."""

    def held_bytes(self, shape: ModelShape, training: Training, plan: ChunkPlan, rank: int) -> int:
        """Bytes that it holds all through a step."""
        if not self.blocks and not self.share:
            return 0
        largest = min(_largest_block(shape, training, plan, rank), _LARGEST_BLOCK)
        held = self.blocks * largest
        if self.share:
            graphs = _layer_graphs(shape, training, plan, rank)
            held += self.share * max(graphs) if len(graphs) > 1 else 0.0
            if plan.tiers != ON_DEVICE:
                held = min(held, SPARE * max(graphs, default=0.0) + SPARE_BYTES)
        return round(held)


NO_HEAP = Heap()


def _largest_block(shape: ModelShape, training: Training, plan: ChunkPlan, rank: int) -> float:
    """Bytes of the largest block that comes and goes with the cells: activations, gradients of a
    matrix."""
    widest = max(shape.hidden_size, shape.q_size, *(mlp.width for mlp in shape.mlps))
    tokens = [plan.chunks[a.chunk].num_tokens for a in plan.actions[rank] if isinstance(a, Forward)]
    largest = max(tokens, default=0) * widest * training.compute_bytes
    if training.lora is None and any(isinstance(a, Backward) for a in plan.actions[rank]):
        largest = max(largest, shape.hidden_size * widest * training.gradient_bytes)
    return largest


def _layer_graphs(shape: ModelShape, training: Training, plan: ChunkPlan, rank: int) -> list[float]:
    """Bytes per layer of every graph that the rank makes."""
    cells = [stage_bytes(shape, plan.stages, s, training) for s in range(len(plan.stages))]
    return [
        plan.chunks[action.chunk].num_tokens
        * cells[action.stage].graph(what.recompute_layers)
        / plan.stages[action.stage]
        for action, what in zip(plan.actions[rank], passes(plan, rank), strict=True)
        if isinstance(action, (Forward, Recompute)) and what.computes == "graph"
    ]
