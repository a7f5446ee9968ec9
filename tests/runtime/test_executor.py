"""What the executor does not carry out is refused before anything runs."""

from __future__ import annotations

import dataclasses

import pytest
from gradients import batch
from tiny_families import build

import furlong
from furlong.errors import PlanError
from furlong.kv.arena import Arena
from furlong.models.causal_lm import CausalLM
from furlong.ops.choose import ProbedBackend
from furlong.plan.values import ChunkPlan
from furlong.planners.chunkflow import plan_chunkflow
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import shift_labels


def execute(plan: ChunkPlan) -> None:
    model = CausalLM(build("llama"))
    sequences = shift_labels(batch([21, 4]))
    Executor(
        model, plan, sequences,
        num_valid_tokens=1, backend=ProbedBackend(), arena=Arena(model.device),
    )  # fmt: skip


def test_a_plan_of_several_ranks_is_refused() -> None:
    """Half a gradient would look like a whole one."""
    plan = plan_chunkflow([21, 4], furlong.ChunkOptions(size=8), num_layers=3)
    execute(plan)
    two = dataclasses.replace(plan, actions=plan.actions * 2)
    with pytest.raises(PlanError, match="one rank: the plan has 2"):
        execute(two)


def test_plans_of_several_stages_or_tiers_are_refused() -> None:
    plan = plan_chunkflow([21, 4], furlong.ChunkOptions(size=8), num_layers=3)
    with pytest.raises(PlanError, match="tier host"):
        execute(dataclasses.replace(plan, tier="host"))
