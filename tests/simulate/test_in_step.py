"""Ranks that gather weights with every pass: by hand, against a plain reference, and as laws."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import Backward, ChunkPlan, Forward, RebuildKV, Recompute, Recv, Send
from furlong.plan.text import parse_action, parse_chunk
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.simulate.clock import UnitCosts, simulate, time_actions


class Drawn:
    """Seconds of every action by a draw of its own; a Reduce takes none."""

    def __init__(self, seed):
        self.seed = seed

    def _draw(self, *about):
        return random.Random(repr((self.seed, *about))).randint(1, 9)

    def compute_s(self, action, rank):
        if not isinstance(action, (Forward, Recompute, Backward, RebuildKV)):
            return 0.0
        return float(self._draw(type(action).__name__, action.chunk, action.stage, rank))

    def transfer_s(self, action, rank):
        return float(self._draw(action.payload, action.chunk, action.stage)) / 4


class PerKind(Drawn):
    """The same seconds for all chunks and ranks."""

    def compute_s(self, action, rank):
        kinds = (Forward, Recompute, Backward, RebuildKV)
        return float(self._draw(type(action).__name__)) if isinstance(action, kinds) else 0.0

    def transfer_s(self, action, rank):
        return 0.5


def reference_starts(plan, costs):
    """When every action starts, found pass by pass: whoever can go on does, until nobody can.

    A pass is done for all ranks of its stage at once, when each of them stands before one.
    """
    ranks = range(len(plan.actions))
    at, free_s, arrived_s, channel_s = [0 for _ in ranks], [0.0 for _ in ranks], {}, {}
    starts = [[None] * len(own) for own in plan.actions]
    trained = {(a.chunk, a.stage) for own in plan.actions for a in own if isinstance(a, Backward)}
    kinds = (Forward, Recompute, Backward, RebuildKV)
    holders = [
        [r for r in ranks if any(isinstance(a, kinds) and a.stage == s for a in plan.actions[r])]
        for s in range(len(plan.stages))
    ]

    def here(rank):
        return plan.actions[rank][at[rank]] if at[rank] < len(plan.actions[rank]) else None

    def is_pass(action):
        if isinstance(action, Forward) and action.stage == len(plan.stages) - 1:
            drops = action.keep != "all" and (action.chunk, action.stage) in trained
            return not drops or plan.continues[action.chunk]
        return isinstance(action, kinds)

    def done(rank, start_s, until_s):
        starts[rank][at[rank]] = start_s
        at[rank], free_s[rank] = at[rank] + 1, until_s

    def step(rank):
        action, now = here(rank), free_s[rank]
        message = getattr(action, "payload", None), getattr(action, "chunk", None), action.stage
        if isinstance(action, Send):
            start_s = max(now, channel_s.get((rank, action.peer), 0.0))
            channel_s[rank, action.peer] = start_s + costs.transfer_s(action, rank)
            arrived_s[message] = start_s + costs.transfer_s(action, rank)
            done(rank, start_s, now)
        elif isinstance(action, Recv):
            if message not in arrived_s:
                return False
            done(rank, now, max(now, arrived_s[message]))
        elif not is_pass(action):
            done(rank, now, now + costs.compute_s(action, rank))
        else:
            meeting = [(r, here(r)) for r in holders[action.stage]]
            if any(a is None or not is_pass(a) or a.stage != action.stage for _, a in meeting):
                return False
            start_s = max(free_s[r] for r, _ in meeting)
            until_s = start_s + max(costs.compute_s(a, r) for r, a in meeting)
            for r, _ in meeting:
                done(r, start_s, until_s)
        return True

    while any(here(rank) is not None and step(rank) for rank in ranks):
        pass
    return starts, max(free_s)


def pipelines_in_step(seed):
    """A checked plan of replicas with equal lists, of one to three stages."""
    rng = random.Random(seed)
    lens = [rng.randint(1, 12) for _ in range(rng.randint(1, 5))]
    options = ChunkOptions(
        size=rng.randint(2, 8),
        num_retained=rng.randint(0, 2),
        keep=rng.choice(("input", "kv", "attention", "all")),
        hybrid=rng.random() < 0.5,
    )
    stages, dp = (1,) * rng.randint(1, 3), rng.randint(2, 3)
    plan = plan_chunkflow(lens, options, stages=stages)
    ids = [list(range(d * len(lens), (d + 1) * len(lens))) for d in range(dp)]
    joined = replace(join_replicas([plan] * dp, ids, lens * dp), regathers=True)
    check(joined)
    return joined


@pytest.mark.parametrize("seed", range(200))
def test_the_clock_is_that_of_the_reference(seed):
    plan, costs = pipelines_in_step(seed), Drawn(seed)
    times = time_actions(plan, costs)
    starts, end_s = reference_starts(plan, costs)
    for own, expected, actions in zip(times.start_s, starts, plan.actions, strict=True):
        for start_s, expected_s, action in zip(own, expected, actions, strict=True):
            if isinstance(action, (Forward, Recompute, Backward, RebuildKV)):
                assert start_s == pytest.approx(expected_s)
    assert times.duration_s == pytest.approx(end_s)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_in_step_is_never_faster(seed):
    plan, costs = pipelines_in_step(seed), Drawn(seed)
    free = time_actions(replace(plan, regathers=False), costs)
    in_step = time_actions(plan, costs)
    for early, late in zip(free.start_s, in_step.start_s, strict=True):
        assert all(a <= b for a, b in zip(early, late, strict=True))
    assert free.duration_s <= in_step.duration_s


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_equal_lists_of_equal_times_lose_nothing(seed):
    plan, costs = pipelines_in_step(seed), PerKind(seed)
    free = time_actions(replace(plan, regathers=False), costs)
    assert time_actions(plan, costs) == free


def two_replicas(*ranks, regathers=True):
    chunks = tuple(map(parse_chunk, ("0:0-4", "1:0-1", "2:0-2", "3:0-3")))
    actions = tuple(tuple(map(parse_action, texts.split(", "))) for texts in ranks)
    return ChunkPlan((4, 1, 2, 3), chunks, (1,), actions, regathers=regathers)


FIRST = "F0.0 all, B0.0, F1.0 all, B1.0, reduce 0"


def test_every_pass_takes_as_long_as_its_slowest():
    plan = two_replicas(FIRST, "F2.0 all, B2.0, F3.0 all, B3.0, reduce 0")
    timeline = simulate(plan, UnitCosts(plan))
    spans = [
        [(r.start_s, r.stop_s) for r in timeline.records if r.rank == rank and r.lane == "compute"]
        for rank in (0, 1)
    ]
    # 4 and 2 tokens meet, then 1 and 3; a record ends with the rank's own work
    assert spans == [[(0, 4), (4, 12), (12, 13), (15, 17)], [(0, 2), (4, 8), (12, 15), (15, 21)]]
    assert timeline.duration_s == 21


def test_without_steps_only_the_first_pass_and_the_last_backward_meet():
    """Weights are gathered in the one, gradients added up in the other: the first to come waits."""
    plan = two_replicas(FIRST, "F2.0 all, B2.0, F3.0 all, B3.0, reduce 0", regathers=False)
    timeline = simulate(plan, UnitCosts(plan))
    spans = [
        [(r.start_s, r.stop_s) for r in timeline.records if r.rank == rank and r.lane == "compute"]
        for rank in (0, 1)
    ]
    assert spans == [[(0, 4), (4, 12), (12, 13), (13, 15)], [(0, 2), (2, 6), (6, 9), (13, 19)]]
    assert timeline.duration_s == 19


def test_a_replica_that_comes_late_to_a_stage_keeps_the_other_waiting():
    """The second stage of both gathers its weights in its first pass."""
    chunks = tuple(map(parse_chunk, ("0:0-4", "1:0-1")))
    texts = (
        "F0.0 all, send activation 0.0 to 1, recv gradient 0.1 from 1, B0.0, reduce 0",
        "recv activation 0.0 from 0, F0.1 all, B0.1, send gradient 0.1 to 0, reduce 1",
        "F1.0 all, send activation 1.0 to 3, recv gradient 1.1 from 3, B1.0, reduce 0",
        "recv activation 1.0 from 2, F1.1 all, B1.1, send gradient 1.1 to 2, reduce 1",
    )
    actions = tuple(tuple(map(parse_action, own.split(", "))) for own in texts)
    plan = ChunkPlan((4, 1), chunks, (1, 1), actions)
    starts = time_actions(plan, UnitCosts(plan)).start_s
    assert [own[1] for own in (starts[1], starts[3])] == [4, 4]  # not 1: stage 1 of rank 1 gathers
    assert [own[2] for own in (starts[1], starts[3])] == [8, 8]  # its backward: F0.1 takes 4
    assert [own[3] for own in (starts[0], starts[2])] == [16, 16]


def test_a_forward_that_computes_nothing_is_no_pass():
    """Its graph is dropped, and its recompute is the pass that gathers."""
    plan = two_replicas(FIRST, "F2.0 kv, R2.0, B2.0, F3.0 kv, R3.0, B3.0, reduce 0")
    check(plan)

    class Free(UnitCosts):
        def compute_s(self, action, rank):
            return 0.0 if getattr(action, "keep", "") == "kv" else super().compute_s(action, rank)

    times = time_actions(plan, Free(plan))
    assert (times.start_s[0][:4], times.duration_s) == ([0, 4, 12, 15], 21)
    assert [times.start_s[1][i] for i in (1, 2, 4, 5)] == [0, 4, 12, 15]


class Copying(UnitCosts):
    def copy_s(self, action, rank):
        return 10.0 if action == Backward(2, 0) else 0.0


def test_a_rank_that_still_copies_comes_late_to_the_next_pass():
    plan = two_replicas(FIRST, "F2.0 all, B2.0, F3.0 all, B3.0, reduce 0")
    costs = Copying(plan)
    times = time_actions(plan, costs, copies=costs)
    assert [own[2] for own in times.start_s] == [14, 14]


@pytest.mark.parametrize(
    "second",
    [
        "F2.0 all, B2.0, reduce 0",
        "F2.0 all, B2.0, F3.0 all, B3.0, F1.0 all, B1.0, reduce 0",
    ],
)
def test_unequal_lists_are_refused_and_never_hang(second):
    plan = two_replicas(FIRST, second)
    with pytest.raises(PlanError, match=r"(?s)these wait for ever: rank .* <-- here"):
        time_actions(plan, UnitCosts(plan))
