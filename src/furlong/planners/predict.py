"""Predictions for a plan on one device: seconds of its step, and bytes in every tier.

predict(model, plan)                    # of a plan, to be compared with what is measured
predict_step(model, plan)               # and of the optimizer's step behind it
simulated_s(model, seq_lens, groups, options)      # seconds alone, without the whole plan
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from furlong.cost.memory import MemoryCurve
from furlong.cost.model import CostModel, update_s
from furlong.cost.shape import ModelShape
from furlong.plan.plan import ON_DEVICE, Action, Chunk, ChunkPlan
from furlong.planners.chunks import Groups
from furlong.planners.layouts import first_alike
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import number_chunks, plan_on_device, stages_of, walk_group
from furlong.planners.spaco import sampled
from furlong.simulate.clock import Times, time_actions


class Needs(NamedTuple):
    """Most bytes in use at a time, by tier."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


class Prediction(NamedTuple):
    """Seconds of a step, and the most bytes in use in each tier while it runs."""

    step_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int


def predict(model: CostModel, plan: ChunkPlan) -> Prediction:
    """Seconds and peak bytes of a plan's step; of several ranks the one that needs most."""
    curves = [model.memory().curve(plan, rank) for rank in range(len(plan.actions))]
    needs = [needs_of(curve) for curve in curves]
    return Prediction(step_s(model, plan), *map(max, zip(*needs, strict=True)))


def predict_step(model: CostModel, plan: ChunkPlan) -> Prediction:
    """As `predict`, with the seconds of the optimizer's step, which a run's own steps have too."""
    predicted = predict(model, plan)
    return predicted._replace(step_s=predicted.step_s + update_s(model, plan))


def needs_of(curve: MemoryCurve) -> Needs:
    """The peak of each tier."""
    if not len(curve.device):
        return Needs(0)
    device = curve.device.sum(axis=1)
    return Needs(int(device.max()), int(curve.host.max()), int(curve.disk.max()))


def simulated_s(
    model: CostModel,
    seq_lens: Sequence[int],
    groups: Groups,
    options: ChunkOptions,
    *,
    sp_size: int = 1,
) -> float:
    """Seconds of the step of `plan_on_device` over these groups, where options sample of one draw;
    or of one pool of `sp_size`, over groups with places in it.

    On one device actions run one after the other, and stages behind the first with the same layers
    take the same time: one of each kind is simulated, and counted as often as there are such
    stages. The one behind it is there too, for it hands gradients back.
    """
    if options.sampling is not None:
        num_layers = model.shape.num_layers
        whole = plan_on_device(
            seq_lens, options, num_layers=num_layers, groups=groups, sp_size=sp_size
        )
        return step_s(model, one_draw(whole, options))
    stages = stages_of(model.shape.num_layers, options)
    count, walked = count_kinds(model.shape, stages)
    actions: list[Action] = []
    for numbers in number_chunks(groups):
        actions += walk_group(numbers, stages, options, only=walked)
    chunks: tuple[Chunk, ...] = tuple(chunk for group in groups for chunk in group)
    plan = ChunkPlan(tuple(seq_lens), chunks, stages, (tuple(actions),), options.tiers, sp_size)
    starts = [*(times := _times(model, plan)).start_s[0], times.duration_s]
    return sum(
        count[action.stage] * (stop - start)
        for action, start, stop in zip(actions, starts, starts[1:], strict=False)
    )


def count_kinds(shape: ModelShape, stages: Sequence[int]) -> tuple[Counter[int], set[int]]:
    """The first stage of each kind with the number of such stages, and the stages that a walk of
    one of each kind has: also those behind them, which hand gradients back."""
    alike = first_alike(shape, stages)
    # the first stage has token ids for an input, which no tier holds
    count = Counter(alike.index(kind, min(stage, 1)) for stage, kind in enumerate(alike))
    return count, {*count, *(stage + 1 for stage in count)}


def one_draw(plan: ChunkPlan, options: ChunkOptions) -> ChunkPlan:
    """The plan of a step as it is predicted: where options sample with one draw, always the same,
    in which no chunk is known to have labels."""
    sampling = options.sampling
    return plan if sampling is None else sampled(plan, replace(sampling, seed=0))


def step_s(model: CostModel, plan: ChunkPlan) -> float:
    """Seconds of a plan's step."""
    return _times(model, plan).duration_s


def _times(model: CostModel, plan: ChunkPlan) -> Times:
    costs = model.costs(plan)
    return time_actions(plan, costs, copies=None if plan.tiers == ON_DEVICE else costs)
