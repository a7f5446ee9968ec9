"""Plans that may be faster than those of a run's dials: taken where they gain, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.shapes import shape_of_values

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import UserError
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan, Layout
from furlong.planners.candidates import CHUNKS
from furlong.planners.decide import why
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica
from furlong.planners.question import SLACK, Limits, Question, Space
from furlong.planners.refusals import nothing_fits
from furlong.planners.search import BatchPlans, search
from furlong.planners.skrull import plan_skrull
from furlong.simulate.predict import step_s

LENS = (30_000, 9_000, 6_000, 2_500, 1_200, 900, 700, 500, 300, 200)
SHORT = (2_000,) * 16 + (300,) * 40
OPTIONS = ChunkOptions(size=8192)


BASE = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"), Training())
LIMITS = Limits(40 * 2**30, margin=0.0)


def planners(sp: int, pp: int, given: Any = None, **changes: Any) -> BatchPlans:
    stages = (BASE.shape.num_layers // pp,) * pp if pp > 1 else ()
    question = Question((), BASE, LIMITS, sp * pp, given=given or {}, stages=stages)
    limits = changes.pop("limits", LIMITS)
    method = changes.pop("method", "auto")
    question = replace(question, limits=limits, method=method)
    return BatchPlans(Space(question, Layout(1, sp, pp)), OPTIONS, **changes)


def own_plan(
    seq_lens: tuple[int, ...], sp: int = 1, pp: int = 1, options: ChunkOptions = OPTIONS,
    **settings: Any,
) -> ChunkPlan:  # fmt: skip
    num_layers = BASE.shape.num_layers
    stages = (num_layers // pp,) * pp if pp > 1 else ()
    return plan_replica(
        seq_lens, options, num_layers=num_layers, stages=stages, sp_size=sp, **settings
    )


@pytest.mark.parametrize(
    ("lens", "sp", "pp", "name"),
    [
        (LENS, 4, 1, "places"),
        (LENS, 1, 4, "infinipipe"),
        (SHORT, 2, 2, "local sequences"),
        (SHORT, 1, 2, CHUNKS),  # what another one gains is less than a prediction may miss
    ],
)
def test_the_fastest_is_taken(lens, sp, pp, name):
    own = own_plan(lens, sp, pp)
    asked = planners(sp, pp)
    found, plan = asked.best_plan(lens, own, OPTIONS)
    assert found == name
    model = asked.space.model
    check(plan, model.memory(LIMITS.limit_bytes))
    assert (plan.seq_lens, plan.stages, plan.sp_size) == (own.seq_lens, own.stages, own.sp_size)
    assert len(plan.actions) == len(own.actions) and plan.offload == own.offload
    if name == CHUNKS:
        assert plan is own
    else:
        assert step_s(model, plan) < step_s(model, own) * (1 - SLACK)


def test_chunks_are_those_of_dials_that_are_given_or_have_shrunk():
    smaller = replace(OPTIONS, size=4096)
    for changes, options in (
        ({"given": {"size": 8192}}, OPTIONS), ({}, smaller), ({"has_shrunk": True}, OPTIONS)
    ):  # fmt: skip
        for sp, pp in ((4, 1), (1, 4)):
            own = own_plan(LENS, sp, pp, options)
            name, plan = planners(sp, pp, **changes).best_plan(LENS, own, options)
            assert name in (CHUNKS, "local sequences")
            assert max(chunk.num_tokens for chunk in plan.chunks) <= options.size


def test_replicas_that_are_joined_share_the_stages_of_the_dials():
    """Places have one stage: beside a replica that goes layer-first they cannot be joined."""
    options = replace(OPTIONS, order="layer-first", stage_layers=2)
    own = own_plan(LENS, 4, options=options)
    assert len(own.stages) > 1
    for dp, names in ((1, {"places"}), (2, {CHUNKS, "local sequences"})):
        asked = BatchPlans(replace(planners(4, 1).space, layout=Layout(dp, 4, 1)), options)
        name, plan = asked.best_plan(LENS, own, options)
        assert name in names and (dp == 1 or plan.stages == own.stages)


def test_none_is_taken_that_does_not_fit():
    own = own_plan(LENS, 4)
    small = replace(LIMITS, device_bytes=2**30)
    assert planners(4, 1, limits=small).best_plan(LENS, own, OPTIONS)[0] != "places"


def test_stages_that_train_nothing_stay_as_they_are():
    own = own_plan(LENS, 1, 4, frozen_layers=6)
    assert own.frozen_stages == 1
    found = planners(1, 4).best_plan(LENS, own, OPTIONS, frozen_layers=6)
    assert found == (CHUNKS, own)


@pytest.mark.parametrize(
    ("sp", "pp", "method"),
    [(4, 1, "places"), pytest.param(1, 4, "infinipipe", marks=pytest.mark.slow)],
)
def test_a_method_that_is_named_is_what_runs(sp, pp, method):
    """Also where the chunks of the dials are faster, or it has no plan."""
    for lens in (LENS, SHORT):
        own = own_plan(lens, sp, pp)
        name, plan = planners(sp, pp, method=method).best_plan(lens, own, OPTIONS)
        assert name == method and plan.chunks != own.chunks
    small = replace(LIMITS, device_bytes=2**30)
    with pytest.raises(UserError):
        planners(sp, pp, method=method, limits=small).best_plan(LENS, own, OPTIONS)


def test_a_method_that_is_named_keeps_its_plans_where_a_step_did_not_fit():
    """In a tenth less memory for each time that the dials' chunks were halved."""
    asked, own = planners(4, 1, method="places"), own_plan(LENS, 4)
    memory = asked.space.model.memory
    limit_bytes, peaks = LIMITS.limit_bytes, []
    for size in (8192, 4096, 1024):
        options = replace(OPTIONS, size=size)
        name, plan = replace(asked, has_shrunk=True).best_plan(LENS, own, options)
        peaks.append(max(memory(limit_bytes).peak_bytes_of_actions(plan, 0)))
        assert name == "places" and peaks[-1] <= limit_bytes * 0.9 ** len(peaks[1:])
    frozen = own_plan(LENS, 1, 4, frozen_layers=6)
    with pytest.raises(UserError, match="1 stage without trained weights"):
        planners(1, 4, method="infinipipe").best_plan(LENS, frozen, OPTIONS, frozen_layers=6)


