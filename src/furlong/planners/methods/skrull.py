"""Skrull: micro-batches of whole sequences, local to one rank or sharded over a group (Xu et al.,
arXiv 2505.19609).

Global data scheduling (Alg. 2) balances the work over the replicas and cuts each replica's
sequences into as few micro-batches as memory allows, long ones paired with short ones. Placement
(Alg. 1, `dacp`) then decides for every micro-batch which sequences stay local. A micro-batch is one
chunk of a one-stage plan; replicas may have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.cost.model import CostModel
from furlong.errors import DataError
from furlong.plan.values import SHARDED, Chunk, ChunkPlan, Slice
from furlong.planners.chunks.balance import by_cost, refuse_idle, sequence_work
from furlong.planners.chunks.dacp import place_by_load
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.micro_batches import chunk_seconds, fastest_plan

_TRIED_BUCKETS = 8
"""Per micro-batch, from equal shares of its tokens up to what memory allows."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that run together, and where each of them is: an sp rank or SHARDED."""

    seq_ids: tuple[int, ...]
    placements: tuple[int, ...]


Schedule = Sequence[Sequence[MicroBatch]]
"""The micro-batches of each replica."""


def schedule_skrull(
    seq_lens: Sequence[int],
    work: Sequence[float],
    *,
    dp_size: int,
    cp_size: int,
    bucket_tokens: int,
) -> list[list[MicroBatch]]:
    """The micro-batches of each replica with their placements (Algs. 1 and 2, corrected).

    `work`: FLOPs or any other measure of each sequence. `bucket_tokens`: what a device holds at a
    time.
    Raises DataError for a sequence that a whole group cannot hold, ConfigError for fewer sequences
    than replicas.
    """
    _refuse_too_long(seq_lens, cp_size, bucket_tokens)
    replicas = []
    for own in by_cost(work, dp_size):
        own.sort(key=seq_lens.__getitem__)
        replicas.append(_micro_batches(own, seq_lens, work, cp_size, bucket_tokens))
    return replicas


