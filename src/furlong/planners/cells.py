"""Seconds of the cells of chunks, whatever the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from furlong.cost.model import CostModel, Hidden
from furlong.cost.seconds import Array
from furlong.plan.plan import ON_DEVICE, Backward, Chunk, ChunkPlan, Forward, Tiers
from furlong.planners.layouts import first_alike


def cell_seconds(
    chunks: Sequence[Chunk],
    seq_lens: Sequence[int],
    stages: tuple[int, ...],
    model: CostModel,
    *,
    sp_size: int = 1,
    tiers: Tiers = ON_DEVICE,
    recompute_layers: Sequence[int] = (),
    free: Collection[Hidden] = (),
) -> Array:
    """(P, K, 2) seconds of a forward and of a backward of every chunk at every stage, one stage a
    rank, with `recompute_layers` of each stage checkpointed; `free`: as for `CostModel.costs`."""
    alike = first_alike(model.shape, stages)
    layers = recompute_layers or (0,) * len(stages)
    actions = [
        tuple(
            action
            for c in range(len(chunks))
            for action in (Forward(c, stage, "all", layers[stage]), Backward(c, stage))
        )
        if first == stage
        else ()
        for stage, first in enumerate(alike)
    ]
    plan = ChunkPlan(tuple(seq_lens), tuple(chunks), stages, tuple(actions), tiers, sp_size)
    costs = model.costs(plan, free=free)
    seconds = [[costs.compute_s(a, rank) for a in own] for rank, own in enumerate(actions)]
    return np.array([seconds[first] for first in alike]).reshape(len(stages), len(chunks), 2)
