"""Hidden states between stages: one buffer, first the input, then the gradient of it."""

from pathlib import Path

import pytest
import torch

from furlong.kv.arena import Arena
from furlong.kv.pools.device import DevicePool
from furlong.kv.pools.disk import DiskPool
from furlong.kv.pools.host import HostPool
from furlong.plan.plan import Forward
from furlong.runtime.cells.stage_inputs import StageInputs
from furlong.runtime.memory.ledger import Ledger

CPU = torch.device("cpu")
CELL = (3, 1)


def pool_of(tier: str, folder: Path):
    if tier == "device":
        return DevicePool(Arena(CPU, poison=True), poison=True)
    return HostPool(CPU, poison=True) if tier == "host" else DiskPool(folder, CPU, poison=True)


def value(lease) -> torch.Tensor:
    copy = lease.tensor.clone()
    lease.release()
    return copy


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_the_gradient_takes_the_place_of_the_input(tier, tmp_path):
    pool = pool_of(tier, tmp_path)
    ledger = Ledger()
    inputs = StageInputs(pool, ledger)
    hidden, gradient = torch.randn(2, 5, 7)
    inputs.deliver(CELL, hidden)
    held_bytes = pool.held_bytes
    assert torch.equal(value(inputs.read(CELL)), hidden)
    inputs.deliver_gradient(CELL, gradient)
    assert pool.held_bytes == held_bytes == 5 * 7 * 4
    with pytest.raises(AssertionError, match="no input of cell"):
        inputs.read(CELL)
    inputs.expect_for([Forward(*CELL, "input")])
    assert torch.equal(value(inputs.read_gradient(CELL)), gradient)
    inputs.drop(CELL)
    ledger.assert_empty()
    pool.close()


def test_hidden_states_are_never_read_as_a_gradient(tmp_path):
    inputs = StageInputs(pool_of("device", tmp_path), Ledger())
    inputs.deliver(CELL, torch.ones(2, 3))
    with pytest.raises(AssertionError, match="no gradient of cell"):
        inputs.read_gradient(CELL)


def test_a_gradient_without_an_input_has_a_place_of_its_own(tmp_path):
    """As of a cell that kept its whole graph, or one whose output went to another rank."""
    pool = pool_of("device", tmp_path)
    inputs = StageInputs(pool, Ledger())
    inputs.deliver_gradient(CELL, torch.full((2, 3), 4.0))
    assert torch.equal(value(inputs.read_gradient(CELL)), torch.full((2, 3), 4.0))
    inputs.drop(CELL)
    pool.close()


def test_what_was_delivered_may_change_and_needs_no_gradient(tmp_path):
    inputs = StageInputs(pool_of("device", tmp_path), Ledger())
    hidden = torch.ones(2, 3, requires_grad=True) * 2
    inputs.deliver(CELL, hidden)
    with torch.no_grad():
        hidden.zero_()
    lease = inputs.read(CELL)
    assert not lease.tensor.requires_grad and torch.equal(lease.tensor, torch.full((2, 3), 2.0))


def test_what_is_not_there_cannot_be_dropped_and_is_not_expected(tmp_path):
    inputs = StageInputs(pool_of("device", tmp_path), Ledger())
    inputs.expect_for([Forward(*CELL, "input")])
    with pytest.raises(AssertionError, match="is not held"):
        inputs.drop(CELL)
