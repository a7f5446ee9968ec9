"""The store keeps what later chunks see, and gives every byte back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.kv.arena import Arena
from furlong.kv.store import KVStore

CPU = torch.device("cpu")


def filled(lens, window=None, dtype=torch.float64):
    """A store that holds all pieces but the last of one sequence, and the whole keys and values."""
    arena = Arena(CPU)
    store = KVStore(arena, {0: lens})
    k, v = torch.randn(2, 2, sum(lens), 4, dtype=dtype)
    start = 0
    for piece, num_tokens in enumerate(lens[:-1]):
        rows = slice(start, start + num_tokens)
        store.write(0, 0, piece, k[:, rows], v[:, rows], window)
        start += num_tokens
    return arena, store, k, v


def test_a_window_keeps_only_what_later_tokens_see():
    arena, _, _, _ = filled([100, 100, 5], window=9)
    assert arena.taken_bytes == 2 * 2 * (8 + 8) * 4 * 8


def test_gradients_arrive_at_their_own_piece_in_float32():
    _, store, _, _ = filled([3, 4, 2], dtype=torch.bfloat16)
    assert store.later_grads(0, 0, 1) is None
    for block in store.prefix(0, 0, 2, None, gradients=True):
        for _ in range(1024):
            block.add_grad(torch.full((2, 7, 4), 2**-10), torch.full((2, 7, 4), 2**-9))
    first, dk, dv = store.later_grads(0, 0, 1)
    assert first == 0 and dk.shape == (2, 4, 4) and dk.dtype == torch.float32
    assert torch.all(dk == 1) and torch.all(dv == 2)
    assert store.later_grads(0, 0, 2) is None, "nobody comes after the last piece"


def test_reading_a_freed_piece_is_a_bug_that_shows():
    _, store, _, _ = filled([3, 4, 2])
    store.free(0, 0, 1)
    with pytest.raises(AssertionError, match=r"K,V of pieces \[1\] of sequence 0 are gone"):
        list(store.prefix(0, 0, 2, None, gradients=False))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 400), max_size=30), st.randoms(use_true_random=False))
def test_arena_pieces_never_overlap(sizes, random):
    arena, alive = Arena(CPU), []
    for number, size in enumerate(sizes):
        if alive and random.random() < 0.4:
            tensor, value = alive.pop(random.randrange(len(alive)))
            assert torch.all(tensor == value)
            arena.give(tensor)
        alive.append((arena.take((size,), torch.float32).fill_(number), number))
    for tensor, value in alive:
        assert torch.all(tensor == value)
        arena.give(tensor)
    assert arena.taken_bytes == 0


def test_what_was_given_back_is_poisoned():
    arena = Arena(CPU, poison=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = arena.take((3,), dtype).zero_()
        arena.give(x)
        assert torch.all(x.isnan())
    arena = Arena(CPU)
    x = arena.take((3,), torch.float32).zero_()
    arena.give(x)
    assert torch.all(x == 0)


def test_a_step_of_known_size_allocates_nothing():
    arena = Arena(CPU)
    for _ in range(3):
        pieces = [arena.take((2, 100 + i), torch.float32) for i in range(5)]
        for piece in pieces:
            arena.give(piece)
    before = arena.pooled_bytes
    pieces = [arena.take((2, 100 + i), torch.float32) for i in range(5)]
    assert (
        arena.pooled_bytes == before and len({p.untyped_storage().data_ptr() for p in pieces}) == 1
    )
