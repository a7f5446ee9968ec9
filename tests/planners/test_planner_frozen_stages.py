"""Pipelines whose first stages have nothing to train."""

from dataclasses import replace

import pytest

from furlong.errors import PlanError
from furlong.plan.check import check
from furlong.plan.plan import Forward, Recv, Send
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_seq1f1b


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_stages_only_run_forward(frozen):
    """No gradient goes to them, they reduce nothing, and the trained ones are as ever."""
    lens, stages = [20, 5, 3], (1, 1, 1)
    groups = group_chunks(lens, ChunkOptions(size=8))
    for make in (plan_1f1b, plan_seq1f1b):
        plan = make(lens, groups, stages=stages, frozen_stages=frozen)
        whole = make(lens, groups, stages=stages)
        for stage, actions in enumerate(plan.actions):
            kinds = {type(action) for action in actions}
            if stage < frozen:
                assert kinds <= {Forward, Send, Recv}
            assert not any(isinstance(a, Recv) and a.payload == "gradient" and a.stage <= frozen
                           for a in actions)  # fmt: skip
            computing = [a for a in actions if not isinstance(a, (Send, Recv))]
            if stage >= frozen:
                own = whole.actions[stage]
                assert computing == [a for a in own if not isinstance(a, (Send, Recv))]


def test_only_a_frozen_rank_may_be_without_a_reduce():
    lens = [20, 5]
    plan = plan_1f1b(
        lens, group_chunks(lens, ChunkOptions(size=8)), stages=(1, 1, 1), frozen_stages=1
    )
    check(plan)
    for rank in (1, 2):
        actions = [*plan.actions]
        actions[rank] = actions[rank][:-1]
        with pytest.raises(PlanError, match="no Reduce of stage"):
            check(replace(plan, actions=tuple(actions)))
    idle = replace(plan, actions=(*plan.actions, ()))
    with pytest.raises(PlanError, match="rank 3 has none"):
        check(idle)