def _micro_batches(
    seq_ids: Sequence[int],
    seq_lens: Sequence[int],
    work: Sequence[float],
    cp_size: int,
    bucket_tokens: int,
) -> list[MicroBatch]:
    """Of one replica, whose sequences come by rising length: every m-th one, for the smallest m."""
    sizes = {"bucket_tokens": bucket_tokens, "cp_size": cp_size}
    capacity = bucket_tokens * cp_size
    fewest = -(-sum(seq_lens[seq_id] for seq_id in seq_ids) // capacity)
    for count in range(fewest, len(seq_ids) + 1):
        found = []
        for first in range(count):
            batch = seq_ids[first::count]
            lens = [seq_lens[seq_id] for seq_id in batch]
            if sum(lens) > capacity:
                break
            loads = [work[seq_id] for seq_id in batch]
            placements = place_by_load(lens, loads, **sizes)
            if placements is None:
                break
            found.append(MicroBatch(tuple(batch), tuple(placements)))
        if len(found) == count:
            return found
    raise AssertionError("every sequence fits into a micro-batch of its own")


def shard_where_faster(
    schedule: Schedule,
    seq_lens: Sequence[int],
    work: Sequence[float],
    model: CostModel,
    *,
    cp_size: int,
    bucket_tokens: int,
) -> list[list[MicroBatch]]:
    """The same micro-batches, each with the fastest of a few placements by the cost model.

    Skrull leaves sequences local as long as memory allows, and one long local sequence then keeps a
    whole group waiting. Placing by smaller buckets shards the longest ones, down to buckets that
    equal shares of all tokens fill. Not in the paper.
    """
    options = [
        [_placements(batch, seq_lens, work, cp_size, bucket_tokens) for batch in replica]
        for replica in schedule
    ]
    chunks = [_chunk(b, seq_lens) for replica in options for tried in replica for b in tried]
    seconds = iter(chunk_seconds(seq_lens, chunks, model, sp_size=cp_size))
    return [
        [min(((next(seconds), i, b) for i, b in enumerate(tried)))[2] for tried in replica]
        for replica in options
    ]


def _placements(
    batch: MicroBatch,
    seq_lens: Sequence[int],
    work: Sequence[float],
    cp_size: int,
    bucket_tokens: int,
) -> list[MicroBatch]:
    """The micro-batch as it is, all sharded, and placed by smaller buckets."""
    lens, loads = [seq_lens[i] for i in batch.seq_ids], [work[i] for i in batch.seq_ids]
    found = {batch.placements: None, (SHARDED,) * len(lens): None}
    smallest = -(-sum(lens) // cp_size)
    ratio = (bucket_tokens / smallest) ** (1 / _TRIED_BUCKETS)
    for step in range(_TRIED_BUCKETS):
        bucket = min(bucket_tokens, round(smallest * ratio**step))
        placed = place_by_load(lens, loads, bucket_tokens=bucket, cp_size=cp_size)
        found[tuple(placed or batch.placements)] = None
    return [MicroBatch(batch.seq_ids, placements) for placements in found]


def micro_batch_groups(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    cp_size: int,
    bucket_tokens: int,
    adaptive: bool = False,
) -> list[list[Chunk]]:
    """The micro-batches of one replica with all these sequences, each a group of one chunk."""
    work = sequence_work(seq_lens, model.shape)
    schedule = schedule_skrull(
        seq_lens, work, dp_size=1, cp_size=cp_size, bucket_tokens=bucket_tokens
    )
    if adaptive and cp_size > 1:
        schedule = shard_where_faster(
            schedule, seq_lens, work, model, cp_size=cp_size, bucket_tokens=bucket_tokens
        )
    return [[_chunk(batch, seq_lens)] for batch in schedule[0]]


def plan_skrull(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    dp_size: int,
    cp_size: int,
    bucket_tokens: int | None = None,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
    adaptive: bool = False,
) -> ChunkPlan:
    """A checked plan of Skrull's micro-batches: rank d is replica d, a group of `cp_size` devices.

    `bucket_tokens`: None takes what the budget allows (Eq. 12); given, the fewest layers are
    recomputed with which it fits. `budget_bytes` of a device: None takes the hardware's.
    `recompute_layers`: checkpointed layers; None takes the number whose plan is predicted to be
    fastest (the paper recomputes selectively, which the plan's vocabulary does not have).
    `adaptive`: see `shard_where_faster`.
    Raises ConfigError or DataError, with what would make it fit, where a sequence is too long.
    """
    refuse_unusable(seq_lens)
    refuse_idle(len(seq_lens), dp_size)
    work = sequence_work(seq_lens, model.shape)

    def deal(device_tokens: int) -> list[list[Chunk]]:
        sizes = {"cp_size": cp_size, "bucket_tokens": device_tokens}
        schedule = schedule_skrull(seq_lens, work, dp_size=dp_size, **sizes)
        if adaptive and cp_size > 1:
            schedule = shard_where_faster(schedule, seq_lens, work, model, **sizes)
        return [[_chunk(batch, seq_lens) for batch in replica] for replica in schedule]

    return fastest_plan(
        seq_lens,
        model,
        deal,
        dp_size=dp_size,
        sp_size=cp_size,
        recompute_layers=recompute_layers,
        budget_bytes=budget_bytes,
        device_tokens=bucket_tokens,
    )


def _chunk(batch: MicroBatch, seq_lens: Sequence[int]) -> Chunk:
    """Sharded slices first, then those of each rank."""
    placed = sorted(zip(batch.placements, batch.seq_ids, strict=True))
    return Chunk(tuple(Slice(i, 0, seq_lens[i], placement) for placement, i in placed))


def _refuse_too_long(seq_lens: Sequence[int], cp_size: int, bucket_tokens: int) -> None:
    seq_id = max(range(len(seq_lens)), key=seq_lens.__getitem__, default=0)
    if not seq_lens or seq_lens[seq_id] <= cp_size * bucket_tokens:
        return
    longest = seq_lens[seq_id]
    larger = f"a group of {-(-longest // bucket_tokens)} devices, " if bucket_tokens > 0 else ""
    raise DataError(
        given=f"sequence {seq_id} has {longest:,} tokens",
        required=f"at most {cp_size * bucket_tokens:,} tokens: {bucket_tokens:,} on each of "
        f"{cp_size} devices",
        source="bucket_tokens and the size of the context-parallel group",
        change=f"{larger}{-(-longest // cp_size):,} tokens on a device (more memory, or more "
        "recomputed layers), or cut the sequence",
    )
