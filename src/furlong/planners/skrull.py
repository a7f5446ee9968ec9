"""Skrull: micro-batches of whole sequences, local to one device or shared by a group.

Xu et al., NeurIPS 2025 (arXiv 2505.19609). Global data scheduling (GDS, Algorithm 2) balances the
work over the replicas and cuts each replica's sequences into as few micro-batches as memory allows,
long ones paired with short ones: every m-th of those that come by rising length. Placement (DACP,
Algorithm 1: `chunks.place_by_load`) then decides for each micro-batch which sequences stay local:
each on the process with the least work, or the most room, and where none has room, the shortest
local one of the fullest is shared after all. Work is the model's FLOPs (Eq. 13, with the model's
own constants, and causal attention halved), room what memory leaves (Eq. 12). A micro-batch is one
chunk of a one-stage plan; replicas may have different numbers of them.

Errata: RollBack (Algorithm 3) prints a wrong sign and leaves the other ranks out: as printed it
fails in every case in which it happens. As corrected here places are found exactly where all tokens
fit into all buckets. Algorithm 2 restarts its loop where it should leave it; micro-batches are
tried from the ceiling of tokens over room up to one for each sequence.

Ours: places are improved by the seconds of the cost model (`faster_places`): launches, latencies
and exposed all-to-alls too, which FLOPs leave out. As few layers are recomputed as let it fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from furlong.cost.model import CostModel
from furlong.cost.seconds import Array
from furlong.errors import DataError
from furlong.plan.check import check
from furlong.plan.plan import Chunk, ChunkPlan, Layout, Place, Slice
from furlong.planners.chunks import (
    by_cost,
    by_place,
    chunk_by_chunk,
    does_not_fit,
    fitting_tokens,
    place_by_load,
    recompute_choices,
    sequence_work,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.places import TOKENS, PoolBatch, Rates
from furlong.planners.question import Candidate, Question
from furlong.units import count_words

_MOST_CHANGED = 8
"""Sequences of a kind that are tried on another place at a time."""


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """One for a pool of several devices on one stage: its plans fit by themselves."""
    if layout.pp > 1 or layout.sp == 1:
        return
    model, limit_bytes = question.model_of(layout), question.limits.limit_bytes

    def plan_of(seq_lens: Sequence[int]) -> ChunkPlan:
        return plan_skrull(seq_lens, model, sp_size=layout.sp, budget_bytes=limit_bytes)

    yield Candidate("skrull", layout, ChunkOptions(), 0.0, plan_of)


def plan_skrull(
    seq_lens: Sequence[int], model: CostModel, *, sp_size: int, budget_bytes: int
) -> ChunkPlan:
    """A checked plan of one replica, a pool, with as few recomputed layers as fit. Raises
    ConfigError where it does not fit with all of them."""
    memory, num_layers = model.memory(budget_bytes), model.shape.num_layers
    sizes = {"dp_size": 1, "sp_size": sp_size}
    for layers in recompute_choices(num_layers):
        tokens = fitting_tokens(model, budget_bytes, recompute_layers=layers, **sizes)
        if tokens * sp_size < max(seq_lens):
            continue
        groups = micro_batch_groups(
            seq_lens, model, sp_size=sp_size, bucket_tokens=tokens, recompute_layers=layers
        )
        plan = chunk_by_chunk(
            seq_lens, [[chunk for group in groups for chunk in group]], num_layers=num_layers,
            sp_size=sp_size, recompute_layers=layers,
        )  # fmt: skip
        if max(memory.peak_bytes_of_actions(plan, 0)) <= budget_bytes:
            check(plan, memory)
            return plan
    raise does_not_fit(seq_lens, model, budget_bytes, recompute_layers=num_layers, **sizes)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that run together, and where: each on one process of a group or on all of it."""

    seq_ids: tuple[int, ...]
    places: tuple[Place, ...]


def schedule_skrull(
    seq_lens: Sequence[int],
    work: Sequence[float],
    *,
    dp_size: int,
    sp_size: int,
    bucket_tokens: int,
) -> list[list[MicroBatch]]:
    """The micro-batches of each replica with their places (Algs. 1 and 2, corrected).

    `work`: FLOPs or any other measure of each sequence. `bucket_tokens`: what a device holds at a
    time.
    Raises DataError for a sequence that a whole group cannot hold, ConfigError for fewer sequences
    than replicas.
    """
    _refuse_too_long(seq_lens, sp_size, bucket_tokens)
    replicas = []
    for own in by_cost(work, dp_size):
        own.sort(key=seq_lens.__getitem__)
        replicas.append(_micro_batches(own, seq_lens, work, sp_size, bucket_tokens))
    return replicas


