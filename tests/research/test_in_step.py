"""Replicas in step: equal passes, similar groups side by side, and dummies for the rest."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow
from papers.published.chunks import by_order
from papers.published.in_step import join_in_step
from papers.unit_costs import UnitCosts
from papers.whole_sequences import plan_ulysses, similar_meet

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError, PlanError
from furlong.plan.check import check
from furlong.plan.passes import layer_directions
from furlong.plan.plan import Backward, Chunk, Forward, Slice
from furlong.plan.text import format_action, format_chunk
from furlong.planners.chunks import chunk_by_chunk
from furlong.planners.options import ChunkOptions
from furlong.simulate.clock import time_actions

pytestmark = pytest.mark.nightly

K = 1024
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"), Training(zero_stage=3))
NUM_LAYERS = MODEL.shape.num_layers

options = st.builds(
    ChunkOptions,
    size=st.integers(3, 12),
    num_retained=st.integers(0, 3),
    keep=st.sampled_from(("input", "kv", "attention", "all")),
    hybrid=st.booleans(),
)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=14), st.integers(2, 4), options)
def test_any_replicas_on_one_stage_go_in_step(seq_lens, dp_size, option):
    dp_size = min(dp_size, len(seq_lens))
    dealt = by_order(len(seq_lens), dp_size)
    plans = [
        plan_chunkflow([seq_lens[i] for i in own], option, stages=(NUM_LAYERS,)) for own in dealt
    ]
    joined = join_in_step(plans, dealt, seq_lens, MODEL)  # checks it
    ways = {
        tuple(filter(None, layer_directions(joined, rank))) for rank in range(len(joined.actions))
    }
    assert len(ways) == 1
    for plan, actions in zip(plans, joined.actions, strict=True):
        own = [type(a) for a in actions if _is_real(joined, a)]
        assert sorted(map(str, own)) == sorted(str(type(a)) for a in plan.actions[0])
    alone_s = [time_actions(plan, UnitCosts(plan)).duration_s for plan in plans]
    assert time_actions(joined, UnitCosts(joined)).duration_s >= max(alone_s) * (1 - 1e-12)


def _is_real(plan, action):
    return not hasattr(action, "chunk") or not plan.chunks[action.chunk].is_dummy


def test_a_sequence_in_pieces_meets_short_ones_and_dummies():
    option = ChunkOptions(size=3, keep="kv", hybrid=False)
    plans = [plan_chunkflow(own, option, stages=(NUM_LAYERS,)) for own in ([9], [2, 2])]
    joined = join_in_step(plans, [[0], [1, 2]], [9, 2, 2], MODEL)
    texts = [", ".join(map(format_action, own)) for own in joined.actions]
    assert texts == [
        "F0.0 kv, F1.0 kv, F2.0 all, B2.0, R1.0, B1.0, R0.0, B0.0, reduce 0",
        "F5.0 input, F6.0 input, F7.0 all, B7.0, F3.0 all, B3.0, F4.0 all, B4.0, reduce 0",
    ]
    chunks = "0:0-3; 0:3-6; 0:6-9; 1:0-2; 2:0-2; dummy; dummy; dummy"
    assert "; ".join(map(format_chunk, joined.chunks)) == chunks
    assert [joined.kind(chunk) for chunk in (0, 3, 5)] == ["split", "packed", "dummy"]


def test_pipelines_go_in_step_only_where_they_are_equal():
    option = ChunkOptions(size=4, keep="kv")
    halves = NUM_LAYERS // 2, NUM_LAYERS - NUM_LAYERS // 2
    plans = [plan_chunkflow(lens, option, stages=halves) for lens in ([8, 2], [7, 3], [2, 2, 2])]
    assert join_in_step(plans[:2], [[0, 1], [2, 3]], [8, 2, 7, 3], MODEL).regathers
    with pytest.raises(PlanError, match="passes that gather weights, in one order"):
        join_in_step(plans[1:], [[0, 1], [2, 3, 4]], [7, 3, 2, 2, 2], MODEL)


times = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=30)
@given(times, st.randoms(use_true_random=False))
def test_no_other_order_of_micro_batches_is_faster(lens, rng):
    """By a cost that grows with the tokens in every pass: the n-th largest of all meet."""
    numbers = iter(range(100))
    replicas = [[Chunk((Slice(next(numbers), 0, n),)) for n in own] for own in lens]
    seq_lens = [n for own in lens for n in own]

    def step_s(ordered):
        plan = replace(chunk_by_chunk(seq_lens, ordered, num_layers=2), regathers=True)
        check(plan)
        return time_actions(plan, UnitCosts(plan)).duration_s

    best = similar_meet(replicas, seq_lens)
    assert {len(own) for own in best} == {max(map(len, lens))}
    for _ in range(5):
        other = [list(own) for own in best]
        for own in other:
            rng.shuffle(own)
        assert step_s(best) <= step_s(other)


def test_a_dummy_counts_as_a_token_and_waits_for_weights():
    plan = plan_ulysses([4 * K, 4 * K, 100], MODEL, dp_size=2, sp_size=2, packed=False)
    dummy = next(i for i, chunk in enumerate(plan.chunks) if chunk.is_dummy)
    gathers = MODEL.costs(plan)
    assert gathers.compute_s(Forward(dummy, 0, "all"), 1) >= gathers.unshard_s(0) > 0
    resident = replace(MODEL, training=Training()).costs(plan)
    seconds = [resident.compute_s(Backward(i, 0), 0) for i in range(len(plan.chunks))]
    assert 0 < seconds[dummy] == min(seconds)
    rank = next(r for r, own in enumerate(plan.actions) if own[-2] == Backward(dummy, 0))
    full, *_, of_dummy, state = MODEL.memory().peak_bytes_of_actions(plan, rank)
    assert state < of_dummy < full


def test_a_plan_that_runs_freely_is_not_timed_under_zero_3():
    plan = plan_ulysses([K, K], replace(MODEL, training=Training()), dp_size=2, sp_size=1)
    with pytest.raises(ConfigError, match="in lockstep"):
        MODEL.costs(plan)
    assert MODEL.costs(replace(plan, regathers=True))


def test_one_device_has_nobody_to_meet():
    plan = chunk_by_chunk([2], [[Chunk((Slice(0, 0, 2),)), Chunk(())]], num_layers=2)
    with pytest.raises(PlanError, match="chunk 1 is empty, its rank needs none to go with others"):
        check(replace(plan, regathers=True))
