"""The paper's form of a chunk's time, fitted to the cost model (InfiniPipe, Eqs. 1 and 4)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from furlong.cost.model import CostModel
from furlong.plan.values import (
    ON_DEVICE,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Place,
    Slice,
    Tiers,
)
from furlong.planners.infinipipe.checkpointing import Array
from furlong.planners.infinipipe.mesh import EQUAL_TOKENS, SliceWork
from furlong.planners.layout import first_alike


def cell_seconds(model: CostModel, plan: ChunkPlan) -> tuple[Array, Array]:
    """(P, K) Seconds of the forward and of the backward of every cell, nothing recomputed; rank s
    of the plan holds stage s."""
    costs = model.costs(plan)
    alike = first_alike(model.shape, plan.stages)
    chunks = range(len(plan.chunks))
    forward, backward = {}, {}
    for stage in set(alike):
        forward[stage] = [costs.compute_s(Forward(chunk, stage, "all"), stage) for chunk in chunks]
        backward[stage] = [costs.compute_s(Backward(chunk, stage), stage) for chunk in chunks]
    return (
        np.array([forward[first] for first in alike]),
        np.array([backward[first] for first in alike]),
    )


def fit_work(
    model: CostModel,
    longest: int,
    num_slices: int,
    *,
    stages: tuple[int, ...],
    sp_size: int = 1,
    tiers: Tiers = ON_DEVICE,
) -> SliceWork:
    """The paper's a1 and a2 for the slowest stage, forward and backward together, from equal pieces
    of a sequence of `longest` tokens, about `num_slices` of them: efficiencies depend on their
    size. What a chunk costs however few its tokens is fitted too and left out."""
    place = Place(0, sp_size)
    slices = []
    cuts = (max(1, num_slices // 2), num_slices, 2 * num_slices)
    for seq_id, count in enumerate(cuts):
        bounds = np.unique(np.linspace(0, longest, count + 1).astype(int)).tolist()
        slices += [Slice(seq_id, start, stop, place) for start, stop in pairwise(bounds)]
    actions: list[tuple[Action, ...]] = [
        tuple(Forward(chunk, stage, "all") for chunk in range(len(slices)))
        + tuple(Backward(chunk, stage) for chunk in range(len(slices)))
        for stage in range(len(stages))
    ]
    probes = ChunkPlan(
        seq_lens=(longest,) * len(cuts), chunks=tuple(Chunk((piece,)) for piece in slices),
        stages=stages, actions=tuple(actions), tiers=tiers, sp_size=sp_size,
    )  # fmt: skip
    seconds = np.sum(cell_seconds(model, probes), axis=0)
    seconds = seconds[seconds.sum(axis=1).argmax()]
    start = np.array([piece.start for piece in slices], dtype=float)
    stop = np.array([piece.stop for piece in slices], dtype=float)
    terms = np.stack([stop**2 - start**2, stop - start, np.ones_like(start)], axis=1)
    scale = terms.max(axis=0)
    # errors count relative to the piece's own time
    (quadratic, linear, _), _ = nnls(terms / scale / seconds[:, None], np.ones_like(seconds))
    fitted = SliceWork(float(quadratic / scale[0]), float(linear / scale[1]))
    return fitted if fitted.quadratic or fitted.linear else EQUAL_TOKENS
