"""One plan of the plans of replicas: renumbered, checked, as fast as a thousand ranks need."""

from dataclasses import replace
from functools import partial

import pytest
from helpers.counted_work import LINEAR, lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow
from papers.unit_costs import UnitCosts

from furlong.errors import ConfigError
from furlong.plan.passes import passes
from furlong.plan.plan import (
    Recv,
    Reduce,
    Send,
)
from furlong.plan.text import format_chunk
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, join_replicas
from furlong.planners.spaco import Factors, sample_backwards
from furlong.simulate.clock import time_actions


def join(seq_lens, dp_size, size, **dials):
    dealt = by_cost(seq_lens, dp_size)
    options = ChunkOptions(size=size, keep="kv")
    plans = [plan_chunkflow([seq_lens[i] for i in own], options, **dials) for own in dealt]
    return plans, dealt, join_replicas(plans, dealt, seq_lens)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=14),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_replicas_join(seq_lens, dp_size, num_stages, backward):
    stages = (2,) * num_stages
    plans, dealt, joined = join(seq_lens, dp_size, 8, stages=stages, backward=backward)
    assert joined.seq_lens == tuple(seq_lens)
    assert len(joined.actions) == dp_size * num_stages
    seconds = [time_actions(plan, UnitCosts(plan)).duration_s for plan in plans]
    # no faster than the slowest, and slower where they wait for each other's last Backward
    assert time_actions(joined, UnitCosts(joined)).duration_s >= max(seconds) * (1 - 1e-9)
    chunks = [
        [(own[s.seq_id], s.start, s.stop) for s in chunk.slices]
        for plan, own in zip(plans, dealt, strict=True)
        for chunk in plan.chunks
    ]
    assert [[(s.seq_id, s.start, s.stop) for s in c.slices] for c in joined.chunks] == chunks
    kinds = [[type(a) for a in actions] for plan in plans for actions in plan.actions]
    assert [[type(a) for a in actions] for actions in joined.actions] == kinds
    kept = join_kept(plans, dealt, seq_lens, dp_size + 1)
    for plan in (joined, kept):  # passes of the replicas' plans are taken along
        anew = replace(plan)
        ranks = range(len(plan.actions))
        assert [passes(plan, rank) for rank in ranks] == [passes(anew, rank) for rank in ranks]


def test_numbers_and_peers_are_shifted():
    _, _, joined = join((5, 3), 2, 8, stages=(1, 1))
    assert [format_chunk(chunk) for chunk in joined.chunks] == ["0:0-5", "1:0-3"]
    assert [a for a in joined.actions[2] if isinstance(a, Send)] == [Send("activation", 1, 0, 3)]
    assert [a for a in joined.actions[3] if isinstance(a, Recv)] == [Recv("activation", 1, 0, 2)]
    assert [own[-1] for own in joined.actions] == [Reduce(0), Reduce(1)] * 2


def test_the_work_grows_like_the_number_of_replicas():
    plan = plan_chunkflow([64] * 4, ChunkOptions(size=64), stages=(4,) * 4)
    work = []
    for num_replicas in (16, 32):
        own = [range(4 * d, 4 * d + 4) for d in range(num_replicas)]
        lens = [64] * (num_replicas * 4)
        work.append(lines_run(partial(join_replicas, [plan] * num_replicas, own, lens)))
    assert work[1] < LINEAR * work[0]


def test_refuses_idle_replicas_and_strangers():
    options = ChunkOptions(size=4)
    plan = plan_chunkflow([3], options, stages=(2,))
    with pytest.raises(ConfigError, match="lower dp"):
        join_replicas([plan, plan], [[0], []], [3])
    with pytest.raises(ValueError, match="other sequences"):
        join_replicas([plan, plan], [[0], [1]], [3, 4])
    taller = plan_chunkflow([3], options, stages=(3,))
    with pytest.raises(ConfigError, match=r"on replica 1: stages = .*3.*, on replica 0 .*2"):
        join_replicas([plan, taller], [[0], [1]], [3, 3])


def test_joined_samples_keep_whether_their_loss_is_reported():
    for is_reported in (False, True):
        plans, dealt, _ = join([8] * 4, 2, 4, stages=(2,))
        drawn = {0: Factors(2, 2), 2: Factors()}
        some = [sample_backwards(plan, drawn, report_loss=is_reported) for plan in plans]
        assert join_replicas(some, dealt, [8] * 4).report_loss == is_reported
