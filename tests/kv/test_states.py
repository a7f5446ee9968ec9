"""States of recurrent layers in the store: by boundary and kind, read as copies, freed with K,V."""

import pytest
import torch

from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore, StateStore
from furlong.models.mixers import receive_states, send_states

CONV, SCAN = ("conv", 0), ("recurrent", 0)


def states(value: float) -> dict:
    return {CONV: torch.full((1, 4, 3), value), SCAN: torch.full((1, 2, 5), value)}


@pytest.fixture
def pool():
    return DevicePool(Arena(torch.device("cpu")), poison=True)


def test_what_is_read_is_a_copy_of_what_was_written_last(pool):
    store, at = StateStore(pool), (0, 1, 4)
    store.write(at, states(1.0))
    for kind, state in states(2.0).items():  # kinds may leave one by one
        store.write(at, {kind: state})
    found = store.read(at)
    store.free(at)
    assert all(torch.equal(found[key], x) for key, x in states(2.0).items())
    assert not store.num_buffers
    pool.close()  # nothing is left
    with pytest.raises(AssertionError, match="gone"):
        store.read(at)


def test_gradients_are_relayed_once_and_those_of_chunks_that_were_not_drawn_never(pool):
    store = StateStore(pool, trained={0: [8], 1: [4, 8]})
    for seq_id, token in ((0, 4), (0, 8), (1, 4)):
        store.send((seq_id, 3, token), {CONV: torch.ones(2), SCAN: None})
    assert store.later_grads((0, 3, 4), [CONV, SCAN]) == [None, None]
    assert store.later_grads((0, 3, 8), [SCAN]) == [None]
    assert store.later_grads((0, 3, 8), [CONV])[0].sum() == 2
    assert store.later_grads((0, 3, 8), [CONV]) == [None] and store.num_buffers == 1
    store.free((1, 3, 4))
    assert not store.num_buffers


def test_states_live_and_end_with_the_keys_of_their_piece():
    store = KVStore(Arena(torch.device("cpu")), {0: [4, 4, 2]})
    for token in (4, 8):
        store.states.write((0, 0, token), states(token))
    assert store.num_buffers == 2
    store.free(0, 0, 0)
    assert store.num_buffers == 1 and store.states.read((0, 0, 8))
    store.clear()
    assert not store.num_buffers


def test_a_state_relays_its_gradient_through_two_slices():
    """The first slice gives its state w w x, the second one w x and what has entered it."""
    torch.manual_seed(0)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 3, dtype=torch.float64)

    def left() -> torch.Tensor:
        return x[:, :1] * w * w

    loss = (left() ** 2).sum() + ((x[:, 1:] * w + left()) ** 2).sum()
    (truth,) = torch.autograd.grad(loss, w)
    sent: list = []
    state = left()
    first = send_states(state * 1, (state,), lambda: sent[0])
    leaf, entered = receive_states(
        x[:, 1:], {SCAN: state.detach()}, lambda g: sent.append([g[SCAN]])
    )
    ((leaf * w + entered[SCAN]) ** 2).sum().backward()  # x has no gradient, its state has
    assert len(sent) == 1
    (first**2).sum().backward()
    assert torch.allclose(w.grad, truth, rtol=1e-14)
