"""Plans that may be faster than those of a run's dials: taken where they gain, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan
from furlong.planners.auto.rivals import CHUNKS, Rivals
from furlong.planners.auto.search import SLACK
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica
from furlong.planners.predict import step_s

LENS = (30_000, 9_000, 6_000, 2_500, 1_200, 900, 700, 500, 300, 200)
SHORT = (2_000,) * 16 + (300,) * 40
OPTIONS = ChunkOptions(size=8192)


MODEL = CostModel(
    model_shape("Qwen2.5-0.5B"), hardware("A100-80"), replace(Training(), zero_stage=1)
)
RIVALS = Rivals(MODEL, budget_bytes=40 * 2**30, options=OPTIONS, is_free=True)


def own_plan(
    seq_lens: tuple[int, ...], sp: int = 1, pp: int = 1, options: ChunkOptions = OPTIONS,
    **settings: Any,
) -> ChunkPlan:  # fmt: skip
    num_layers = MODEL.shape.num_layers
    stages = (num_layers // pp,) * pp if pp > 1 else ()
    return plan_replica(
        seq_lens, options, num_layers=num_layers, stages=stages, sp_size=sp, **settings
    )


@pytest.mark.parametrize(
    ("lens", "sp", "pp", "name"),
    [
        (LENS, 4, 1, "places"),
        (LENS, 1, 4, "InfiniPipe"),
        (SHORT, 2, 2, "local sequences"),
        (SHORT, 1, 2, CHUNKS),  # what another one gains is less than a prediction may miss
    ],
)
def test_the_fastest_is_taken(lens, sp, pp, name):
    own = own_plan(lens, sp, pp)
    found, plan = RIVALS.fastest(lens, own, OPTIONS)
    assert found == name
    check(plan, MODEL.memory(RIVALS.budget_bytes))
    assert (plan.seq_lens, plan.stages, plan.sp_size) == (own.seq_lens, own.stages, own.sp_size)
    assert len(plan.actions) == len(own.actions) and plan.tiers == own.tiers
    if name == CHUNKS:
        assert plan is own
    else:
        assert step_s(MODEL, plan) < step_s(MODEL, own) * (1 - SLACK)


def test_chunks_are_those_of_dials_that_are_given_or_have_shrunk():
    smaller = replace(OPTIONS, size=4096)
    for rivals, options in ((replace(RIVALS, is_free=False), OPTIONS), (RIVALS, smaller)):
        for sp, pp in ((4, 1), (1, 4)):
            own = own_plan(LENS, sp, pp, options)
            name, plan = rivals.fastest(LENS, own, options)
            assert name in (CHUNKS, "local sequences")
            assert max(chunk.num_tokens for chunk in plan.chunks) <= options.size


def test_none_is_taken_that_does_not_fit():
    own = own_plan(LENS, 4)
    assert replace(RIVALS, budget_bytes=2**30).fastest(LENS, own, OPTIONS)[0] != "places"


def test_stages_that_train_nothing_stay_as_they_are():
    own = own_plan(LENS, 1, 4, frozen_layers=6)
    assert own.frozen_stages == 1
    assert RIVALS.fastest(LENS, own, OPTIONS, frozen_layers=6) == (CHUNKS, own)
