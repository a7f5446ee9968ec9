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
from math import ceil, log2

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan
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
    """The division of each number of tokens per device that gives other sizes; only those that
    fit."""
    batch = division.rates.batch
    longest, last = max(batch.seq_lens), len(batch.sizes) - 1
    seen: set[tuple[int, ...]] = set()
    for step in range(_STEPS_PER_DOUBLING * last + 1):
        most = longest / 2 ** (step / _STEPS_PER_DOUBLING)
        kinds = tuple(min(last, max(0, ceil(log2(n / most)))) for n in batch.seq_lens)
        found = None if kinds in seen else earliest_first(division, kinds)
        seen.add(kinds)
        if found is not None:
            yield found
