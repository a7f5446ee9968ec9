"""Segments of stored K,V: they cover what is stored, once, and name the pieces that touch them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furlong.plan.segments import (
    SEGMENT_BYTES,
    Segment,
    cut_segments,
    first_seen,
    segment_tokens,
    stored_offsets,
)


def test_by_hand():
    offsets = stored_offsets((3, 5, 2, 4), None)
    assert offsets == (0, 3, 8, 10)
    assert cut_segments(offsets, 4) == (Segment(0, 4, 0, 1), Segment(4, 8, 1, 1),
                                        Segment(8, 10, 2, 2))  # fmt: skip
    windowed = stored_offsets((3, 5, 2, 4), 4)
    assert windowed == (0, 3, 6, 8)
    assert [first_seen(windowed, piece, 4) for piece in range(4)] == [0, 0, 3, 5]
    assert stored_offsets((7,), None) == (0,) and cut_segments((0,), 4) == ()


@pytest.mark.parametrize(
    ("token_bytes", "tokens"),
    # 0.5B: 4,096; 7B: 1,024, which 8B would halve and 32 heads of 128 in float32 too
    [(512, 4096), (2048, 1024), (4096, 1024), (32768, 1024), (16, 8192), (3 * 512, 1344)],
)
def test_two_mebibytes_at_multiples_of_64(token_bytes, tokens):
    assert segment_tokens(token_bytes) == tokens
    assert tokens % 64 == 0
    if 1024 < tokens < 8192:
        assert 0.9 * SEGMENT_BYTES < tokens * token_bytes <= SEGMENT_BYTES


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=12),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 30),
)
def test_they_cover_every_stored_token_once(lens, window, tokens_each):
    offsets = stored_offsets(lens, window)
    found = cut_segments(offsets, tokens_each)
    assert [t for s in found for t in range(s.start, s.stop)] == list(range(offsets[-1]))
    owners = [p for p in range(len(lens) - 1) for _ in range(offsets[p], offsets[p + 1])]
    for segment in found:
        touched = owners[segment.start : segment.stop]
        assert (segment.first_piece, segment.last_piece) == (touched[0], touched[-1])
        assert segment.start % tokens_each == 0
