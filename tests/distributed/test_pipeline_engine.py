"""Pipelines over gloo give the loss, the gradients and the updates of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from distributed.layout_cases import BOUND, Case, check
from helpers.batches import batch
from helpers.pipeline_plans import row_of
from helpers.ranks import run_all
from helpers.tiny_families import config_of
from papers.chunkflow_plan import recomputed_late
from papers.published.chunks import sliced_groups
from papers.seq1f1b_plan import plan_seq1f1b
from torch import Tensor, nn

import furlong
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.models.build import build_model
from furlong.models.describe import describe
from furlong.plan.plan import ChunkPlan, Forward
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, join_replicas, plan_1f1b
from furlong.runtime.distributed.fsdp import clip_gradients
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import reference_loss, take_grads

STAGES = (1, 2)
LENS = (23, 4, 2, 17)
TIED = {"tie_word_embeddings": True}
GEMMA = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full") * 2][:5],
}
MAX_NORM = 0.1


def planned(lens: Sequence[int] = LENS, sp_size: int = 1, **settings: object) -> ChunkPlan:
    """State-aware 1F1B over chunks of 8 tokens."""
    groups = group_chunks(lens, ChunkOptions(size=8))
    placed = shard_all(groups, sp_size) if sp_size > 1 else groups
    return plan_1f1b(lens, placed, sp_size=sp_size, **{"stages": STAGES} | settings)  # type: ignore[arg-type]


def layers_per_cell(lens: Sequence[int], stages: tuple[int, ...]) -> ChunkPlan:
    """Token-level 1F1B; every cell recomputes as many layers as chance has it."""
    groups, random = sliced_groups(lens, num_slices=4), Random(1)
    layers = [[random.randint(0, height) for _ in range(sum(map(len, groups)))]
              for height in stages]  # fmt: skip
    return plan_seq1f1b(lens, groups, stages=stages, recompute_layers=layers)


def in_a_row(lens: Sequence[int], stages: tuple[int, ...], cuts: list[int]) -> ChunkPlan:
    return row_of(list(lens), sliced_groups(lens, num_slices=3), stages, cuts, Random(2))


def infinipipe(lens: Sequence[int]) -> ChunkPlan:
    """InfiniPipe's own plan of two stages where memory is short: it cuts and recomputes."""
    model = CostModel(describe(config_of("llama")), Machine.named("A100-80"))
    found = plan_infinipipe(lens, model, stages=STAGES, budget_bytes=395_000)
    assert max(map(len, found.groups.values())) > 2
    assert any(isinstance(a, Forward) and a.recompute_layers for a in found.actions[0])
    return found


def kinds(stages: tuple[int, ...]) -> dict[str, Case]:
    """Every planner and every way to keep and to recompute, on Llama."""
    settings = {"num_hidden_layers": sum(stages)}
    plans = {
        "split, kv, lazy": recomputed_late(planned((23,), stages=stages)),
        "hybrid, kv, K 2": planned(stages=stages, num_retained=2),
        "hybrid, input": planned(stages=stages, keep="input"),
        "hybrid, attention, lazy, K 2, one layer again": recomputed_late(
            planned(stages=stages, keep="attention", num_retained=2, recompute_layers=1)
        ),
        "all, K 0": planned(stages=stages, keep="all", num_retained=0),
        "seq1f1b": layers_per_cell((23, 12), stages),
        "two in a row": in_a_row((21, 16, 7), stages, [1]),
        "three in a row": in_a_row((21, 16, 7), stages, [1, 2]),
        "evaluation": planned(stages=stages, backward=False),
    }
    cases = {name: Case(plan, settings=settings) for name, plan in plans.items()}
    masked = planned((29, 9), stages=stages)
    cases["masked"] = Case(masked, settings=settings, masked=(range(21), range(9)))
    frozen = planned(stages=stages, frozen_stages=1)
    cases["frozen"] = Case(frozen, settings=settings, frozen_layers=stages[0])
    return cases


FEW = (
    "split, kv, lazy", "hybrid, attention, lazy, K 2, one layer again", "seq1f1b", "two in a row",
    "evaluation", "masked", "frozen",
)  # fmt: skip


def test_two_stages():
    more = {
        "no label in the last chunk": Case(planned((21,)), masked=(range(9, 21),)),
        "tied, two steps": Case(planned(), settings=TIED, num_steps=2),
    }
    check({name: kinds(STAGES)[name] for name in FEW} | more, (1, 1, 2), own_alone=True)


@pytest.mark.slow
def test_four_stages():
    stages = (1, 2, 1, 1)
    gemma = {"family": "gemma3_text", "settings": GEMMA}
    mistral = {"family": "mistral", "settings": {"num_hidden_layers": 5}}
    more = {
        "gemma3": Case(planned(stages=stages, keep="attention"), **gemma),
        "gemma3, row": Case(in_a_row((21, 16, 7), stages, [1]), **gemma),
        "mistral": Case(planned(stages=stages, num_retained=2), **mistral),
        "adapters": Case(planned(stages=stages), lora=True, settings=mistral["settings"]),
    }
    names = ("hybrid, kv, K 2", "three in a row", "seq1f1b", "frozen")
    check({name: kinds(stages)[name] for name in names} | more, (1, 1, 4))


