"""Seconds of the optimizer's step, which follows the last action of a plan."""

from __future__ import annotations

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan, Forward


def optimizer_s(model: CostModel, stages: tuple[int, ...], num_alike: int) -> float:
    """Seconds in which the slowest device of a layout updates its trained parameters.

    `stages`: layers of each rank of the pipeline. `num_alike`: processes that hold the same stage,
    dp x sp, beside the replicas of the model's training; under ZeRO each updates its share. All
    plans of a layout and a ZeRO stage have the same; their own seconds end before it.
    """
    training = model.training
    trained = max(
        training.trained_parameters(model.shape, stages, frozenset((stage,)))
        for stage in range(len(stages))
    )
    shards = num_alike * training.replicas if training.zero_stage else 1
    return trained / (training.tp_size * shards * model.hardware.optimizer_parameters_per_s)


def update_s(model: CostModel, plan: ChunkPlan) -> float:
    """Seconds of the optimizer's step behind a plan; none without a Backward."""
    if not plan.trained:
        return 0.0
    held = [{a.stage for a in own if isinstance(a, Forward)} for own in plan.actions]
    num_replicas = sum(0 in stages for stages in held)
    layers = [sum(plan.stages[s] for s in own) for own in held[: len(held) // num_replicas]]
    return optimizer_s(model, tuple(layers), num_replicas * plan.sp_size)
