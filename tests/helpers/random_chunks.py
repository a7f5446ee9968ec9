"""Random chunks on places of a pool, with their slices in a valid order."""

from __future__ import annotations

import random

from furlong.plan.plan import Chunk, Place, Slice, place_sizes


def random_place(draw: random.Random, sp_size: int) -> Place:
    size = draw.choice(place_sizes(sp_size))
    return Place(draw.randrange(sp_size // size) * size, size)


def random_chunks(
    draw: random.Random, sp_size: int, *, num_chunks: int, num_sequences: int, max_tokens: int
) -> tuple[list[int], tuple[Chunk, ...]]:
    """Return lengths and chunks of sequences that are whole or cut over consecutive chunks, each on
    one random place, with at most one prefix per place and chunk."""
    lens: list[int] = []
    slices: list[list[Slice]] = [[] for _ in range(num_chunks)]
    prefixed: set[tuple[int, Place]] = set()
    for seq_id in range(num_sequences):
        place = random_place(draw, sp_size)
        seq_len = draw.randint(1, max_tokens)
        pieces = min(seq_len, num_chunks, draw.choice((1, 1, 2, num_chunks)))
        first = draw.randint(0, num_chunks - pieces)
        taken = {(first + i, place) for i in range(1, pieces)}
        if prefixed & taken:
            pieces, taken = 1, set()
        prefixed |= taken
        cuts = [0, *sorted(draw.sample(range(1, seq_len), pieces - 1)), seq_len]
        for i in range(pieces):
            slices[first + i].append(Slice(seq_id, cuts[i], cuts[i + 1], place))
        lens.append(seq_len)
    return lens, tuple(Chunk(in_order(own)) for own in slices if own)


def in_order(slices: list[Slice]) -> tuple[Slice, ...]:
    """Sort slices: larger places first, and on each place the slice with a prefix first."""
    return tuple(sorted(slices, key=lambda s: (-s.place.size, s.place.first, s.start == 0)))
