"""A single rank: it takes plans of one rank, and answers no other."""

from dataclasses import replace

import pytest
import torch

from furlong.errors import PlanError
from furlong.plan.check import missing_to_run
from furlong.plan.plan import Recv, Send
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.runtime.comms import Alone

PLAN = plan_on_device([9, 3], ChunkOptions(size=4, order="layer-first"), num_layers=2)


def test_alone_takes_plans_of_one_rank():
    Alone().accept(PLAN)
    assert not missing_to_run(PLAN)
    for other in (replace(PLAN, actions=PLAN.actions * 2), replace(PLAN, sp_size=2)):
        assert missing_to_run(other)
        with pytest.raises(PlanError, match="this run has one rank"):
            Alone().accept(other)


def test_alone_has_nobody_to_talk_to():
    with pytest.raises(PlanError, match="nobody answers 'send"):
        Alone().send(Send("activation", 0, 0, peer=1), torch.zeros(2, 2))
    with pytest.raises(PlanError, match="nobody answers 'recv"):
        Alone().recv(Recv("gradient", 0, 1, peer=1))


def test_alone_holds_everything_whole():
    for told in (Alone().unshard, Alone().reshard, Alone().reduce):
        assert told(0) is None
    with Alone().backward(0, is_last=True):
        assert Alone().add_up(torch.ones(2)).tolist() == [1, 1]
