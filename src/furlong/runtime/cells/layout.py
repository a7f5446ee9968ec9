"""Which rows of a chunk a process has, and which of its slices are stored for later chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from furlong.errors import PlanError
from furlong.kv.store import KVStore
from furlong.models.causal_lm import CausalLM
from furlong.ops.exchange import Exchange
from furlong.plan.plan import Chunk, ChunkPlan, piece_lens
from furlong.plan.rows import ChunkRows, rows_of
from furlong.runtime.cells.layer_view import Piece
from furlong.runtime.memory.pools import Pools


def rows_on(
    model: CausalLM, plan: ChunkPlan, process: int = 0, exchange: Exchange | None = None
) -> Callable[[Chunk], ChunkRows]:
    """The rows of each chunk of a plan that a process of the pool has.

    Raises PlanError for a pool of several processes without an exchange, and for sequences that
    branch where layers are recurrent.
    """
    if plan.trees and model.events is not None:
        raise PlanError(
            f"the plan has sequences that branch, and {model.name} has recurrent layers, whose "
            "state goes on to one piece only: plan each answer with a prompt of its own"
        )
    if plan.sp_size > 1 and exchange is None:
        raise PlanError(
            f"the plan is for pools of {plan.sp_size} processes, between which nothing exchanges"
        )
    if plan.sp_size > 1:
        model.require_own_tokens()
    q_heads, kv_heads = model.heads if plan.sp_size > 1 else (1, 1)
    return partial(
        rows_of, process=process, sp_size=plan.sp_size, q_heads=q_heads, kv_heads=kv_heads,
        position=plan.position,
    )  # fmt: skip


def open_store(plan: ChunkPlan, pools: Pools) -> KVStore:
    """The store of a plan's K,V, in the tier that it names."""
    pool = None if plan.tiers.kv == "device" else pools.of(plan.tiers.kv)
    trained = trained_pieces(plan)
    return KVStore(pools.arena, piece_lens(plan), pool, trained=trained, trees=plan.trees)


def trained_pieces(plan: ChunkPlan) -> dict[int, list[int]] | None:
    """By cut sequence, the pieces that gradients of K,V are kept for; None: for all."""
    if not plan.sampled:
        return None
    return {
        seq_id: [index for index, chunk in enumerate(group) if chunk in plan.trained]
        for seq_id, group in plan.groups.items()
    }


def chunk_pieces(plan: ChunkPlan, chunk: int) -> dict[int, Piece]:
    """The pieces of cut sequences in a chunk, by the number of their slice."""
    index_of = dict(plan.links[chunk])
    return {
        number: Piece(
            s.seq_id, index_of[s.seq_id],
            continues=plan.is_read(s.seq_id, index_of[s.seq_id]),
        )
        for number, s in enumerate(plan.chunks[chunk].slices)
        if s.seq_id in index_of
    }  # fmt: skip
