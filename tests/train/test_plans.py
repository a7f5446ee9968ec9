"""Plans over replicas: legal, balanced, and the same for all who see the same batch."""

from __future__ import annotations

import time
from functools import partial
from threading import Event, Timer
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ElsewhereError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Forward, Layout, Unshard
from furlong.planners.options import ChunkOptions
from furlong.train.batches import (
    BatchPlan,
    SharedPlans,
    Wanted,
    packed,
    plan_batch,
    plan_own,
    unpacked,
)
from furlong.train.processes import ALONE, Launch, Processes


def squares(seq_lens):
    return [float(seq_len**2) for seq_len in seq_lens]


def own_sequences(plan, rank):
    """The sequences of which a rank computes a token."""
    chunks = {action.chunk for action in plan.actions[rank] if isinstance(action, Forward)}
    return sorted({piece.seq_id for chunk in chunks for piece in plan.chunks[chunk].slices})


def made(wanted, num_replicas, frozen_layers=0, **division):
    layout = Layout(num_replicas, division.pop("sp", 1), len(division.get("stages", ())) or 1)
    return plan_batch(
        wanted, layout=layout, work=squares, num_layers=3, frozen_layers=frozen_layers, **division
    ).plan


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(
        [
            {"keep": "kv"},
            {"keep": "all"},
            {"order": "layer-first", "stage_layers": 2},
            {"keep": "attention", "tier": "host"},
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
    assert unpacked(packed(BatchPlan(plan, "chunks"))) == BatchPlan(plan, "chunks")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 2), (2, 1), (1, 1, 1)]),
    st.booleans(),
    st.sampled_from([{"keep": "kv"}, {"keep": "input", "num_retained": 0}, {"tier": "host"}]),
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
    assert unpacked(packed(BatchPlan(plan, "chunks"))) == BatchPlan(plan, "chunks")


def test_work_is_dealt_evenly():
    plan = made(Wanted((40, 20, 20, 20, 20), ChunkOptions(size=8)), 2)
    assert [own_sequences(plan, rank) for rank in range(2)] == [[0], [1, 2, 3, 4]]


def test_a_plan_is_made_once_and_named_by_its_batch():
    asked = []

    def make(wanted, elsewhere):
        asked.append(wanted)
        return BatchPlan(made(wanted, 1))

    plans = SharedPlans(ALONE, make)
    one, other = Wanted((5, 7), ChunkOptions(size=4)), Wanted((7, 5), ChunkOptions(size=4))
    assert one.name != other.name != Wanted((7, 5), ChunkOptions(size=4), backward=False).name
    plans.expect(one)
    plans.expect(other)
    assert plans.get(one).plan.seq_lens == (5, 7)
    assert plans.get(other).plan.seq_lens == (7, 5)
    assert asked == [one, other]
    plans.get(one)
    assert asked == [one, other, one]
    plans.close()


def test_an_error_of_the_planner_comes_when_the_plan_is_asked_for():
    def make(wanted, elsewhere):
        raise ValueError("no such plan")

    plans = SharedPlans(ALONE, make)
    wanted = Wanted((5,), ChunkOptions(size=4))
    plans.expect(wanted)
    with pytest.raises(ValueError, match="no such plan"):
        plans.get(wanted)
    plans.close()


def test_what_was_expected_before_chunks_shrank_is_planned_anew():
    asked, go_on = [], Event()

    def make(wanted, elsewhere):
        asked.append((wanted.seq_lens, wanted.options.size))
        assert go_on.wait(10)
        return BatchPlan(made(wanted, 1))

    plans = SharedPlans(ALONE, make)
    for seq_lens in ((9,), (5, 7), (3,)):
        plans.expect(Wanted(seq_lens, ChunkOptions(size=8)))
    Timer(0.2, go_on.set).start()  # the first plan is under way until then
    for seq_lens in ((5, 7), (3,)):
        plans.get(Wanted(seq_lens, ChunkOptions(size=4)))
    plans.close()
    assert asked[:2] == [((9,), 8), ((5, 7), 4)]
    assert {size for _, size in asked[1:]} == {4}


class OneStore(Processes):
    """Processes as threads of one process: the texts of all are in `texts`."""

    def __init__(self, number, texts):
        super().__init__(Launch(number=number, num_processes=4, num_local=4))
        self.texts = texts

    def publish(self, key, text):
        self.texts[key] = text

    def fetch(self, key, is_over=lambda: False):
        while key not in self.texts and not is_over():
            time.sleep(0.001)
        return self.texts[key]

    def forget(self, *keys):
        for key in keys:
            self.texts.pop(key, None)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_plan_that_cannot_be_written_is_told(replica):
    """It would be waited for until the store gives up, and the error be lost."""
    dials = {"layout": Layout(2, 1, 1), "work": squares, "num_layers": 3}
    wanted, texts = Wanted((30, 20), ChunkOptions(size=8)), {}
    plans = SharedPlans(
        OneStore(replica, texts), partial(plan_batch, **dials), partial(plan_own, **dials), replica
    )  # fmt: skip
    if not replica:
        texts[f"{wanted.name}/1"] = packed(plan_own(wanted, 1, **dials))
    full = patch("furlong.train.batches.save_plan", side_effect=MemoryError("no room"))
    with full, pytest.raises(MemoryError, match="no room"):
        plans.get(wanted)
    failed = texts[wanted.name if not replica else f"{wanted.name}/1"]
    with pytest.raises(ElsewhereError, match="no room"):
        unpacked(failed)
    plans.close()


def test_a_process_of_each_replica_plans_for_it():
    """Processes 0 to 3 of dp 2 x sp 2; the plan is that of one planner, and is not checked again
    where a step waits for it."""
    dials = {"layout": Layout(2, 2, 1), "work": squares, "num_layers": 3}
    wanted, texts, asked = Wanted((30, 20, 9, 5), ChunkOptions(size=8)), {}, []

    def own(number):
        def make_own(wanted, replica):
            asked.append((number, replica))
            return plan_own(wanted, replica, **dials)

        def make(wanted, elsewhere):
            return plan_batch(wanted, elsewhere, **dials)

        replica = number // 2 if number % 2 == 0 else None
        return SharedPlans(OneStore(number, texts), make, make_own, replica)

    every = [own(number) for number in range(4)]
    for plans in every:
        plans.expect(wanted)
    found = [plans.get(wanted).plan for plans in every]
    assert asked == [(2, 1)]
    assert found == [made(wanted, 2, sp=2)] * 4
    with patch("furlong.plan.check.Grid") as grid:
        for plan in found:
            check(plan)
    assert not grid.called
    assert texts.keys() == {wanted.name}
    for plans in every:
        plans.close()
