"""Skrull, DeepSpeed-Ulysses and data parallelism as their papers plan them: one stage, whole
sequences, every micro-batch forward and backward before the next.

A device holds one micro-batch at a time, so its memory says how many tokens that may have;
checkpointed layers buy more tokens with time. The search makes such plans from dials
(`papers.published.build`); these functions are for the papers' tables and for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from furlong.cost.model import CostModel
from furlong.errors import DataError
from furlong.plan.check import check
from furlong.plan.plan import FIRST_PROCESS, Chunk, ChunkPlan, Place, Slice
from furlong.planners.chunks import (
    by_cost,
    chunk_by_chunk,
    does_not_fit,
    fitting_tokens,
    pack,
    recompute_choices,
    refuse_idle,
    refuse_unusable,
    sequence_work,
)
from furlong.planners.skrull import micro_batches
from furlong.simulate.clock import time_actions
from furlong.units import count_words
from papers.published.chunks import Balance, deal_sequences

Replicas = Sequence[Sequence[Chunk]]
"""The chunks of each replica in their order."""


def with_zero_3(model: CostModel) -> CostModel:
    """The same model, its weights, gradients and optimizer sharded as DeepSpeed does it beside
    Ulysses. A plan does not say how state is sharded: time it with this model too."""
    return replace(model, training=replace(model.training, zero_stage=3))


def plan_skrull(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    dp_size: int,
    sp_size: int,
    bucket_tokens: int | None = None,
    **wanted: Any,
) -> ChunkPlan:
    """A checked plan of Skrull's micro-batches, placed by FLOPs as the paper has it (Algs. 1, 2).

    Rank d is replica d, a group of `sp_size` devices. `bucket_tokens`: None takes what the budget
    allows (Eq. 12); given, the fewest layers are recomputed with which it fits. `wanted` as for
    `fastest_plan`. Raises ConfigError or DataError where a sequence is too long.
    """
    refuse_unusable(seq_lens)
    refuse_idle(len(seq_lens), dp_size)
    work = sequence_work(seq_lens, model.shape)
    sizes = {"dp_size": dp_size, "sp_size": sp_size}

    def deal(device_tokens: int) -> Replicas:
        return schedule_skrull(seq_lens, work, bucket_tokens=device_tokens, **sizes)

    return fastest_plan(seq_lens, model, deal, device_tokens=bucket_tokens, **sizes, **wanted)


def schedule_skrull(
    seq_lens: Sequence[int],
    work: Sequence[float],
    *,
    dp_size: int,
    sp_size: int,
    bucket_tokens: int,
) -> list[list[Chunk]]:
    """The micro-batches of each replica with their places. `work`, `bucket_tokens`: as for
    `skrull.micro_batches`. Raises DataError for a sequence that a whole group cannot hold,
    ConfigError for fewer sequences than replicas."""
    longest = max(seq_lens, default=0)
    if longest > sp_size * bucket_tokens:
        raise DataError(
            given=f"sequence {list(seq_lens).index(longest)} has {count_words(longest, 'token')}",
            required=f"at most {sp_size * bucket_tokens:,} tokens: {bucket_tokens:,} on each of "
            f"{sp_size} devices",
            source="bucket_tokens and the size of the sequence-parallel group",
            change=f"make it {-(-longest // sp_size):,} tokens on a device (more memory, or more "
            "recomputed layers), use a larger group, or cut the sequence",
        )
    sizes = {"sp_size": sp_size, "bucket_tokens": bucket_tokens}
    return [micro_batches(own, seq_lens, work, **sizes) for own in by_cost(work, dp_size)]


def plan_ulysses(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    dp_size: int,
    sp_size: int,
    balance: Balance = "none",
    packed: bool = True,
    **wanted: Any,
) -> ChunkPlan:
    """A checked plan of static sequence parallelism: every sequence over the whole of its group.

    DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509) as InfiniPipe and Skrull run it: one degree,
    chosen for the longest sequence. Rank d is replica d, a group of `sp_size` devices; over groups
    of one device this is data parallelism as trainers with packing do it. `model`: as
    `with_zero_3` for DeepSpeed's way. `packed` False: every sequence is a micro-batch of its own.
    `wanted` as for `fastest_plan`. Raises ConfigError where the longest sequence does not fit or a
    replica has none.
    """
    refuse_unusable(seq_lens)
    replicas = deal_sequences(seq_lens, model.shape, dp_size, balance)

    def deal(device_tokens: int) -> Replicas:
        most = device_tokens * sp_size if packed else None
        return [packed_chunks(own, seq_lens, most, Place(0, sp_size)) for own in replicas]

    return fastest_plan(seq_lens, model, deal, dp_size=dp_size, sp_size=sp_size, **wanted)


def packed_chunks(
    seq_ids: Sequence[int],
    seq_lens: Sequence[int],
    chunk_size: int | None,
    place: Place = FIRST_PROCESS,
) -> list[Chunk]:
    """The sequences of one replica as chunks of at most `chunk_size` tokens, or (None) one by one;
    all on one place."""
    bins = [[seq_id] for seq_id in seq_ids]
    if chunk_size is not None:
        bins = pack({seq_id: seq_lens[seq_id] for seq_id in seq_ids}, chunk_size)
    return [Chunk(tuple(Slice(i, 0, seq_lens[i], place) for i in own)) for own in bins]


def similar_meet(replicas: Replicas, seconds: Sequence[float]) -> Replicas:
    """The same chunks for replicas that go in step: each one's slowest first, so that the n-th of
    all take about equally long, and dummies behind the shorter lists. `seconds`: of every chunk, in
    the order in which they are listed."""
    most, left = max(map(len, replicas)), iter(seconds)
    found = []
    for own in replicas:
        own_s = list(islice(left, len(own)))
        slowest_first = sorted(range(len(own)), key=own_s.__getitem__, reverse=True)
        found.append([own[i] for i in slowest_first] + [Chunk(())] * (most - len(own)))
    return found


def fastest_plan(
    seq_lens: Sequence[int],
    model: CostModel,
    deal: Callable[[int], Replicas],
    *,
    dp_size: int,
    sp_size: int,
    recompute_layers: int | None = None,
    budget_bytes: int | None = None,
    device_tokens: int | None = None,
) -> ChunkPlan:
    """The checked plan of the chunks that `deal` makes for a number of tokens per device.

    `recompute_layers`: None takes the number whose plan is predicted to be fastest, of a few.
    `budget_bytes` of a device: None takes the hardware's. `device_tokens`: None takes what memory
    allows. Raises ConfigError where the longest sequence fits with no number of recomputed layers.
    """
    num_layers = model.shape.num_layers
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    layout = {"dp_size": dp_size, "sp_size": sp_size}
    needed = -(-max(seq_lens) // sp_size) if device_tokens is None else device_tokens
    best_s, best = float("inf"), None
    tried = recompute_choices(num_layers) if recompute_layers is None else [recompute_layers]
    for layers in tried:
        tokens = fitting_tokens(model.memory(budget), recompute_layers=layers, **layout)
        if tokens < needed:
            continue
        replicas = deal(tokens if device_tokens is None else device_tokens)
        regathers = model.training.regathers
        if regathers and dp_size > 1:
            chunks = [chunk for own in replicas for chunk in own]
            seconds = chunk_seconds(seq_lens, chunks, model, recompute_layers=layers, **layout)
            replicas = similar_meet(replicas, seconds)
        plan = chunk_by_chunk(
            seq_lens, replicas, num_layers=num_layers, sp_size=sp_size, recompute_layers=layers
        )
        plan = replace(plan, regathers=regathers)
        step_s = time_actions(plan, model.costs(plan)).duration_s
        if step_s < best_s:
            best_s, best = step_s, plan
        if device_tokens is not None:
            break
    if best is None:
        sizes = layout | {"recompute_layers": tried[-1]}
        wanted = seq_lens if device_tokens is None else [device_tokens * sp_size]
        raise does_not_fit(wanted, model, budget, **sizes)
    check(best, model.memory(budget))
    return best


def chunk_seconds(
    seq_lens: Sequence[int],
    chunks: Sequence[Chunk],
    model: CostModel,
    *,
    sp_size: int,
    dp_size: int = 1,
    recompute_layers: int = 0,
) -> list[float]:
    """Seconds of forward and backward of each chunk by itself, on one of `dp_size` groups whose
    devices share the state."""
    num_layers = model.shape.num_layers
    plan = chunk_by_chunk(
        seq_lens, [chunks], num_layers=num_layers, sp_size=sp_size,
        recompute_layers=recompute_layers,
    )  # fmt: skip
    regathers = model.training.regathers
    costs = model.costs(replace(plan, actions=plan.actions * dp_size, regathers=regathers))
    *cells, _ = plan.actions[0]
    seconds = [costs.compute_s(action, 0) for action in cells]
    return [sum(pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]
