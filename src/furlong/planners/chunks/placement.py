"""Where the slices of a chunk are within an sp group: sharded over all ranks, or on one of them.

Sharding everything is Ulysses' way. Skrull leaves short sequences on one rank, where they need no
all-to-all; here the same is done inside chunks, whose pieces of long sequences stay sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import SHARDED, Chunk, Slice
from furlong.planners.chunks.balance import sequence_work
from furlong.planners.chunks.dacp import place_by_load
from furlong.planners.chunks.groups import Groups


def shard(groups: Groups, sp_size: int) -> list[list[Chunk]]:
    """The same groups with every slice sharded over an sp group of `sp_size` ranks."""
    if sp_size == 1:
        return [list(group) for group in groups]
    return [[Chunk(tuple(map(_sharded, chunk.slices))) for chunk in group] for group in groups]


def shard_long(
    groups: Groups, seq_lens: Sequence[int], shape: ModelShape, sp_size: int
) -> list[list[Chunk]]:
    """The same groups with pieces of cut sequences sharded and whole sequences left on one rank as
    far as they balance there (`dacp`): a rank holds no more tokens than if all were sharded, but
    for one that does not divide."""
    if sp_size == 1:
        return [list(group) for group in groups]
    work = sequence_work(seq_lens, shape)
    return [[_place(chunk, seq_lens, work, sp_size) for chunk in group] for group in groups]


def _place(chunk: Chunk, seq_lens: Sequence[int], work: Sequence[float], sp_size: int) -> Chunk:
    is_whole = [s.start == 0 and s.stop == seq_lens[s.seq_id] for s in chunk.slices]
    whole = [s for s, one in zip(chunk.slices, is_whole, strict=True) if one]
    pieces = [_sharded(s) for s, one in zip(chunk.slices, is_whole, strict=True) if not one]
    placements = place_by_load(
        [s.num_tokens for s in whole],
        [work[s.seq_id] for s in whole],
        bucket_tokens=-(-sum(s.num_tokens for s in whole) // sp_size),
        cp_size=sp_size,
    )
    if placements is None:
        return Chunk((*pieces, *map(_sharded, whole)))
    placed = [replace(s, placement=p) for s, p in zip(whole, placements, strict=True)]
    return Chunk((*pieces, *placed))


def _sharded(piece: Slice) -> Slice:
    return replace(piece, placement=SHARDED)