@pytest.mark.slow
def test_other_plans_whole_models_other_families_and_adapters():
    others = {name: case for name, case in kinds(STAGES).items() if name not in FEW}
    check(
        others
        | {
            "infinipipe": Case(infinipipe((40, 23, 12, 3))),
            "whole": Case(planned(), holds_all=True),
            "whole, tied": Case(planned(), settings=TIED, holds_all=True),
            "window": Case(planned(), family="mistral"),
            "window, row": Case(in_a_row((21, 16, 7), STAGES, [1]), family="mistral"),
            "gemma3, 4 + 1": Case(layers_per_cell((23, 12), (4, 1)), "gemma3_text", GEMMA),
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
@pytest.mark.parametrize(
    "sizes", [(1, 2, 2), (2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly)]
)
def test_weights_that_are_gathered_in_each_pool_with_every_pass(sizes):
    dp, sp_size, pp = sizes
    options = {"sp_size": sp_size, "stages": STAGES if pp == 2 else (3,), "regathers": True}
    lens = (LENS, (9, 31, 3))[:dp]

    def joined(**settings: object) -> ChunkPlan:
        plans = [planned(own, **options | settings) for own in lens]
        ids = [range(4), range(4, 7)][:dp]
        return join_kept(plans, ids, [n for own in lens for n in own], dp)

    cases = {
        "kv": Case(joined()),
        "input, one layer again": Case(joined(keep="input", recompute_layers=1)),
        "tied, two steps": Case(joined(keep="all"), settings=TIED, num_steps=2),
        "adapters": Case(joined(keep="attention", num_retained=2), lora=True),
        "evaluation": Case(joined(backward=False)),
        "no label on one": Case(joined(), masked=tuple(range(n) for n in LENS)) if dp > 1 else None,
    }
    check({name: case for name, case in cases.items() if case}, sizes, bound=1e-12)


@pytest.mark.slow
def test_a_middle_stage():
    plans = [planned(own, stages=(1, 1, 1)) for own in (LENS, (9, 31, 3))]
    lens = [*LENS, 9, 31, 3]
    plan = join_replicas(plans, [range(4), range(4, 7)], lens)
    check({"plain": Case(plan), "tied": Case(plan, settings=TIED)}, (2, 1, 3), own_alone=True)


def updated(
    model: nn.Module, step: Callable[[], object], clip: Callable[[], float]
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after three steps, and the norms of the whole gradient."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), []
    for _ in range(3):
        step()
        norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def trains(rank: int, case: Case) -> tuple[dict[str, Tensor], list[float]]:
    model = case.model(case.layers_of(rank))
    engine = furlong.Engine(model, ranks=make_ranks(1, 1, 2, "cpu"))
    return updated(
        model,
        lambda: engine.run(case.plan, case.sequences()),
        lambda: engine.clip_gradients(MAX_NORM),
    )


def step_in_bfloat16(rank: int, folder: str, is_cut: bool = False) -> dict[str, Tensor]:
    """The gradients of a model as a run builds it, which has its own stage alone."""
    ranks = make_ranks(1, 1, 2, "cpu") if is_cut else None
    layers = (range(1), range(1, 3))[rank] if is_cut else None
    model = build_model(folder, init="random", seed=7, layers=layers)
    engine = furlong.Engine(model, ranks=ranks, compute_dtype=torch.bfloat16)
    engine.run(planned(stages=STAGES if is_cut else (3,)), batch(LENS))
    return take_grads(model)


def test_both_copies_of_a_tied_weight_take_the_update_of_one_process(tmp_path):
    """And in bfloat16 a pipeline computes what one process does bit for bit: weights and sums are
    float32, messages bfloat16."""
    config_of("llama").save_pretrained(tmp_path)
    truth = step_in_bfloat16(0, str(tmp_path))
    case = Case(planned(), settings=TIED)
    model, sequences = case.model(), case.sequences()
    weights, norms = updated(
        model,
        lambda: reference_loss(model, sequences),
        lambda: clip_gradients(model.parameters(), MAX_NORM),
    )
    ranks, narrow = run_all((trains, case), (step_in_bfloat16, str(tmp_path), True), num_ranks=2)
    for grads in narrow:
        assert all(torch.equal(grad, truth.pop(name)) for name, grad in grads.items())
    assert not truth
    (first, _), (last, _) = ranks
    name = "model.embed_tokens.weight"
    assert "lm_head.weight" not in first.keys() | last.keys()
    assert torch.equal(first[name], last[name]), "the copies drift apart"
    for own, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-10), "a copy counts once in the norm"
        for other, weight in own.items():
            error = float((weight - weights[other]).norm() / weights[other].norm())
            assert error <= BOUND, (other, error)
    assert first.keys() & last.keys() == {name}
    assert first.keys() | last.keys() == weights.keys()
