"""Rows of chunks: every token has one owner, both ends of an exchange agree, order is kept."""

import random
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from helpers.random_chunks import random_chunks

from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import ChunkRows, Level, inner_size, rows_of

HEADS = [(4, 2), (8, 4), (8, 1), (2, 2), (6, 2), (3, 3), (12, 3)]
NUM_DRAWS = 150


def draws(seed):
    """A random chunk with its pool's size and its model's heads, over and over."""
    draw = random.Random(seed)
    for _ in range(NUM_DRAWS):
        sp_size, heads = draw.choice((1, 2, 3, 4, 6, 8, 12)), draw.choice(HEADS)
        _, chunks = random_chunks(
            draw, sp_size, num_chunks=3, num_sequences=draw.randint(1, 9), max_tokens=24
        )
        for chunk in chunks:
            yield chunk, sp_size, [
                rows_of(chunk, p, sp_size=sp_size, q_heads=heads[0], kv_heads=heads[1])
                for p in range(sp_size)
            ]  # fmt: skip


def tokens_of(rows: ChunkRows, local: tuple[int, int]) -> list[tuple[int, int]]:
    """(seq_id, position) of some local rows."""
    each = [(s, t) for s, start, stop in rows.tokens for t in range(start, stop)]
    return each[slice(*local)]


def level_of(rows: ChunkRows, place: Place) -> Level:
    (level,) = [level for level in rows.levels if level.size == place.size]
    return level


def members(pool: list[ChunkRows], place: Place) -> list[tuple[ChunkRows, Level]]:
    return [(pool[p], level_of(pool[p], place)) for p in range(place.first, place.stop)]


def test_every_token_has_one_owner_and_levels_fall_in_size_and_divide_the_rows():
    for chunk, _, pool in draws(0):
        found = []
        for process, rows in enumerate(pool):
            own = tokens_of(rows, (0, rows.num_tokens))
            found += own
            held = [s for s in chunk.slices if s.place.first <= process < s.place.stop]
            assert set(own) <= {(s.seq_id, t) for s in held for t in range(s.start, s.stop)}
            assert len(own) == rows.num_tokens and rows.num_rows == max(1, rows.num_tokens)
            sizes = [level.size for level in rows.levels]
            assert sizes == sorted(set(sizes), reverse=True)
            placed = {p.index for level in rows.levels for p in level.slices}
            assert placed == {chunk.slices.index(s) for s in held}
            bounds = [0, *chain.from_iterable(level.local for level in rows.levels)]
            assert bounds[-1] == rows.num_tokens
            assert all(a == b for a, b in list(pairwise(bounds))[::2])
            assert [level.size for level in rows.exchanged] == [n for n in sizes if n > 1]
            assert (rows.own is None) == (1 not in sizes)
        everything = [(s.seq_id, t) for s in chunk.slices for t in range(s.start, s.stop)]
        assert sorted(found) == sorted(everything)


def test_members_of_a_place_agree_and_their_parts_are_equal():
    for chunk, _, pool in draws(2):
        for place in {piece.place for piece in chunk.slices}:
            levels = [level for _, level in members(pool, place)]
            for member, level in enumerate(levels):
                expected = replace(levels[0], member=member, local=level.local, slices=level.slices)
                assert level == expected, "shares and runs of keys are everybody's"
                assert level.local[1] - level.local[0] == level.shares[member]
            for inner in range(levels[0].num_inner):
                u = level.inner_size
                within = levels[0].shares[inner * u : (inner + 1) * u]
                assert max(within) - min(within) <= 1
            inners, slices = levels[0].inner_rows, levels[0].slices
            assert max(inners) - min(inners) <= 2 * len(slices)


