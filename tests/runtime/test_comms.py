"""A single rank: it takes plans of one rank, answers no other, and holds every sum whole."""

from dataclasses import replace

import pytest
import torch

from furlong.errors import PlanError
from furlong.plan.plan import Recv, Send
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.runtime.distributed.comms import Comms

PLAN = plan_on_device([9, 3], ChunkOptions(size=4, order="layer-first"), num_layers=2)


def test_alone():
    comms = Comms()
    for other in (replace(PLAN, actions=PLAN.actions * 2), replace(PLAN, sp_size=2)):
        with pytest.raises(PlanError, match="this run has one rank"):
            comms.accept(other)
    comms.accept(PLAN)
    with pytest.raises(PlanError, match="nobody answers 'send"):
        comms.send(Send("activation", 0, 0, peer=1), torch.zeros(2, 2))
    with pytest.raises(PlanError, match="nobody answers 'recv"):
        comms.recv(Recv("gradient", 0, 1, peer=1))
    for act in (comms.unshard, comms.reshard, comms.reduce):
        act(0)
    with comms.backward(0, is_last=True):
        assert comms.add_up(torch.ones(2)).tolist() == [1, 1]
    comms.settle()
    assert comms.is_settled
