"""Plans over replicas: legal, balanced, and the same for all who see the same batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.plan.check import check
from furlong.plan.values import Backward, Unshard
from furlong.planners.options import ChunkOptions
from furlong.train.plans import SharedPlans, Wanted, own_sequences, packed, plan_batch, unpacked
from furlong.train.processes.together import ALONE


def squares(seq_lens):
    return [float(seq_len**2) for seq_len in seq_lens]


def made(wanted, num_replicas, frozen_layers=0):
    return plan_batch(
        wanted, num_replicas=num_replicas, work=squares, num_layers=3, frozen_layers=frozen_layers
    )


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
    assert unpacked(packed(plan)) == plan


def test_work_is_dealt_evenly():
    plan = made(Wanted((40, 20, 20, 20, 20), ChunkOptions(size=8)), 2)
    assert [own_sequences(plan, rank) for rank in range(2)] == [[0], [1, 2, 3, 4]]


def test_a_plan_is_made_once_and_named_by_its_batch():
    asked = []

    def make(wanted):
        asked.append(wanted)
        return made(wanted, 1)

    plans = SharedPlans(ALONE, make)
    one, other = Wanted((5, 7), ChunkOptions(size=4)), Wanted((7, 5), ChunkOptions(size=4))
    assert one.name != other.name != Wanted((7, 5), ChunkOptions(size=4), backward=False).name
    plans.expect(one)
    plans.expect(other)
    assert plans.get(one).seq_lens == (5, 7)
    assert plans.get(other).seq_lens == (7, 5)
    assert asked == [one, other]
    plans.get(one)
    assert asked == [one, other, one]
    plans.close()


def test_an_error_of_the_planner_comes_when_the_plan_is_asked_for():
    def make(wanted):
        raise ValueError("no such plan")

    plans = SharedPlans(ALONE, make)
    wanted = Wanted((5,), ChunkOptions(size=4))
    plans.expect(wanted)
    with pytest.raises(ValueError, match="no such plan"):
        plans.get(wanted)
    plans.close()