def test_what_is_received_is_in_the_order_of_tokens():
    """Queries of an inner place, and keys of all of them, as peers send them."""
    seen = {"gathered": 0, "empty shares": 0, "nothing": 0, "two stretches": 0}
    for chunk, _, pool in draws(3):
        seen["nothing"] += sum(not rows.tokens for rows in pool)
        for place in {piece.place for piece in chunk.slices}:
            both = members(pool, place)
            u = both[0][1].inner_size
            sent = [tokens_of(rows, level.local) for rows, level in both]
            inners = [list(chain(*sent[b : b + u])) for b in range(0, place.size, u)]
            for _, level in both:
                queries = inners[level.inner]
                assert len(queries) == level.num_queries
                covered = []
                for placed in level.slices:
                    piece = chunk.slices[placed.index]
                    assert piece.start == placed.start
                    for stretch in placed.stretches:
                        given = queries[stretch.start : stretch.stop]
                        assert given and given == [
                            (piece.seq_id, stretch.position + i) for i in range(len(given))
                        ]
                        covered += range(stretch.start, stretch.stop)
                    seen["two stretches"] += len(placed.stretches) == 2
                assert covered == list(range(level.num_queries)), "squares cover all query rows"
                keys = queries
                if level.num_inner > 1:
                    seen["gathered"] += 1
                    keys = [t for b, start, stop in level.key_runs for t in inners[b][start:stop]]
                for placed in level.slices:
                    piece = chunk.slices[placed.index]
                    assert keys[slice(*placed.keys)] == [
                        (piece.seq_id, t) for t in range(piece.start, piece.stop)
                    ]
                assert len(keys) == sum(level.shares)
                seen["empty shares"] += 0 in level.shares
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize(
    ("size", "q_heads", "kv_heads", "expected"),
    [
        (4, 8, 4, 4),
        (4, 8, 2, 4),  # each key-value head twice
        (8, 4, 2, 4),  # two inner places
        (8, 40, 8, 8),
        (16, 40, 8, 8),
        (4, 40, 10, 2),  # 10 heads are not divided by 4, nor 4 by them
        (6, 12, 2, 6),
        (3, 4, 2, 1),
        (8, 9, 3, 1),
        (1, 7, 7, 1),
    ],
)
def test_heads_are_divided_among_as_many_as_can(size, q_heads, kv_heads, expected):
    assert inner_size(size, q_heads, kv_heads) == expected


def test_inner_places_of_a_long_sequence_see_equally_many_keys():
    """Each has an early and a late part: without that the last one would have all the work."""
    chunk = Chunk((Slice(0, 0, 1024, Place(0, 8)),))
    seen = []
    for process in (0, 2, 4, 6):
        rows = rows_of(chunk, process, sp_size=8, q_heads=2, kv_heads=2)
        (placed,) = rows.levels[0].slices
        seen.append(sum(t + 1 for s in placed.stretches for t in range(
            s.position, s.position + s.stop - s.start)))  # fmt: skip
    assert max(seen) / min(seen) < 1.01


def test_on_one_device_all_is_one_own_level():
    rows = rows_of(Chunk((Slice(3, 4, 9), Slice(1, 0, 2))), 0, sp_size=1, q_heads=5, kv_heads=5)
    assert rows.own is rows.levels[0] and rows.own.local == (0, 7)
    assert list(rows.runs()) == [((3, 4, 9), 0), ((1, 0, 2), 5)]
    assert [placed.num_pairs for placed in rows.own.slices] == [5 * 13, 2 * 2]


def test_a_process_without_a_token_has_one_row():
    chunk = Chunk((Slice(0, 0, 2, Place(0, 4)), Slice(1, 0, 5, Place(0, 1))))
    for process, expected in ((0, 5), (1, 1), (2, 0), (3, 1)):
        rows = rows_of(chunk, process, sp_size=4, q_heads=4, kv_heads=4)
        assert rows.num_tokens == expected and rows.num_rows == max(1, expected)
    dummy = rows_of(Chunk(()), 1, sp_size=4, q_heads=4, kv_heads=4)
    assert dummy == ChunkRows((), ()) and dummy.num_rows == 1
