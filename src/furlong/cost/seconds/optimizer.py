"""Seconds of the optimizer's step, which follows the last action of a plan."""

from __future__ import annotations

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan, Forward


def optimizer_s(model: CostModel, plan: ChunkPlan, rank: int) -> float:
    """Seconds that one device of a rank takes to update its trained parameters; under ZeRO those
    of its shard. A plan's own seconds end before it."""
    training = model.training
    held = frozenset(a.stage for a in plan.actions[rank] if isinstance(a, Forward))
    trained = training.trained_parameters(model.shape, plan.stages, held) / training.tp_size
    if training.zero_stage:
        alike = sum(
            any(isinstance(a, Forward) and a.stage in held for a in actions)
            for actions in plan.actions
        )
        trained /= alike * plan.sp_size * training.replicas
    return model.hardware.optimizer_s(trained)