def test_a_method_that_is_named_is_not_refused_for_dials_that_do_not_fit():
    """A run takes them in its evaluations alone."""
    lens, limits = (60,) * 8, Limits(2650 * 2**20, margin=0.0)
    values = {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151_936, "tie_word_embeddings": True,
    }  # fmt: skip
    base = replace(BASE, shape=shape_of_values(values))  # the logits are most of it
    question = Question([lens], base, limits, 2, longest=60, given={"sp": 2}, method="skrull")
    answer = search(question)
    model = question.model_of(Layout(sp=2))
    plan_skrull(lens, model, sp_size=2, budget_bytes=limits.limit_bytes)
    assert answer.best.method == "skrull" and limits.hold(answer.best.needs)
    assert "skrull batch by batch, in evaluations size " in why(answer, "memory.device")
    dials = search(replace(question, method="chunkflow"))
    assert not dials.tried and "chunks." not in nothing_fits(dials, alone=True).change


def test_the_longest_sequence_may_take_longer_than_a_step_of_another_layout():
    """The plans of the batch in the second layout have to beat those in the first."""
    limits = Limits(4700 * 2**20, margin=0.0)
    question = Question(
        [(60,) * 8], BASE, limits, 4, longest=3000, given={"sp": 1}, method="infinipipe",
    )  # fmt: skip
    answer = search(question)
    assert answer.best.layout == Layout(dp=2, pp=2)


def test_a_method_that_is_named_says_itself_why_it_has_no_plan():
    question = Question([[200_000]], BASE, Limits(7 * 2**30), 2, given={"sp": 2}, method="places")
    error = nothing_fits(search(question), alone=True)
    assert "chunks.method = places, and sequence 0 of 200,000 tokens" in error.given
    assert "give each device" in error.change and "chunks." not in error.change
