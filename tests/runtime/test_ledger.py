"""The ledger: nothing is held twice, nothing is let go of twice, and nothing is left."""

import pytest

from furlong.runtime.memory.ledger import Ledger


def test_what_is_held_is_held_once_and_released_once():
    ledger = Ledger()
    ledger.hold("kv", 0, 1)
    ledger.hold("graph", 0, 1)
    with pytest.raises(AssertionError, match=r"kv of cell 0\.1 is held twice"):
        ledger.hold("kv", 0, 1)
    ledger.release("kv", 0, 1)
    with pytest.raises(AssertionError, match=r"kv of cell 0\.1 is not held"):
        ledger.release("kv", 0, 1)
    assert ledger.holds("graph", 0, 1) and not ledger.holds("kv", 0, 1)
    with pytest.raises(AssertionError, match=r"left over .*graph"):
        ledger.assert_empty()
    ledger.release("graph", 0, 1)
    ledger.assert_empty()


def test_an_input_turns_into_its_gradient_once():
    ledger = Ledger()
    with pytest.raises(AssertionError, match="input of cell"):
        ledger.turn(2, 1)
    ledger.hold("input", 2, 1)
    ledger.turn(2, 1)
    assert ledger.holds("gradient", 2, 1) and not ledger.holds("input", 2, 1)
    with pytest.raises(AssertionError, match="input of cell"):
        ledger.turn(2, 1)


def test_an_input_beside_its_gradient_is_noticed():
    ledger = Ledger()
    ledger.hold("input", 0, 1)
    ledger.hold("gradient", 0, 1)
    with pytest.raises(AssertionError, match="held twice"):
        ledger.turn(0, 1)
