"""The clock against a plain reference; ranks that gather weights with every pass, by hand."""

import random
from dataclasses import replace

import pytest
from helpers.plan_texts import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow, recomputed_late
from papers.unit_costs import UnitCosts

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import COMPUTING, Backward, Forward, Recv, Send
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.simulate.clock import simulate, time_actions


class Drawn:
    """Seconds of every action by a draw of its own; a Reduce takes none."""

    def __init__(self, seed):
        self.seed = seed

    def _draw(self, *about):
        return random.Random(repr((self.seed, *about))).randint(1, 9)

    def compute_s(self, action, rank):
        if not isinstance(action, COMPUTING):
            return 0.0
        return float(self._draw(type(action).__name__, action.chunk, action.stage, rank))

    def transfer_s(self, action, rank):
        return float(self._draw(action.payload, action.chunk, action.stage)) / 4

    def blocking_s(self, action, rank):
        return 0.0

    link_s = head_s = blocking_s


class PerKind(Drawn):
    """The same seconds for all chunks and ranks."""

    def compute_s(self, action, rank):
        return float(self._draw(type(action).__name__)) if isinstance(action, COMPUTING) else 0.0

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
    held = [{a.stage for a in own if isinstance(a, COMPUTING)} for own in plan.actions]
    holders = [[r for r in ranks if s in held[r]] for s in range(len(plan.stages))]

    def here(rank):
        return plan.actions[rank][at[rank]] if at[rank] < len(plan.actions[rank]) else None

    def is_pass(action):
        if isinstance(action, Forward) and action.stage == len(plan.stages) - 1:
            drops = action.keep != "all" and (action.chunk, action.stage) in trained
            return not drops or plan.continues[action.chunk]
        return isinstance(action, COMPUTING)

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


def pipelines(seed, *, dp=None):
    """A checked plan of up to three replicas with equal lists, in step, of one to five stages."""
    rng = random.Random(seed)
    lens = [rng.randint(1, 12) for _ in range(rng.randint(1, 5))]
    options = ChunkOptions(
        size=rng.randint(2, 8),
        num_retained=rng.randint(0, 2),
        keep=rng.choice(("input", "kv", "attention", "all")),
        hybrid=rng.random() < 0.5,
    )
    stages, dp = (1,) * rng.randint(1, 5), dp or rng.randint(1, 3)
    plan = plan_chunkflow(lens, options, stages=stages)
    plan = recomputed_late(plan) if rng.random() < 0.5 else plan
    ids = [list(range(d * len(lens), (d + 1) * len(lens))) for d in range(dp)]
    joined = join_replicas([plan] * dp, ids, lens * dp) if dp > 1 else plan
    joined = replace(joined, regathers=dp > 1)
    check(joined)
    return joined


def test_the_clock_is_that_of_the_reference():
    for seed in range(40):
        plan, costs = pipelines(seed), Drawn(seed)
        times = time_actions(plan, costs)
        starts, end_s = reference_starts(plan, costs)
        for own, expected, actions in zip(times.start_s, starts, plan.actions, strict=True):
            for start_s, expected_s, action in zip(own, expected, actions, strict=True):
                if isinstance(action, COMPUTING):
                    assert start_s == pytest.approx(expected_s), seed
        assert times.duration_s == pytest.approx(end_s), seed


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_equal_lists_of_equal_times_lose_nothing(seed):
    plan, costs = pipelines(seed, dp=2), PerKind(seed)
    free = time_actions(replace(plan, regathers=False), costs)
    assert time_actions(plan, costs) == free


def two_replicas(*ranks, regathers=True):
    return plan_of("0:0-4; 1:0-1; 2:0-2; 3:0-3", *ranks, regathers=regathers)


FIRST = "F0.0 all, B0.0, F1.0 all, B1.0, reduce 0"


@pytest.mark.parametrize(
    ("regathers", "expected"),
    [
        # 4 and 2 tokens meet, then 1 and 3; a record ends with the rank's own work
        (True, [[(0, 4), (4, 12), (12, 13), (15, 17)], [(0, 2), (4, 8), (12, 15), (15, 21)]]),
        # weights are gathered in the first pass, gradients added up in the last backward
        (False, [[(0, 4), (4, 12), (12, 13), (13, 15)], [(0, 2), (2, 6), (6, 9), (13, 19)]]),
    ],
)
def test_ranks_meet_in_every_pass_or_in_the_first_and_the_last_alone(regathers, expected):
    plan = two_replicas(FIRST, "F2.0 all, B2.0, F3.0 all, B3.0, reduce 0", regathers=regathers)
    timeline = simulate(plan, UnitCosts(plan))
    spans = [
        [(r.start_s, r.stop_s) for r in timeline.records if r.rank == rank and r.lane == "compute"]
        for rank in (0, 1)
    ]
    assert spans == expected and timeline.duration_s == expected[1][-1][1]


def test_a_replica_that_comes_late_to_a_stage_keeps_the_other_waiting():
    """The second stage of both gathers its weights in its first pass."""
    texts = (
        "F0.0 all, send activation 0.0 to 1, recv gradient 0.1 from 1, B0.0, reduce 0",
        "recv activation 0.0 from 0, F0.1 all, B0.1, send gradient 0.1 to 0, reduce 1",
        "F1.0 all, send activation 1.0 to 3, recv gradient 1.1 from 3, B1.0, reduce 0",
        "recv activation 1.0 from 2, F1.1 all, B1.1, send gradient 1.1 to 2, reduce 1",
    )
    plan = plan_of("0:0-4; 1:0-1", *texts, stages=(1, 1))
    starts = time_actions(plan, UnitCosts(plan)).start_s
    assert [own[1] for own in (starts[1], starts[3])] == [4, 4]  # not 1: stage 1 of rank 1 gathers
    assert [own[2] for own in (starts[1], starts[3])] == [8, 8]  # its backward: F0.1 takes 4
    assert [own[3] for own in (starts[0], starts[2])] == [16, 16]


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
    with pytest.raises(PlanError, match="wait for each other"):
        time_actions(plan, UnitCosts(plan))
