"""Predictions for a plan: seconds of its step, and peak bytes in each memory.

predict(model, plan)                    # forward and backward
predict_step(model, plan)               # with the optimizer's step after them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from furlong.cost.memory import MemoryCurve
from furlong.cost.model import CostModel, update_s
from furlong.plan.plan import ON_DEVICE, ChunkPlan
from furlong.simulate.clock import time_actions


class Needs(NamedTuple):
    """Peak bytes in use in each memory."""

    device_bytes: int
    cpu_bytes: int = 0
    disk_bytes: int = 0


class Prediction(NamedTuple):
    """Seconds of a step, and the peak bytes in each memory while it runs."""

    step_s: float
    device_bytes: int
    cpu_bytes: int
    disk_bytes: int


def predict(model: CostModel, plan: ChunkPlan) -> Prediction:
    """Return seconds and peak bytes of a plan's step; each peak is the maximum over the ranks."""
    curves = [model.memory().curve(plan, rank) for rank in range(len(plan.actions))]
    return Prediction(step_s(model, plan), *most_of(map(needs_of, curves)))


def predict_step(model: CostModel, plan: ChunkPlan) -> Prediction:
    """Return the result of `predict`, with the seconds of the optimizer's step added."""
    predicted = predict(model, plan)
    return predicted._replace(step_s=predicted.step_s + update_s(model, plan))


def most_of(needs: Iterable[Needs]) -> Needs:
    """Return the most bytes of each memory over all `needs`."""
    return Needs(*map(max, zip(*needs, strict=True)))


def needs_of(curve: MemoryCurve) -> Needs:
    """Return the peak bytes of each memory in a memory curve."""
    return Needs(curve.peak_bytes, curve.peak_cpu_bytes, curve.peak_disk_bytes)


def step_s(model: CostModel, plan: ChunkPlan, *, times: float = 1.0) -> float:
    """Return the seconds of a plan's step, or of a longer step with `times` (at least 1) times its
    work. The longer step adds nothing but (times - 1) times the busy seconds of the busiest rank:
    weights are gathered, pipelines filled and gradients reduced once per step, however much work it
    has."""
    costs = model.costs(plan)
    copies = None if plan.offload == ON_DEVICE else costs
    clock = time_actions(plan, costs, copies=copies)
    return clock.duration_s + (times - 1) * (clock.busiest_s(plan) if times > 1 else 0.0)
