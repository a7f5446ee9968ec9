"""Plans over replicas: legal, balanced, and the same for all who see the same batch."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ElsewhereError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Forward, Layout, Unshard
from furlong.planners.options import ChunkOptions
from furlong.train import batches
from furlong.train.batches import BatchEngine, BatchPlanner, SharedPlans, Wanted
from furlong.train.processes import ALONE, Launch, Processes


def squares(seq_lens):
    return [float(seq_len**2) for seq_len in seq_lens]


def own_sequences(plan, rank):
    """The sequences of which a rank computes a token."""
    chunks = {action.chunk for action in plan.actions[rank] if isinstance(action, Forward)}
    return sorted({piece.seq_id for chunk in chunks for piece in plan.chunks[chunk].slices})


def made(wanted, num_replicas, frozen_layers=0, **division):
    layout = Layout(num_replicas, division.pop("sp", 1), len(division.get("stages", ())) or 1)
    planner = BatchPlanner(layout, squares, 3, frozen_layers=frozen_layers, **division)
    return planner.plan(wanted).plan


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(
        [
            {"keep": "kv"},
            {"keep": "all"},
            {"order": "layer-first", "stage_layers": 2},
            {"keep": "attention", "offload": "cpu"},
        ]
    ),
    st.integers(0, 2),
)
def test_each_sequence_has_one_replica(seq_lens, num_replicas, backward, dials, frozen_layers):
    options = ChunkOptions(size=8, **dials)
    plan = made(Wanted(tuple(seq_lens), options, backward), num_replicas, frozen_layers)
    check(plan)
    assert plan.seq_lens == tuple(seq_lens) and len(plan.actions) == num_replicas
    owned = [own_sequences(plan, rank) for rank in range(num_replicas)]
    assert sorted(seq_id for own in owned for seq_id in own) == list(range(len(seq_lens)))
    for actions in plan.actions:
        first = actions[: len(plan.stages)]
        assert first == tuple(Unshard(stage) for stage in range(len(plan.stages)))
        assert any(isinstance(action, Backward) for action in actions) == backward


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 2), (2, 1), (1, 1, 1)]),
    st.booleans(),
    st.sampled_from([{"keep": "kv"}, {"keep": "input", "num_retained": 0}, {"offload": "cpu"}]),
    st.integers(0, 2),
)
def test_pipelines_of_pools(seq_lens, dp, sp, stages, backward, dials, frozen_layers):
    options = ChunkOptions(size=8, **dials)
    wanted = Wanted(tuple(seq_lens), options, backward)
    plan = made(wanted, dp, frozen_layers, sp=sp, stages=stages)
    assert (plan.stages, plan.sp_size) == (stages, sp)
    assert len(plan.actions) == dp * len(stages)
    owned = [own_sequences(plan, rank) for rank in range(len(plan.actions))]
    for replica in range(dp):  # all stages of a replica compute what it was dealt
        own = owned[replica * len(stages) : (replica + 1) * len(stages)]
        assert len(set(map(tuple, own))) == 1
    assert sorted(i for own in owned[:: len(stages)] for i in own) == list(range(len(seq_lens)))
    cut = [sum(stages[:n]) for n in range(1, len(stages))]
    assert plan.frozen_stages == (sum(end <= frozen_layers for end in cut) if backward else 0)
    assert {p.place.size for chunk in plan.chunks for p in chunk.slices} == {sp}
    for rank, actions in enumerate(plan.actions):
        assert actions[0] == Unshard(rank % len(stages))


def test_work_is_dealt_evenly():
    plan = made(Wanted((40, 20, 20, 20, 20), ChunkOptions(size=8)), 2)
    assert [own_sequences(plan, rank) for rank in range(2)] == [[0], [1, 2, 3, 4]]


def shared(replica=0, processes=ALONE, layout=None):
    return SharedPlans(processes, replica, BatchPlanner(layout or Layout(), squares, 3))


def test_collectives_of_a_step_wait_for_its_slowest_replica(monkeypatch):
    """Whatever the limit of their groups, in training as in evaluation: a multiple of what the
    replica that takes longest is predicted to take."""
    allowed = []
    monkeypatch.setattr(batches, "allow_time", allowed.append)
    planner = BatchPlanner(Layout(2), squares, 3, seconds=lambda plan: 60.0 * sum(plan.seq_lens))
    own = SimpleNamespace(
        ranks=None, model=SimpleNamespace(device="cpu"), reads=lambda _: [],
        run_made=lambda make, *_, **__: make(), adds_router_loss=False,
    )  # fmt: skip
    engine = BatchEngine(own)
    engine._plans = SimpleNamespace(get=planner.plan, expect=lambda _: None, drop=lambda _: None)
    batch = SimpleNamespace(seq_lens=(60, 8), num_valid_tokens=1, part=lambda *_: {})
    for backward in (True, False):
        engine.compute(batch, ChunkOptions(size=16), backward=backward)
    assert [limit >= timedelta(hours=2) for limit in allowed] == [True, True]


def test_a_call_that_fails_before_it_took_its_plan_can_be_made_again():
    """Else the other processes would plan anew, and wait for this one."""
    own = SimpleNamespace(
        ranks=None, run_made=lambda *_, **__: next(iter(())), adds_router_loss=False
    )
    engine = BatchEngine(own)
    batch = SimpleNamespace(seq_lens=(5, 7), num_valid_tokens=1)
    with closing(shared()) as plans:
        engine._plans = plans
        for _ in range(2):
            with pytest.raises(StopIteration):
                engine.compute(batch, ChunkOptions(size=16))
            assert not plans._coming


def test_plans_come_in_the_order_in_which_they_were_expected(monkeypatch):
    asked, plan_own = [], BatchPlanner.own

    def noted(planner, wanted, replica):
        asked.append(wanted)
        return plan_own(planner, wanted, replica)

    monkeypatch.setattr(BatchPlanner, "own", noted)
    one, other = Wanted((5, 7), ChunkOptions(size=4)), Wanted((7, 5), ChunkOptions(size=4))
    with closing(shared()) as plans:
        plans.expect(one)
        plans.expect(other)
        assert plans.get(one).plan.seq_lens == (5, 7)
        assert plans.get(other).plan.seq_lens == (7, 5)
        assert asked == [one, other]
        shrunk = Wanted((5, 7), ChunkOptions(size=2))
        plans.expect(one)
        assert {len(chunk.slices) for chunk in plans.get(shrunk).plan.chunks} == {1}
        plans.get(one)
        assert asked[2:] == [one, shrunk, one]


def test_an_error_of_the_planner_comes_when_the_plan_is_asked_for(monkeypatch):
    def fail(*_):
        raise ValueError("no such plan")

    monkeypatch.setattr(BatchPlanner, "own", fail)
    wanted = Wanted((5,), ChunkOptions(size=4))
    with closing(shared()) as plans:
        plans.expect(wanted)
        with pytest.raises(ValueError, match="no such plan"):
            plans.get(wanted)


class Threads(Processes):
    """Processes as threads of one process."""

    def __init__(self, number, barrier, values):
        super().__init__(Launch(number=number, num_processes=4, num_local=4))
        self.barrier, self.values = barrier, values

    def each(self, value):
        self.values[self.launch.number] = value
        self.barrier.wait(20)
        found = list(self.values)
        self.barrier.wait(20)
        return found


@pytest.mark.parametrize("division", [{}, {"sp": 2}, {"stages": (1, 2)}])
def test_a_tree_is_on_one_replica(division):
    """Sequence 1 is a tree; a replica without one may have another planner's plan."""
    wanted = Wanted((30, 50, 9), ChunkOptions(size=8), True, ((1, ((40, 20),)),))
    plan = made(wanted, 2, **division)
    check(plan)
    num_stages = len(plan.stages)
    owned = [set(own_sequences(plan, rank)) for rank in range(0, 2 * num_stages, num_stages)]
    assert owned == [{1}, {0, 2}] and plan.trees.keys() == {1}
    branches = [s for c in plan.chunks for s in c.slices if s.parent is not None]
    assert [(s.seq_id, s.start, s.stop, plan.position(s)) for s in branches[:1]] == [
        (1, 40, 48, 20)
    ]
    planner = BatchPlanner(Layout(2, division.get("sp", 1)), squares, 3)
    assert planner.most_work(wanted) == 50**2
    assert planner.most_work(Wanted((30, 40, 30, 9), ChunkOptions(size=8))) == 2 * 30**2


