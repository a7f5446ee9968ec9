"""Places of a chunk's slices within a pool: sharded over all of it, or on one process.

Sharding everything is Ulysses' way. Skrull leaves short sequences on one process, where they need
no all-to-all; here the same is done inside chunks, whose pieces of long sequences stay sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import Chunk, Place, Slice
from furlong.planners.chunks.balance import sequence_work
from furlong.planners.chunks.dacp import place_by_load
from furlong.planners.chunks.groups import Groups


def shard(groups: Groups, sp_size: int) -> list[list[Chunk]]:
    """The same groups with every slice sharded over a pool of `sp_size` processes."""
    return [[Chunk(_sharded(chunk.slices, sp_size)) for chunk in group] for group in groups]


def shard_long(
    groups: Groups, seq_lens: Sequence[int], shape: ModelShape, sp_size: int
) -> list[list[Chunk]]:
    """The same groups with pieces of cut sequences sharded and whole sequences left on one process
    as far as they balance there (`dacp`): a process holds no more tokens than if all were sharded,
    but for one that does not divide."""
    work = sequence_work(seq_lens, shape)
    return [[_place(chunk, seq_lens, work, sp_size) for chunk in group] for group in groups]


def _place(chunk: Chunk, seq_lens: Sequence[int], work: Sequence[float], sp_size: int) -> Chunk:
    whole = [s for s in chunk.slices if s.start == 0 and s.stop == seq_lens[s.seq_id]]
    places = place_by_load(
        [s.num_tokens for s in whole], [work[s.seq_id] for s in whole],
        bucket_tokens=-(-sum(s.num_tokens for s in whole) // sp_size), sp_size=sp_size,
    )  # fmt: skip
    everywhere = Place(0, sp_size)
    ids = [s.seq_id for s in whole]
    placed = dict(zip(ids, places or [everywhere] * len(ids), strict=True))
    slices = [replace(s, place=placed.get(s.seq_id, everywhere)) for s in chunk.slices]
    return Chunk(by_place(slices))


def by_place(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Slices in the order of a chunk: by falling size of their places, then by first process."""
    return tuple(sorted(slices, key=lambda s: (-s.place.size, s.place.first)))


def _sharded(slices: Sequence[Slice], sp_size: int) -> tuple[Slice, ...]:
    place = Place(0, sp_size)
    return tuple(replace(piece, place=place) for piece in slices)
