"""Lower bounds of every plan of whole sequences on a pool, one stage, all processes in step.

K sequences, Z sizes of places, P parts of passes, W processes
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from furlong.cost.model import CostModel
from furlong.plan.plan import Chunk, Place, Reduce, Slice
from furlong.planners.chunks import chunk_by_chunk
from furlong.planners.places import PoolBatch, Setting, settings
from furlong.simulate.clock import time_actions
from papers.places_forced import forced_s
from papers.places_least import Least

_NARROW = 1e-3
"""Share of a step at which the search for a bound between two others ends."""
_LONGER = 1.2
"""A step over its first bound up to which it is bounded again."""


def lower_bound_s(
    seq_lens: Sequence[int], model: CostModel, *, pool_size: int, budget_bytes: int | None = None
) -> float:
    """Seconds that no step of whole sequences on the pool undercuts: of its passes, and what of the
    Reduce at their end nothing hides; infinite where none fits."""
    batch = PoolBatch.of(seq_lens, model, pool_size)
    found = settings(batch, budget_bytes, range(model.shape.num_layers + 1))
    queue = [
        (Least.of(setting, setting.fewest).step_s, number, setting.fewest)
        for number, setting in enumerate(found)
    ]
    heapq.heapify(queue)
    best_s = inf
    while queue and queue[0][0] < best_s:
        _, number, count = heapq.heappop(queue)
        best_s = min(best_s, _bound_s(found[number], count, best_s))
        if count < len(seq_lens):
            more = Least.of(found[number], count + 1)
            heapq.heappush(queue, (more.step_s, number, count + 1))
    return best_s + exposed_reduce_s(seq_lens, model, pool_size)


def _bound_s(setting: Setting, count: int, most_s: float) -> float:
    """Seconds, up to `most_s`, that no step of a setting undercuts with so many micro-batches. A
    step takes a little longer than the first bound or it has so few tokens on every process that
    attention is less efficient, which gives a second one."""
    first_s = _crossing(Least.of(setting, count), most_s)
    limit_s = min(most_s, _LONGER * first_s)
    return max(first_s, min(limit_s, _crossing(Least.of(setting, count, limit_s), limit_s)))


def exposed_reduce_s(seq_lens: Sequence[int], model: CostModel, pool_size: int) -> float:
    """Seconds that a step takes longer for its Reduce, behind a Backward as long as any can be: of
    all sequences on one process, every layer recomputed. A shorter one hides no more."""
    alone = Place(0, 1)
    chunk = Chunk(tuple(Slice(i, 0, n, alone) for i, n in enumerate(seq_lens)))
    layers = model.shape.num_layers
    plan = chunk_by_chunk(
        seq_lens, [[chunk]], num_layers=layers, sp_size=pool_size, recompute_layers=layers
    )
    passes = tuple(a for a in plan.actions[0] if not isinstance(a, Reduce))
    with_s, without_s = (
        time_actions(one, model.costs(one)).duration_s
        for one in (plan, replace(plan, actions=(passes,)))
    )
    return with_s - without_s


def _crossing(least: Least, most_s: float) -> float:
    """The largest step, up to `most_s`, of which what it forces is no less: a step that is allowed
    more seconds forces less."""
    low_s = high_s = least.step_s
    while forced_s(least, high_s) >= high_s:
        if high_s >= most_s:
            return most_s
        low_s, high_s = high_s, min(most_s, 1.1 * high_s)
    while high_s - low_s > _NARROW * low_s:
        middle_s = (low_s + high_s) / 2
        if forced_s(least, middle_s) >= middle_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s
