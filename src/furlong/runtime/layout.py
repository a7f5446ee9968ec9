"""Which rows of a chunk belong to which piece of a cut sequence."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan
from furlong.runtime.cell import Piece


def piece_lens(plan: ChunkPlan) -> dict[int, list[int]]:
    """Tokens of each piece of each cut sequence."""
    lens: dict[int, list[int]] = {}
    for seq_id, group in plan.groups.items():
        pieces = [s for c in group for s in plan.chunks[c].slices if s.seq_id == seq_id]
        lens[seq_id] = [piece.num_tokens for piece in pieces]
    return lens


def chunk_pieces(plan: ChunkPlan, chunk: int, rows: tuple[slice, ...]) -> tuple[Piece, ...]:
    """The pieces of cut sequences in a chunk whose slices lie at `rows`."""
    index_of = dict(plan.links[chunk])
    return tuple(
        Piece(
            where, s.seq_id, index_of[s.seq_id], index_of[s.seq_id] < len(plan.groups[s.seq_id]) - 1
        )
        for s, where in zip(plan.chunks[chunk].slices, rows, strict=True)
        if s.seq_id in index_of
    )
