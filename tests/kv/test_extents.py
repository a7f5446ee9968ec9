"""Extents hand out bytes that nobody else has, and merge what comes back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.kv.arena import Extents


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.randoms(use_true_random=False))
def test_what_is_taken_never_overlaps_and_all_comes_back(sizes, random):
    extents, taken, used = Extents(100), [], set()
    for size in sizes:
        if taken and random.random() < 0.5:
            start, old = taken.pop(random.randrange(len(taken)))
            extents.give(start, old)
            used -= set(range(start, start + old))
        start = extents.take(size)
        if start is None:
            at_end = extents.free_at_end_bytes
            assert set(range(extents.num_bytes - at_end, extents.num_bytes)).isdisjoint(used)
            extents.grow(size - at_end)
            start = extents.take(size)
        assert 0 <= start <= extents.num_bytes - size
        assert used.isdisjoint(range(start, start + size))
        used |= set(range(start, start + size))
        taken.append((start, size))
    for start, size in taken:
        extents.give(start, size)
    assert extents.take(extents.num_bytes) == 0, "one hole again"
