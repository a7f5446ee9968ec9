"""What the executor does not carry out is refused before anything runs."""

from __future__ import annotations

import dataclasses

import pytest
from gradients import batch
from tiny_families import build

import furlong
from furlong.errors import DataError, PlanError
from furlong.plan.values import ChunkPlan
from furlong.planners.chunkflow import group_chunks, plan_chunkflow
from furlong.planners.options import ChunkOptions
from furlong.planners.pipeline import plan_1f1b

LENS = [21, 4]
OPTIONS = ChunkOptions(size=8)


def execute(plan: ChunkPlan) -> None:
    furlong.Engine(build("llama")).run(plan, batch(LENS))


def test_a_plan_of_several_ranks_is_refused() -> None:
    """Half a gradient would look like a whole one."""
    plan = plan_chunkflow(LENS, OPTIONS, num_layers=3)
    execute(plan)
    two = dataclasses.replace(plan, actions=plan.actions * 2)
    with pytest.raises(PlanError, match="one rank: the plan has 2"):
        execute(two)
    pipeline = plan_1f1b(LENS, group_chunks(LENS, OPTIONS), stages=(2, 1))
    with pytest.raises(PlanError, match="one rank: the plan has 2"):
        execute(pipeline)


def test_sequences_of_other_lengths_are_refused() -> None:
    plan = plan_chunkflow([21, 5], OPTIONS, num_layers=3)
    with pytest.raises(DataError, match="sequences of 21, 4 tokens"):
        execute(plan)
