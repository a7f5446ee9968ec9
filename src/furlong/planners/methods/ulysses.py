"""Static sequence parallelism: every sequence is sharded over its whole group; a baseline.

DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509) as InfiniPipe and Skrull run it: one degree,
chosen for the longest sequence, for all sequences, packed into micro-batches, under ZeRO-3 over all
devices. Short sequences pay its all-to-alls too. Over groups of one device this is data parallelism
as trainers with packing do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.model import CostModel
from furlong.plan.values import Chunk, ChunkPlan, Place
from furlong.planners.chunks.balance import Balance, deal_sequences
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.micro_batches import fastest_plan, packed_chunks


def with_zero_3(model: CostModel) -> CostModel:
    """The same model, its weights, gradients and optimizer sharded as DeepSpeed does it beside
    Ulysses. A plan does not say how state is sharded: time it with this model too."""
    return replace(model, training=replace(model.training, zero_stage=3))


def plan_ulysses(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    dp_size: int,
    sp_size: int,
    balance: Balance = "none",
    packed: bool = True,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
) -> ChunkPlan:
    """A checked plan; rank d is replica d, a group of `sp_size` devices.

    `model`: as `with_zero_3` for DeepSpeed's way. `packed` False: every sequence is a micro-batch
    of its own. `budget_bytes` of a device: None takes the hardware's. `recompute_layers`:
    checkpointed layers; None takes the number whose plan is predicted to be fastest.
    Raises ConfigError where the longest sequence does not fit or a replica has none.
    """
    refuse_unusable(seq_lens)
    replicas = deal_sequences(seq_lens, model.shape, dp_size, balance)

    def deal(device_tokens: int) -> list[list[Chunk]]:
        most = device_tokens * sp_size if packed else None
        return [packed_chunks(own, seq_lens, most, Place(0, sp_size)) for own in replicas]

    return fastest_plan(
        seq_lens,
        model,
        deal,
        dp_size=dp_size,
        sp_size=sp_size,
        recompute_layers=recompute_layers,
        budget_bytes=budget_bytes,
    )
