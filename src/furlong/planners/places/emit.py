"""A division as a plan."""

from __future__ import annotations

from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Chunk, ChunkPlan, Place, Slice
from furlong.planners.chunks import by_place, chunk_by_chunk, does_not_fit
from furlong.planners.places.division import Spots
from furlong.planners.places.rates import PoolBatch


def plan_of(
    batch: PoolBatch, spots: Spots, recompute_layers: int, budget_bytes: int | None
) -> ChunkPlan:
    """The checked plan of one rank, the pool; a chunk for every micro-batch, most tokens first."""
    slices: dict[int, list[Slice]] = {}
    for seq_id, spot in sorted(spots.items()):
        place = Place(spot.first, batch.sizes[spot.kind])
        piece = Slice(seq_id, 0, batch.seq_lens[seq_id], place)
        slices.setdefault(spot.micro_batch, []).append(piece)
    chunks = sorted(
        (Chunk(by_place(own)) for own in slices.values()), key=lambda chunk: -chunk.num_tokens
    )
    plan = chunk_by_chunk(
        batch.seq_lens, [chunks], num_layers=batch.model.shape.num_layers,
        sp_size=batch.pool_size, recompute_layers=recompute_layers,
    )  # fmt: skip
    check(plan, batch.model.memory(budget_bytes))
    return plan


def nothing_fits(batch: PoolBatch, recompute_layers: int, budget_bytes: int | None) -> ConfigError:
    """The error for a longest sequence that no place holds."""
    model, largest = batch.model, batch.sizes[-1]
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    return does_not_fit(
        batch.seq_lens, model, budget, dp_size=batch.pool_size // largest, sp_size=largest,
        recompute_layers=recompute_layers,
    )  # fmt: skip
