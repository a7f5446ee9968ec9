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
from furlong.plan.values import Chunk, ChunkPlan, Place, Slice
from furlong.planners.chunks.balance import by_cost, refuse_idle, sequence_work
from furlong.planners.chunks.dacp import place_by_load
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.micro_batches import fastest_plan
from furlong.planners.chunks.placement import by_place


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that run together, and where: each on one process of a group or on all of it."""

    seq_ids: tuple[int, ...]
    places: tuple[Place, ...]


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
    """The micro-batches of each replica with their places (Algs. 1 and 2, corrected).

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
            places = place_by_load(lens, loads, **sizes)
            if places is None:
                break
            found.append(MicroBatch(tuple(batch), tuple(places)))
        if len(found) == count:
            return found
    raise AssertionError("every sequence fits into a micro-batch of its own")


def micro_batch_groups(
    seq_lens: Sequence[int], model: CostModel, *, cp_size: int, bucket_tokens: int
) -> list[list[Chunk]]:
    """The micro-batches of one replica with all these sequences, each a group of one chunk."""
    work = sequence_work(seq_lens, model.shape)
    schedule = schedule_skrull(
        seq_lens, work, dp_size=1, cp_size=cp_size, bucket_tokens=bucket_tokens
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
) -> ChunkPlan:
    """A checked plan of Skrull's micro-batches: rank d is replica d, a group of `cp_size` devices.

    `bucket_tokens`: None takes what the budget allows (Eq. 12); given, the fewest layers are
    recomputed with which it fits. `budget_bytes` of a device: None takes the hardware's.
    `recompute_layers`: checkpointed layers; None takes the number whose plan is predicted to be
    fastest (the paper recomputes selectively, which the plan's vocabulary does not have).
    Raises ConfigError or DataError, with what would make it fit, where a sequence is too long.
    """
    refuse_unusable(seq_lens)
    refuse_idle(len(seq_lens), dp_size)
    work = sequence_work(seq_lens, model.shape)

    def deal(device_tokens: int) -> list[list[Chunk]]:
        sizes = {"cp_size": cp_size, "bucket_tokens": device_tokens}
        schedule = schedule_skrull(seq_lens, work, dp_size=dp_size, **sizes)
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
    placed = sorted(zip(batch.seq_ids, batch.places, strict=True), key=lambda pair: pair[0])
    return Chunk(by_place(Slice(i, 0, seq_lens[i], place) for i, place in placed))


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
