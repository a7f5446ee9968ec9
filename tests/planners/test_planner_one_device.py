"""The planner of one device: legal plans in both orders, and inputs that live as long as needed."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from helpers.toy_model import gradient, obey
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.liveness import input_frees, kv_frees
from furlong.plan.passes import NOTHING, passes
from furlong.plan.plan import (
    Backward,
    Forward,
    Keep,
    RebuildKV,
    Recompute,
    Reduce,
    Tier,
    Tiers,
)
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device

tier = st.sampled_from(get_args(Tier))
tiers = st.one_of(tier, st.builds(Tiers, tier, tier, tier, tier))
chunk_first = st.just({"order": "chunk-first"})
layer_first = st.integers(1, 7).map(lambda n: {"order": "layer-first", "stage_layers": n})


@st.composite
def options(draw):
    return ChunkOptions(
        size=draw(st.integers(1, 40)),
        num_retained=draw(st.integers(0, 4)),
        keep=draw(st.sampled_from(get_args(Keep))),
        hybrid=draw(st.booleans()),
        recompute_layers=draw(st.integers(0, 4)),
        tier=draw(tiers),
        **draw(st.one_of(chunk_first, layer_first)),
    )


def texts(plan):
    return [format_action(action) for action in plan.actions[0]]


def plan(seq_lens, num_layers=2, **dials):
    backward, frozen = dials.pop("backward", True), dials.pop("frozen_layers", 0)
    return plan_on_device(
        seq_lens,
        ChunkOptions(**dials),
        num_layers=num_layers,
        backward=backward,
        frozen_layers=frozen,
    )


class Replay:
    """Carries a plan out on names alone: what is alive, and what every pass finds.

    An input is "hidden" from its delivery on and "gradient" from the Backward of its cell on.
    """

    def __init__(self, plan):
        self.plan = plan
        self.last = len(plan.stages) - 1
        self.inputs, self.kv, self.graphs, self.remembered = {}, set(), set(), {}
        self.inputs_saved = {}
        self.num_losses = 0
        walk = zip(
            plan.actions[0], passes(plan, 0), kv_frees(plan, 0), input_frees(plan, 0), strict=True
        )
        for action, what, kv_dead, inputs_dead in walk:
            self.num_losses += what.loss
            if what is NOTHING:
                assert isinstance(action, (Forward, Reduce))
            elif isinstance(action, Backward):
                self.backward(action, what)
            else:
                self.forward(action, what)
            self.kv -= set(kv_dead)
            for cell in inputs_dead:
                assert cell == (action.chunk, action.stage), "dies with a pass of its own"
                assert self.inputs.pop(cell) == "hidden"
        assert not self.inputs and not self.kv and not self.graphs

    def read_prefix(self, chunk, stage):
        for seq_id, position in self.plan.links[chunk]:
            for earlier in self.plan.groups[seq_id][:position]:
                assert (earlier, stage) in self.kv

    def forward(self, action, what):
        chunk, stage = cell = action.chunk, action.stage
        self.read_prefix(*cell)
        assert not stage or self.inputs[cell] == "hidden"
        if what.writes_kv:
            self.kv.add(cell)
        if what.remembers:
            self.remembered[cell] = what.remembers
        assert what.remembered <= self.remembered.get(cell, 0)
        if what.computes == "graph":
            assert cell not in self.graphs
            self.graphs.add(cell)
            self.inputs_saved[cell] = bool(stage) and isinstance(action, Recompute)
        if isinstance(action, Forward) and stage < self.last:
            assert what.computes in ("values", "graph")
            self.inputs[chunk, stage + 1] = "hidden"

    def backward(self, action, what):
        chunk, stage = cell = action.chunk, action.stage
        self.read_prefix(*cell)
        assert what.computes == "backward" and what.loss == (stage == self.last)
        self.graphs.remove(cell)
        if self.inputs_saved.pop(cell, False):
            assert self.inputs[cell] == "hidden", "its graph has saved it"
        if stage < self.last:
            assert self.inputs.pop((chunk, stage + 1)) == "gradient"
        if stage > self.plan.frozen_stages:
            self.inputs[cell] = "gradient"
        elif stage:
            self.inputs.pop(cell, None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    options(),
    st.integers(1, 6),
    st.integers(0, 7),
    st.booleans(),
)
def test_any_lengths_and_options_give_a_legal_plan(seq_lens, options, num_layers, frozen, backward):
    plan = plan_on_device(
        seq_lens, options, num_layers=num_layers, backward=backward, frozen_layers=frozen
    )
    check(plan)
    assert load_plan(save_plan(plan)) == plan
    assert plan.tiers == options.tiers
    assert sum(plan.stages) == num_layers
    assert all(chunk.num_tokens <= options.size for chunk in plan.chunks)
    assert Replay(plan).num_losses == len(plan.chunks)
    assert obey(plan) == (
        pytest.approx(gradient(plan), rel=1e-9, abs=1e-9) if backward else [0.0] * len(plan.stages)
    )
    ends = [sum(plan.stages[: s + 1]) for s in range(len(plan.stages) - 1)]
    frozen_stages = sum(end <= frozen for end in ends) if backward else 0
    assert plan.frozen_stages == frozen_stages
    trained = {a.stage for a in plan.actions[0] if isinstance(a, (Backward, Recompute, Reduce))}
    assert trained == (set(range(frozen_stages, len(plan.stages))) if backward else set())
    for action in plan.actions[0]:
        if isinstance(action, Recompute) or (isinstance(action, Forward) and action.keep == "all"):
            wanted = min(options.recompute_layers, plan.stages[action.stage])
            assert action.recompute_layers == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), options(), st.integers(1, 4))
def test_chunk_first_is_chunkflow(seq_lens, options, num_layers):
    plan = plan_on_device(seq_lens, options, num_layers=num_layers)
    if options.order == "chunk-first":
        assert plan == plan_chunkflow(seq_lens, options, stages=(num_layers,))
    else:
        assert all(height <= options.stage_layers for height in plan.stages)


@pytest.mark.parametrize("keep", ["kv", "attention", "all"])
@pytest.mark.parametrize("num_retained", [0, 1, 2, 9])
def test_one_stage_of_all_layers_is_chunk_first(keep, num_retained):
    """Only keep=input differs: layer-first turns around with the K,V that are still there."""
    dials = {"size": 3, "keep": keep, "num_retained": num_retained, "num_layers": 5}
    whole = plan([10, 7, 2, 2], order="layer-first", stage_layers=5, **dials)
    assert whole == plan([10, 7, 2, 2], **dials)


def test_layer_first_takes_hybrid_chunks_and_retains_at_the_last_stage():
    made = plan([5, 1], size=2, keep="kv", order="layer-first")
    assert made.kind(2) == "hybrid" and made.stages == (1, 1)
    assert texts(made) == [
        *("F0.0 kv", "F1.0 kv", "F2.0 kv"),
        *("F0.1 kv", "F1.1 kv", "F2.1 all"),
        *("B2.1", "R1.1", "B1.1", "R0.1", "B0.1", "reduce 1"),
        *("R2.0", "B2.0", "R1.0", "B1.0", "R0.0", "B0.0", "reduce 0"),
    ]


def test_frozen_stages_run_forward_only():
    made = plan([4], 3, size=2, keep="attention", order="layer-first", frozen_layers=1)
    assert made.frozen_stages == 1
    assert texts(made) == [
        *("F0.0 input", "F1.0 input", "F0.1 attention", "F1.1 attention"),
        *("F0.2 attention", "F1.2 all", "B1.2", "R0.2", "B0.2", "reduce 2"),
        *("K0.1", "R1.1", "B1.1", "R0.1", "B0.1", "reduce 1"),
    ]
    assert (0, 0) in kv_frees(made, 0)[1], "with the Forward of its last reader"


@pytest.mark.parametrize(("frozen", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 2)])
def test_only_stages_wholly_within_the_frozen_layers_are_left_out(frozen, expected):
    made = plan([9], 6, size=4, order="layer-first", stage_layers=2, frozen_layers=frozen)
    assert made.frozen_stages == expected


def test_keep_all_takes_the_inputs_gradient_into_a_buffer_of_its_own():
    made = plan([2], 2, size=2, keep="all", order="layer-first")
    dead = dict(zip(texts(made), input_frees(made, 0), strict=True))
    assert dead["F0.1 all"] == ((0, 1),)


def test_evaluation_has_forwards_only():
    made = plan([9, 1], 2, size=4, backward=False, order="layer-first", frozen_layers=1)
    assert {type(action) for action in made.actions[0]} == {Forward}
    assert made.frozen_stages == 0


def with_frozen_backward(actions):
    return [*actions[:-1], Recompute(0, 0), Backward(0, 0), actions[-1]]


def without_stage_1(actions):
    return [a for a in actions if a not in (Recompute(0, 1), Backward(0, 1), Reduce(1))]


@pytest.mark.parametrize(
    ("frozen", "edit"), [(1, with_frozen_backward), (1, without_stage_1), (0, list), (2, list),
                         (3, list), (-1, list)],
)  # fmt: skip
def test_the_checker_takes_frozen_stages_and_nothing_else(frozen, edit):
    made = plan([2], 3, size=2, keep="kv", order="layer-first", frozen_layers=1)
    check(made)
    broken = replace(made, frozen_stages=frozen, actions=(tuple(edit(made.actions[0])),))
    with pytest.raises(PlanError, match="every cell has one Forward and one Backward"):
        check(broken)


def test_forwards_of_a_stage_come_before_those_of_the_next():
    made = plan([9], 4, size=2, order="layer-first", stage_layers=2)
    stages = [a.stage for a in made.actions[0] if isinstance(a, Forward)]
    assert all(one <= other for one, other in pairwise(stages))
    rebuilt = [a.stage for a in made.actions[0] if isinstance(a, RebuildKV)]
    assert set(rebuilt) == {0}, "the last stage turns around with its K,V"
