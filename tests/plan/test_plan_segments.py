"""Segments of stored K,V: they cover what is stored, once, and name the pieces that touch them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furlong.plan.segments import StoredTokens, segment_tokens


def test_by_hand():
    stored = StoredTokens.of((3, 5, 2, 4), None, 4)
    assert stored.offsets == (0, 3, 8, 10, 10) and stored.bounds == (0, 4, 8, 10)
    assert [stored.pieces(range(*bounds)) for bounds in pairwise(stored.bounds)] == [
        [0, 1], [1], [2],
    ]  # fmt: skip
    assert stored.segments(stored.of_piece(1)) == range(2)
    windowed = StoredTokens.of((3, 5, 2, 4), 4, 4)
    assert windowed.offsets == (0, 3, 6, 8, 8)
    seen = [windowed.seen_from(piece, 4) for piece in range(4)]
    assert seen == [(), (range(3),), (range(3, 6),), (range(5, 8),)]
    assert list(windowed.segments(range(0))) == []
    blocks = StoredTokens.of((3, 5, 2, 4), None, 4, block=6)
    assert blocks.offsets == (0, 3, 5, 7, 7)  # 6 and 7 of 0 to 8, 6 to 9 of 0 to 10
    alone = StoredTokens.of((7,), None, 4)
    assert alone.offsets == (0, 0) and alone.bounds == (0,)


@pytest.mark.parametrize(
    ("token_bytes", "on_cpu", "on_cuda"),
    # 0.5B; 7B; 8B; 32 heads of 128 in float32; a toy; widths that are no power of two
    [(512, 4096, 8192), (2048, 1024, 8192), (4096, 512, 8192), (32768, 512, 1024),
     (16, 8192, 8192), (3 * 512, 1280, 8192), (5120, 512, 6528)],
)  # fmt: skip
def test_two_mebibytes_on_a_cpu_and_thirty_two_elsewhere(token_bytes, on_cpu, on_cuda):
    for is_moved in (False, True):
        assert segment_tokens(token_bytes, "cpu", is_moved) == on_cpu
    assert segment_tokens(token_bytes, "cuda", True) == on_cuda
    assert segment_tokens(token_bytes, "cuda", False) == 32_768
    assert on_cpu % 128 == on_cuda % 128 == 0, "no 64 mod 128 keys for cuDNN"


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=12),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 30),
)
def test_they_cover_every_stored_token_once(lens, window, per_segment):
    stored = StoredTokens.of(lens, window, per_segment)
    owners = [p for p in range(len(lens) - 1) for _ in stored.of_piece(p)]
    assert len(owners) == stored.bounds[-1] == stored.offsets[-1]
    for index, (start, stop) in enumerate(pairwise(stored.bounds)):
        assert stored.pieces(range(start, stop)) == sorted(set(owners[start:stop]))
        assert stop - start <= per_segment
        for token in range(start, stop):
            assert stored.segments(range(token, token + 1)) == range(index, index + 1)