def _micro_batches(
    seq_ids: Sequence[int],
    seq_lens: Sequence[int],
    work: Sequence[float],
    sp_size: int,
    bucket_tokens: int,
) -> list[MicroBatch]:
    """The micro-batches of one replica, whose sequences come by rising length: each has every m-th
    one, for the smallest m."""
    sizes = {"bucket_tokens": bucket_tokens, "sp_size": sp_size}
    capacity = bucket_tokens * sp_size
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
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    sp_size: int,
    bucket_tokens: int,
    recompute_layers: int = 0,
) -> list[list[Chunk]]:
    """The micro-batches of one replica with all these sequences, each a group of one chunk.

    Places are those of the paper's, improved by the seconds of the cost model: launches, latencies
    and exposed all-to-alls too, which FLOPs leave out.
    """
    work = sequence_work(seq_lens, model.shape)
    ((*batches,),) = schedule_skrull(
        seq_lens, work, dp_size=1, sp_size=sp_size, bucket_tokens=bucket_tokens
    )
    pool = PoolBatch.of(seq_lens, model, sp_size)
    if pool.sizes[-1] == sp_size > 1:
        rates = Rates(pool, recompute_layers)
        batches = [faster_places(batch, rates, bucket_tokens) for batch in batches]
    return [[chunk_of(batch, seq_lens)] for batch in batches]


def faster_places(batch: MicroBatch, rates: Rates, bucket_tokens: int) -> MicroBatch:
    """The micro-batch with places that take fewer seconds, found from the given ones and from all
    sequences sharded: of the slowest process the longest local sequences are sharded or moved to
    the fastest one, or sharded ones become local there, whichever helps most, as long as any does.
    """
    whole = Place(0, rates.batch.pool_size)
    starts = (batch.places, (whole,) * len(batch.places))
    found = [_descend(batch.seq_ids, places, rates, bucket_tokens) for places in starts]
    return MicroBatch(batch.seq_ids, min(found, key=lambda pair: pair[0])[1])


def _descend(
    seq_ids: Sequence[int], places: Sequence[Place], rates: Rates, bucket_tokens: int
) -> tuple[float, tuple[Place, ...]]:
    """Seconds and places where no single change is faster, or after as many as there are
    sequences."""
    added, pool_size = rates.batch.added, rates.batch.pool_size
    now, whole = list(places), Place(0, pool_size)

    def load(i: int, place: Place) -> Array:
        own = np.zeros((added.shape[2], pool_size))
        own[:, place.first : place.stop] = added[seq_ids[i], 0 if place.size == 1 else -1][:, None]
        return own

    loads = np.sum([load(i, place) for i, place in enumerate(now)], axis=0)
    best_s = float(rates.seconds(loads).max(axis=-1).sum())
    for _ in seq_ids:
        busy_s = rates.seconds(loads).sum(axis=0)
        slowest, fastest = Place(int(busy_s.argmax()), 1), Place(int(busy_s.argmin()), 1)
        by_length = sorted(range(len(now)), key=lambda i: -rates.batch.seq_lens[seq_ids[i]])
        local = [i for i in by_length if now[i] == slowest][:_MOST_CHANGED]
        shared = [i for i in by_length if now[i] == whole]
        shared = list(dict.fromkeys((*shared[:_MOST_CHANGED], *shared[-_MOST_CHANGED:])))
        changes = [(i, place) for i in local for place in (whole, fastest)]
        changes += [(i, fastest) for i in shared]
        after = [loads + load(i, place) - load(i, now[i]) for i, place in changes]
        fitting = [n for n, one in enumerate(after) if one[TOKENS].max() <= bucket_tokens + 1e-6]
        if not fitting:
            break
        seconds = rates.seconds(np.stack([after[n] for n in fitting], axis=1))
        steps_s = seconds.max(axis=2).sum(axis=0)
        least = int(steps_s.argmin())
        if steps_s[least] >= best_s * (1 - 1e-9):
            break
        best_s, loads = float(steps_s[least]), after[fitting[least]]
        i, place = changes[fitting[least]]
        now[i] = place
    return best_s, tuple(now)


def chunk_of(batch: MicroBatch, seq_lens: Sequence[int]) -> Chunk:
    """The chunk of a micro-batch."""
    placed = sorted(zip(batch.seq_ids, batch.places, strict=True), key=lambda pair: pair[0])
    return Chunk(by_place(Slice(i, 0, seq_lens[i], place) for i, place in placed))


def _refuse_too_long(seq_lens: Sequence[int], sp_size: int, bucket_tokens: int) -> None:
    seq_id = max(range(len(seq_lens)), key=seq_lens.__getitem__, default=0)
    if not seq_lens or seq_lens[seq_id] <= sp_size * bucket_tokens:
        return
    longest = seq_lens[seq_id]
    larger = (
        f"a group of {count_words(-(-longest // bucket_tokens), 'device')}, "
        if bucket_tokens > 0
        else ""
    )
    raise DataError(
        given=f"sequence {seq_id} has {count_words(longest, 'token')}",
        required=f"at most {sp_size * bucket_tokens:,} tokens: {bucket_tokens:,} on each of "
        f"{sp_size} devices",
        source="bucket_tokens and the size of the context-parallel group",
        change=f"{larger}{-(-longest // sp_size):,} tokens on a device (more memory, or more "
        "recomputed layers), or cut the sequence",
    )
