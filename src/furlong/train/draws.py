"""The draws of a run that samples: one per step, and how much of a plan it left."""

from __future__ import annotations

from dataclasses import replace

from furlong.plan.values import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.planners.sampling.use import num_drawn


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
