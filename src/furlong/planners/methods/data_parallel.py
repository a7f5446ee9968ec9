"""Data parallelism: whole sequences packed into chunks, each on one device; a baseline.

What trainers with packing do. A device takes the tokens that its memory allows; where that is not
enough for the longest sequence, or where larger chunks are worth it, layers are checkpointed.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.cost.model import CostModel
from furlong.plan.values import Chunk, ChunkPlan
from furlong.planners.chunks.balance import Balance, deal_sequences
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.micro_batches import fastest_plan, packed_chunks


def plan_data_parallel(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    dp_size: int,
    balance: Balance = "none",
    packed: bool = True,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
) -> ChunkPlan:
    """A checked plan; rank d is replica d, one device.

    `packed` False: every sequence is a chunk of its own. `budget_bytes` of a device: None takes the
    hardware's. `recompute_layers`: checkpointed layers; None takes the number whose plan is
    predicted to be fastest.
    Raises ConfigError where the longest sequence fits on no device or a replica has none.
    """
    refuse_unusable(seq_lens)
    replicas = deal_sequences(seq_lens, model.shape, dp_size, balance)

    def deal(device_tokens: int) -> list[list[Chunk]]:
        most = device_tokens if packed else None
        return [packed_chunks(own, seq_lens, most) for own in replicas]

    return fastest_plan(
        seq_lens,
        model,
        deal,
        dp_size=dp_size,
        sp_size=1,
        recompute_layers=recompute_layers,
        budget_bytes=budget_bytes,
    )
