"""The draws of a run that samples: one per step, and how much of a plan it left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from furlong.data.loader import Batch
from furlong.data.tokenize import IGNORE_INDEX
from furlong.plan.plan import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import num_drawn, sampled


def step_options(options: ChunkOptions, step: int) -> ChunkOptions:
    """Options whose draw is that of a step: it follows from the run's seed and the step's number
    alone, so that a step that is repeated, or computed after a resume, draws the same chunks."""
    sampling = options.sampling
    if sampling is None:
        return options
    return replace(options, sample=replace(sampling, seed=((sampling.seed or 0) << 32) + step))


def drawn_share(plan: ChunkPlan | None) -> float | None:
    """Share of a plan's chunks that were drawn, whole sequences among them; None: it draws none."""
    if plan is None or not plan.sampled:
        return None
    return num_drawn(plan) / len(plan.chunks)


def with_draw(plan: ChunkPlan, batch: Batch, options: ChunkOptions) -> ChunkPlan:
    """The plan with the draw that `options` ask for, if any: the same on all processes that have
    the batch, whose labels are read."""
    if options.sampling is None:
        return plan
    return sampled(plan, options.sampling, _labelled(plan, batch))


def _labelled(plan: ChunkPlan, batch: Batch) -> set[int]:
    """The chunks of cut sequences that have a label: that of a token is the token behind it."""
    found = set()
    for index in {chunk for group in plan.groups.values() for chunk in group}:
        for piece in plan.chunks[index].slices:
            labels = batch.sequences[piece.seq_id].labels[piece.start + 1 : piece.stop + 1]
            if np.any(labels != IGNORE_INDEX):
                found.add(index)
    return found
