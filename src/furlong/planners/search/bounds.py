"""Lower bounds of a pipeline's step from its chunks alone, before anything is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.model import CostModel
from furlong.plan.values import Backward, Chunk, ChunkPlan, Forward
from furlong.planners.layout import first_alike


def stage_bounds_s(
    chunks: Sequence[Chunk],
    seq_lens: Sequence[int],
    stages: tuple[int, ...],
    sp_size: int,
    model: CostModel,
    *,
    fills: bool = True,
) -> list[float]:
    """For each stage the least seconds of a step: a forward and a backward of every chunk, and with
    `fills` those of one chunk on all stages before it."""
    alike = first_alike(model.shape, stages)
    cells = tuple(a for c in range(len(chunks)) for a in (Forward(c, 0, "all"), Backward(c, 0)))
    actions = [
        tuple(replace(a, stage=stage) for a in cells) if first == stage else ()
        for stage, first in enumerate(alike)
    ]
    plan = ChunkPlan(tuple(seq_lens), tuple(chunks), stages, tuple(actions), sp_size=sp_size)
    costs = model.costs(plan)
    seconds = [[costs.compute_s(a, rank) for a in own] for rank, own in enumerate(actions)]
    bounds_s, filled_s = [], 0.0
    for first in alike:
        own_s = seconds[first]
        bounds_s.append(filled_s + sum(own_s))
        if fills:
            filled_s += min(own_s[::2]) + min(own_s[1::2])
    return bounds_s