@pytest.mark.parametrize("failing", [None, 1])
def test_a_process_of_each_replica_plans_for_it(monkeypatch, failing):
    """Processes 0 to 3 of dp 2 x sp 2; the plan is that of one planner, and is not checked again
    where a step waits for it. Where one cannot plan all are told."""
    layout, wanted = Layout(2, 2, 1), Wanted((30, 20, 9, 5), ChunkOptions(size=8))
    asked, plan_own = [], BatchPlanner.own

    def own(planner, wanted, replica):
        asked.append(replica)
        if replica == failing:
            raise MemoryError("no room")
        return plan_own(planner, wanted, replica)

    expected = made(wanted, 2, sp=2)
    monkeypatch.setattr(BatchPlanner, "own", own)
    barrier, values = Barrier(4), [None] * 4
    every = [
        shared(None if number % 2 else number // 2, Threads(number, barrier, values), layout)
        for number in range(4)
    ]
    for plans in every:
        plans.expect(wanted)
    found = []
    for plans in every:
        try:
            found.append(plans.get(wanted).plan)
        except (MemoryError, ElsewhereError) as error:
            found.append(f"{type(error).__name__}: {error}")
        plans.close()
    assert sorted(asked) == [0, 1]
    if failing is not None:
        elsewhere = "ElsewhereError: no plan of another process (MemoryError: no room)"
        assert found == [elsewhere] * 2 + ["MemoryError: no room"] + [elsewhere]
        return
    assert found == [expected] * 4
    with patch("furlong.plan.check.Grid") as grid:
        for plan in found:
            check(plan)
    assert not grid.called
