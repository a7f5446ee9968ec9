"""Which rows of a chunk belong to which piece of a cut sequence, and which pieces are stored."""

from __future__ import annotations

from furlong.kv.store import KVStore
from furlong.plan.values import ChunkPlan
from furlong.runtime.cell import Piece
from furlong.runtime.pools import Pools


def open_store(plan: ChunkPlan, pools: Pools) -> KVStore:
    """The store of a plan's K,V, in the tier that it names."""
    pool = None if plan.tiers.kv == "device" else pools.of(plan.tiers.kv)
    return KVStore(pools.arena, piece_lens(plan), pool, trained=trained_pieces(plan))


def piece_lens(plan: ChunkPlan) -> dict[int, list[int]]:
    """Tokens of each piece of each cut sequence that has a Forward."""
    lens: dict[int, list[int]] = {}
    for seq_id, group in plan.groups.items():
        computed = group[: plan.num_computed[seq_id]]
        pieces = [s for c in computed for s in plan.chunks[c].slices if s.seq_id == seq_id]
        lens[seq_id] = [piece.num_tokens for piece in pieces]
    return lens


def trained_pieces(plan: ChunkPlan) -> dict[int, list[int]] | None:
    """By cut sequence, the pieces that gradients of K,V are kept for; None: for all."""
    if not plan.sampled:
        return None
    return {
        seq_id: [index for index, chunk in enumerate(group) if chunk in plan.trained]
        for seq_id, group in plan.groups.items()
    }


def chunk_pieces(plan: ChunkPlan, chunk: int, rows: tuple[slice, ...]) -> tuple[Piece, ...]:
    """The pieces of cut sequences in a chunk; `rows`: where each of its slices lies among its
    tokens."""
    index_of = dict(plan.links[chunk])
    return tuple(
        Piece(
            where, s.seq_id, index_of[s.seq_id],
            continues=index_of[s.seq_id] < plan.num_computed[s.seq_id] - 1,
        )
        for s, where in zip(plan.chunks[chunk].slices, rows, strict=False)  # a dummy has a row
        if s.seq_id in index_of
    )  # fmt: skip
