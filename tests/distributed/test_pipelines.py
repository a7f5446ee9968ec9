"""Pipelines over gloo give the loss and the gradients of one process that cuts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from helpers.pipeline_plans import row_of
from helpers.pipelines import Case, run_cases, worst_error
from helpers.ranks import run_ranks
from helpers.tiny_families import config_of

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.models.describe import describe
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks, sliced_groups
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_seq1f1b

BOUND = 1e-10
TWO, FOUR = (1, 2), (1, 2, 1, 1)
PACKED, SPLIT, HYBRID = (5, 3, 8, 1, 2), (23,), (23, 4, 2, 17)
MASKED = (range(21), range(9))
GEMMA = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full") * 2][:5],
}


def planned(lens: Sequence[int], stages: tuple[int, ...], **settings: object) -> ChunkPlan:
    """State-aware 1F1B over chunks of 8 tokens."""
    return plan_1f1b(lens, group_chunks(lens, ChunkOptions(size=8)), stages=stages, **settings)  # type: ignore[arg-type]


def layers_per_cell(lens: Sequence[int], stages: tuple[int, ...]) -> ChunkPlan:
    """Token-level 1F1B; every cell recomputes as many layers as chance has it."""
    groups, random = sliced_groups(lens, num_slices=4), Random(1)
    layers = [[random.randint(0, height) for _ in range(sum(map(len, groups)))]
              for height in stages]  # fmt: skip
    return plan_seq1f1b(lens, groups, stages=stages, recompute_layers=layers)


def in_a_row(lens: Sequence[int], stages: tuple[int, ...], cuts: list[int]) -> ChunkPlan:
    return row_of(list(lens), sliced_groups(lens, num_slices=3), stages, cuts, Random(2))


def infinipipe(lens: Sequence[int]) -> ChunkPlan:
    """InfiniPipe's own plan of two stages where memory is short: it cuts, parts and recomputes."""
    model = CostModel(describe(config_of("llama")), hardware("A100-80"))
    found = plan_infinipipe(lens, model, num_stages=2, stages=TWO, budget_bytes=395_000)
    assert found.num_slices > 2 and found.recomputed_layers and len(found.pipelines) == 2
    return found.plan


def kinds(stages: tuple[int, ...]) -> dict[str, Case]:
    """Every planner and every way to keep and to recompute, on Llama."""
    settings = {"num_hidden_layers": sum(stages)}
    plans = {
        "packed": planned(PACKED, stages),
        "split, kv, lazy": planned(SPLIT, stages, recompute="lazy"),
        "hybrid, kv, K 2": planned(HYBRID, stages, num_retained=2),
        "hybrid, input": planned(HYBRID, stages, keep="input"),
        "hybrid, attention, lazy, K 2, one layer again": planned(
            HYBRID, stages, keep="attention", num_retained=2, recompute_layers=1, recompute="lazy"
        ),
        "all, K 0": planned(HYBRID, stages, keep="all", num_retained=0),
        "seq1f1b": layers_per_cell((23, 12), stages),
        "two in a row": in_a_row((21, 16, 7), stages, [1]),
        "three in a row": in_a_row((21, 16, 7), stages, [1, 2]),
    }
    cases = {name: Case(plan, settings=settings) for name, plan in plans.items()}
    cases["masked"] = Case(planned((29, 9), stages), settings=settings, masked=MASKED)
    cases["lora"] = Case(planned(HYBRID, stages), settings=settings, lora=True)
    frozen = planned(HYBRID, stages, frozen_stages=1)
    cases["frozen"] = Case(frozen, settings=settings, frozen_layers=stages[0])
    return cases


def check(cases: dict[str, Case], num_ranks: int) -> None:
    outcomes = run_ranks(run_cases, list(cases.values()), num_ranks=num_ranks, limit_s=240)
    for index, (name, case) in enumerate(cases.items()):
        of_case = [answers[index] for answers in outcomes]
        error = worst_error(case, of_case)
        print(f"{name}: {error:.1e}, sends held {[o.most_held for o in of_case]}")
        assert error <= BOUND, name


def test_two_stages():
    check(kinds(TWO) | {"infinipipe": Case(infinipipe((40, 23, 12, 3)))}, 2)


def test_other_families_cut_inside_their_patterns():
    gemma = {"family": "gemma3_text", "settings": GEMMA}
    check(
        {
            "gemma3, 1 + 4": Case(planned(HYBRID, (1, 4), num_retained=2), **gemma),
            "gemma3, 4 + 1": Case(layers_per_cell((23, 12), (4, 1)), **gemma),
            "mistral": Case(planned(HYBRID, TWO, keep="attention"), family="mistral"),
            "mistral, row": Case(in_a_row((21, 16, 7), TWO, [1]), family="mistral"),
        },
        2,
    )


def test_four_stages():
    cases = kinds(FOUR)
    picked = ("hybrid, kv, K 2", "seq1f1b", "two in a row", "frozen")
    check({name: cases[name] for name in picked}, 4)


@pytest.mark.slow
def test_four_stages_of_every_kind():
    gemma = {"family": "gemma3_text", "settings": GEMMA}
    mistral = {"family": "mistral", "settings": {"num_hidden_layers": 5}}
    more = {
        "gemma3": Case(planned(HYBRID, FOUR, keep="attention"), **gemma),
        "gemma3, row": Case(in_a_row((21, 16, 7), FOUR, [1]), **gemma),
        "mistral": Case(planned(HYBRID, FOUR, num_retained=2), **mistral),
    }
    check(kinds(FOUR) | more, 4)


def test_tied_embeddings_and_a_stage_without_labels_in_most_chunks():
    tied = {"num_hidden_layers": 3, "tie_word_embeddings": True}
    check(
        {
            "tied, K 1": Case(planned(HYBRID, TWO), settings=tied),
            "tied, masked": Case(planned((29, 9), TWO), settings=tied, masked=MASKED),
            "tied, lora": Case(planned(HYBRID, TWO), settings=tied, lora=True),
        },
        2,
    )


def replicas(lens: Sequence[Sequence[int]], stages: tuple[int, ...], size: int) -> ChunkPlan:
    """Two pipelines of one global batch, with chunks of their own."""
    plans, ids, first = [], [], 0
    for own in lens:
        plans.append(plan_1f1b(own, group_chunks(own, ChunkOptions(size=size)), stages=stages))
        ids.append(range(first, first + len(own)))
        first += len(own)
    return join_replicas(plans, ids, [n for own in lens for n in own])


@pytest.mark.slow
def test_two_pipelines_of_two_stages():
    """One with three times the chunks of the other; one without a label, but for a global batch."""
    tied = {"num_hidden_layers": 3, "tie_word_embeddings": True}
    unequal = replicas([[8, 8], [23, 17, 8]], TWO, 8)
    check(
        {
            "unequal": Case(unequal),
            "unequal, tied": Case(unequal, settings=tied),
            "no label": Case(unequal, masked=(range(8), range(8))),
            "no label, lora": Case(unequal, masked=(range(8), range(8)), lora=True),
        },
        4,
    )
