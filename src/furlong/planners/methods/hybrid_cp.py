"""Hybrid context parallelism of Megatron-Core: a sequence gets as many devices as its length asks.

`--hybrid-context-parallel --max-seqlen-per-dp-cp-rank N` (NVIDIA, Megatron-LM,
core/pipeline_parallel/hybrid_cp_schedule.py, commit d98e8a6): a sequence is shared by the next
power of two of length / N devices. Here the sequences on most devices go first, the longest of them
first, each to the place that is done with it earliest by the cost model's seconds, where Megatron
counts length squared / devices, runs one sequence at a time and lets groups of sequences wait for
each other; and N is searched, which Megatron leaves to the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from furlong.cost.model import CostModel
from furlong.plan.plan import ChunkPlan
from furlong.planners.places.division import Division, Spots
from furlong.planners.places.fastest import plan_fastest
from furlong.planners.places.starts import earliest_first

_STEPS_PER_DOUBLING = 4
"""Numbers of tokens per device that are tried between one and twice as many."""


def plan_hybrid_cp(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    pool_size: int,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
) -> ChunkPlan:
    """The checked plan with the best number of tokens per device; the rest as in `plan_fastest`."""
    return plan_fastest(
        seq_lens, model, hybrid_cp_divisions,
        pool_size=pool_size, budget_bytes=budget_bytes, recompute_layers=recompute_layers,
    )  # fmt: skip


def hybrid_cp_divisions(division: Division) -> Iterator[Spots]:
    """The divisions of numbers of tokens per device that give other sizes, those first whose
    sequences take least: as long as the others may be faster, and only what fits."""
    rates, batch = division.rates, division.rates.batch
    lens, last = np.array(batch.seq_lens), len(batch.sizes) - 1
    queue: dict[tuple[int, ...], float] = {}
    for step in range(_STEPS_PER_DOUBLING * last + 1):
        most = lens.max() / 2 ** (step / _STEPS_PER_DOUBLING)
        kinds = np.ceil(np.log2(lens / most)).clip(0, last).astype(int)
        alone_s = rates.alone_s[range(len(lens)), kinds]
        spread_s = (alone_s * np.array(batch.sizes)[kinds]).sum() / batch.pool_size
        queue[tuple(kinds.tolist())] = max(spread_s, (alone_s + rates.fixed_s[kinds]).max())
    best_s = inf
    for sizes, bound_s in sorted(queue.items(), key=lambda one: one[1]):
        if bound_s >= best_s:
            break
        found = earliest_first(division, sizes)
        if found is not None:
            division.reset(found)
            best_s = min(best_s, division.step_s())
            yield found
