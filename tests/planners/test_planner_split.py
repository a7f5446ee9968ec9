"""Cutting long sequences."""

from furlong.plan.plan import Slice
from furlong.planners.chunks import split_long


def test_pieces_have_chunk_size_and_the_last_the_rest():
    assert split_long([3, 10, 4], 4) == {1: [Slice(1, 0, 4), Slice(1, 4, 8), Slice(1, 8, 10)]}


def test_no_empty_tail():
    assert split_long([8], 4) == {0: [Slice(0, 0, 4), Slice(0, 4, 8)]}


def test_a_sequence_of_exactly_a_chunk_is_short():
    assert split_long([4, 1], 4) == {}
