"""Engine in pipelines: the gradients of one process, and what an error does to the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from distributed.layout_cases import Case, run_cases, worst_error
from helpers.ranks import run_ranks

from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, shard, sliced_groups
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_seq1f1b

BOUND = 1e-10
STAGES = (1, 2)
LENS = (23, 4, 2, 17)
TIED = {"tie_word_embeddings": True}


def planned(lens: Sequence[int] = LENS, sp_size: int = 1, **settings: object) -> ChunkPlan:
    """State-aware 1F1B over chunks of 8 tokens."""
    groups = group_chunks(lens, ChunkOptions(size=8))
    placed = shard(groups, sp_size) if sp_size > 1 else groups
    return plan_1f1b(lens, placed, sp_size=sp_size, **{"stages": STAGES} | settings)  # type: ignore[arg-type]


def token_level(lens: Sequence[int] = (23, 12)) -> ChunkPlan:
    """Seq1F1B in which every other cell recomputes its layers."""
    groups = sliced_groups(lens, num_slices=4)
    count = sum(map(len, groups))
    layers = [[height * (chunk % 2) for chunk in range(count)] for height in STAGES]
    return plan_seq1f1b(lens, groups, stages=STAGES, recompute_layers=layers)


def of_two_stages() -> dict[str, Case]:
    frozen = planned(frozen_stages=1)
    return {
        "1f1b": Case(planned()),
        "K 2": Case(planned(num_retained=2)),
        "seq1f1b": Case(token_level()),
        "evaluation": Case(planned(backward=False)),
        "no label in the last chunk": Case(planned((21,)), masked=(range(9, 21),)),
        "tied, two steps": Case(planned(), settings=TIED, num_steps=2),
        "frozen": Case(frozen, frozen_layers=STAGES[0]),
    }


def check(cases: dict[str, Case], sizes: tuple[int, int, int], *, own_alone: bool = False) -> None:
    num_ranks = sizes[0] * sizes[1] * sizes[2]
    answers = run_ranks(
        run_cases, list(cases.values()), sizes, own_alone, num_ranks=num_ranks, limit_s=240
    )
    for index, (name, case) in enumerate(cases.items()):
        error = worst_error(case, [own[index] for own in answers])
        print(f"{name}: {error:.1e}")
        assert error <= BOUND, name


def test_two_stages():
    check(of_two_stages(), (1, 1, 2), own_alone=True)


@pytest.mark.slow
def test_whole_models_other_families_and_adapters():
    check(
        {
            "whole": Case(planned(), holds_all=True),
            "whole, tied": Case(planned(), settings=TIED, holds_all=True),
            "window": Case(planned(), family="mistral"),
            "adapters": Case(planned(), lora=True),
            "tied, adapters": Case(planned(), settings=TIED, lora=True),
        },
        (1, 1, 2),
    )


@pytest.mark.slow
def test_two_pipelines_of_two_stages():
    lens = (LENS, (9, 31, 3))
    plans = [planned(own) for own in lens]
    plan = join_replicas(plans, [range(4), range(4, 7)], [n for own in lens for n in own])
    check(
        {
            "plain": Case(plan),
            "tied, two steps": Case(plan, settings=TIED, num_steps=2),
            "adapters": Case(plan, lora=True),
            "whole": Case(plan, settings=TIED, holds_all=True),
            "no label on one": Case(plan, masked=tuple(range(n) for n in LENS)),
        },
        (2, 1, 2),
    )


@pytest.mark.slow
def test_a_pipeline_of_pools():
    plan = planned(sp_size=2)
    check(
        {
            "plain": Case(plan),
            "tied": Case(plan, settings=TIED),
            "window": Case(plan, family="mistral"),
            "evaluation": Case(planned(sp_size=2, backward=False)),
        },
        (1, 2, 2),
        own_alone=True,
    )


@pytest.mark.slow
def test_a_middle_stage():
    plans = [planned(own, stages=(1, 1, 1)) for own in (LENS, (9, 31, 3))]
    lens = [*LENS, 9, 31, 3]
    plan = join_replicas(plans, [range(4), range(4, 7)], lens)
    check({"plain": Case(plan), "tied": Case(plan, settings=TIED)}, (2, 1, 3), own_alone=True)
