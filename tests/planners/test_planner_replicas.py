"""One plan of the plans of replicas: renumbered, checked, as fast as a thousand ranks need."""

from functools import partial

import pytest
from helpers.counted_work import LINEAR, lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow
from papers.whole_sequences import plan_ulysses

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import (
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Recv,
    Reduce,
    Send,
    Slice,
)
from furlong.plan.text import format_action, format_chunk
from furlong.planners.chunks import by_cost, by_order
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.simulate.clock import UnitCosts, time_actions


def join(seq_lens, dp_size, make):
    dealt = by_cost(seq_lens, dp_size)
    plans = [make([seq_lens[seq_id] for seq_id in own]) for own in dealt]
    return plans, dealt, join_replicas(plans, dealt, seq_lens)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=14),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_replicas_join(seq_lens, dp_size, num_stages, backward):
    if dp_size > len(seq_lens):
        return
    options = ChunkOptions(size=8, keep="kv")
    plans, dealt, joined = join(
        seq_lens,
        dp_size,
        lambda lens: plan_chunkflow(lens, options, stages=(2,) * num_stages, backward=backward),
    )
    check(joined)
    assert joined.seq_lens == tuple(seq_lens)
    assert len(joined.actions) == dp_size * num_stages
    seconds = [time_actions(plan, UnitCosts(plan)).duration_s for plan in plans]
    # no faster than the slowest, and slower where they wait for each other's last Backward
    assert time_actions(joined, UnitCosts(joined)).duration_s >= max(seconds) * (1 - 1e-9)
    first = 0
    for replica, (plan, own) in enumerate(zip(plans, dealt, strict=True)):
        for chunk, moved in zip(plan.chunks, joined.chunks[first:], strict=False):
            assert [(own[s.seq_id], s.start, s.stop) for s in chunk.slices] == [
                (s.seq_id, s.start, s.stop) for s in moved.slices
            ]
        for stage, actions in enumerate(plan.actions):
            moved_actions = joined.actions[replica * num_stages + stage]
            assert [type(a) for a in actions] == [type(a) for a in moved_actions]
        first += len(plan.chunks)


def test_numbers_and_peers_are_shifted():
    _, _, joined = join(
        (5, 3), 2, lambda lens: plan_chunkflow(lens, ChunkOptions(size=8), stages=(1, 1))
    )
    assert [format_chunk(chunk) for chunk in joined.chunks] == ["0:0-5", "1:0-3"]
    texts = [[format_action(a) for a in own] for own in joined.actions]
    assert [a for a in joined.actions[2] if isinstance(a, Send)] == [Send("activation", 1, 0, 3)]
    assert [a for a in joined.actions[3] if isinstance(a, Recv)] == [Recv("activation", 1, 0, 2)]
    assert [own[-1] for own in texts] == ["reduce 0", "reduce 1"] * 2


@pytest.mark.parametrize("num_stages", [1, 3])
def test_equal_replicas_take_as_long_as_one(num_stages):
    plans, _, joined = join(
        (9, 9, 4, 4, 2, 2), 2,
        lambda lens: plan_chunkflow(lens, ChunkOptions(size=4), stages=(1,) * num_stages),
    )  # fmt: skip
    alone_s = time_actions(plans[0], UnitCosts(plans[0])).duration_s
    assert time_actions(joined, UnitCosts(joined)).duration_s == pytest.approx(alone_s)


def test_a_missing_reduce_is_added():
    plan = ChunkPlan(
        (3,), (Chunk((Slice(0, 0, 3),)),), (2,), ((Forward(0, 0, "all"), Backward(0, 0)),)
    )
    joined = join_replicas([plan, plan], [[0], [1]], [3, 3])
    assert [own[-1] for own in joined.actions] == [Reduce(0), Reduce(0)]


def test_refuses_idle_replicas_and_strangers():
    options = ChunkOptions(size=4)
    plan = plan_chunkflow([3], options, stages=(2,))
    with pytest.raises(ConfigError, match="set dp to at most 1"):
        join_replicas([plan, plan], [[0], []], [3])
    with pytest.raises(ValueError, match="replica 1 is not one of its sequences"):
        join_replicas([plan, plan], [[0], [1]], [3, 4])
    taller = plan_chunkflow([3], options, stages=(3,))
    with pytest.raises(ValueError, match="replicas differ"):
        join_replicas([plan, taller], [[0], [1]], [3, 3])


def test_the_work_grows_like_the_number_of_replicas():
    plan = plan_chunkflow([64] * 4, ChunkOptions(size=64), stages=(4,) * 4)
    work = []
    for num_replicas in (16, 32):
        lens = [64] * (num_replicas * 4)
        dealt = by_order(len(lens), num_replicas)
        assert len(join_replicas([plan] * num_replicas, dealt, lens).actions) == num_replicas * 4
        work.append(lines_run(partial(join_replicas, [plan] * num_replicas, dealt, lens)))
    assert work[1] < LINEAR * work[0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=3, max_size=12), st.sampled_from((1, 4)))
def test_replicas_planned_apart_are_those_planned_together(seq_lens, sp_size):
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"))
    dials = {"sp_size": sp_size, "packed": False, "recompute_layers": 0}
    dealt = by_order(len(seq_lens), 3)
    plans = [plan_ulysses([seq_lens[i] for i in own], model, dp_size=1, **dials) for own in dealt]
    together = plan_ulysses(seq_lens, model, dp_size=3, **dials)
    assert join_replicas(plans, dealt, seq_lens) == together
