"""Packing: capacity, coverage, and how near to the fewest bins it comes."""

import random

import pytest
from helpers.counted_work import LINEAR, lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import DataError
from furlong.planners.chunks import pack


def number(seq_lens):
    return dict(enumerate(seq_lens))


@st.composite
def problems(draw):
    size = draw(st.integers(1, 60))
    lens = draw(st.lists(st.integers(1, size), max_size=30))
    taken = draw(st.lists(st.integers(1, size), max_size=4))
    return size, lens, taken


def naive_pack(seq_lens, size, taken):
    """Best fit decreasing by looking at every bin; only the free spaces are comparable."""
    free = [size - tokens for tokens in taken]
    for seq_len in sorted(seq_lens, reverse=True):
        fitting = [space for space in free if space >= seq_len]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else size) - seq_len)
    return sorted(free)


def fewest_bins(seq_lens, size):
    """Exact, by trying every bin for every sequence."""

    def fits(rest, free):
        if not rest:
            return True
        return any(
            fits(rest[1:], sorted([*free[:i], space - rest[0], *free[i + 1 :]]))
            for i, space in enumerate(free)
            if space >= rest[0] and space not in free[:i]
        )

    count = 0
    while not fits(sorted(seq_lens, reverse=True), [size] * count):
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(problems())
def test_bins_hold_every_sequence_once_and_no_more_than_fits(problem):
    size, lens, taken = problem
    bins = pack(number(lens), size, taken=taken)
    assert sorted(seq_id for seq_ids in bins for seq_id in seq_ids) == list(range(len(lens)))
    loads = [sum(lens[seq_id] for seq_id in seq_ids) for seq_ids in bins]
    for index, tokens in enumerate(taken):
        loads[index] += tokens
    assert all(0 < load <= size for load in loads)
    assert sorted(size - load for load in loads) == naive_pack(lens, size, taken)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_fewer_than_twice_the_lower_bound(problem):
    size, lens, _ = problem
    num_bins = len(pack(number(lens), size))
    # two bins at most half full would have been one
    assert num_bins <= max(1, -(-2 * sum(lens) // size))


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n)))))
def test_near_the_fewest_bins(problem):
    size, lens = problem
    lens = lens[:9]
    # the bound of best-fit-decreasing (Johnson, 1974): 11/9 of the fewest and a constant
    assert len(pack(number(lens), size)) <= 11 / 9 * fewest_bins(lens, size) + 1


def test_fills_partly_filled_bins_first():
    assert pack(number([3, 3]), 8, taken=[5]) == [[0], [1]]
    assert pack(number([8]), 8, taken=[5]) == [[], [0]]


def test_a_sequence_of_exactly_a_chunk_is_packed():
    assert pack(number([4, 4]), 4) == [[0], [1]]


@pytest.mark.parametrize("seq_len", [0, -1, 5])
def test_sequences_that_cannot_be_packed_are_refused(seq_len):
    with pytest.raises(DataError, match=f"sequence 7 has {seq_len} tokens"):
        pack({7: seq_len}, 4)


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_the_work_grows_like_the_number_of_sequences(size):
    draw = random.Random(0)
    work = []
    for num_sequences in (2000, 4000):
        seq_lens = number([draw.randint(1, size) for _ in range(num_sequences)])
        work.append(lines_run(lambda seq_lens=seq_lens: pack(seq_lens, size)))
    assert work[0] > 2000 and work[1] < LINEAR * work[0]


def test_a_chunk_size_beyond_all_tokens_costs_nothing() -> None:
    lens = {0: 5, 1: 9, 2: 1}
    assert pack(lens, 10**30, taken=[7, 3]) == pack(lens, 1000, taken=[7, 3])
    assert pack({}, 10**30) == []
