"""One planner of places and micro-batches: whole sequences on one stage, one pool in step.

Every number of checkpointed layers says how many tokens a process holds at a time, and so how many
micro-batches there must be. These settings are tried by rising lower bound: first their starts,
then the best of them are improved, or all divisions looked at where they are few.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from furlong.cost.model import CostModel
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import refuse_unusable
from furlong.planners.methods.flexsp import flexsp_divisions
from furlong.planners.methods.hybrid_cp import hybrid_cp_divisions
from furlong.planners.places.division import Division, Spots
from furlong.planners.places.emit import nothing_fits, plan_of
from furlong.planners.places.exact import fastest_spots
from furlong.planners.places.improve import improve
from furlong.planners.places.least import Least
from furlong.planners.places.rates import PoolBatch
from furlong.planners.places.setting import Setting, settings
from furlong.planners.places.starts import by_targets, greedy

_NUM_IMPROVED = 6
"""Starts, the best ones, that are improved a little; then the best of them goes on."""
_FEW_TRIES = 240
_NUM_TRIES = 2400
"""Sequences that it tries to move or swap."""
_MOST_SPOTS = 2**18
"""Most sequences times processes times micro-batches for which every spot of each is looked at,
unless there is no other start."""


@dataclass(frozen=True, slots=True)
class _Start:
    step_s: float
    setting: Setting
    num_micro_batches: int
    spots: Spots
    is_roomy: bool = False
    """Whether no process holds half of what it could."""


def plan_places(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    pool_size: int,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
    num_tries: int = _NUM_TRIES,
) -> ChunkPlan:
    """A checked plan of one rank, a pool of `pool_size` devices.

    `budget_bytes` of a device: None takes the hardware's. `recompute_layers`: checkpointed layers;
    None tries every number. `num_tries`: how long improvement goes on, in sequences.
    Raises ConfigError where the longest sequence fits on no place.
    """
    refuse_unusable(seq_lens)
    batch = PoolBatch.of(seq_lens, model, pool_size)
    num_layers = model.shape.num_layers
    if len(seq_lens) == 1:
        num_tries = 0  # a start has compared all its places
    tried = range(num_layers + 1) if recompute_layers is None else [recompute_layers]
    starts = _starts(settings(batch, budget_bytes, tried))
    if not starts:
        raise nothing_fits(batch, tried[-1], budget_bytes)
    best = _optimum(starts[0])
    if best is None:
        few = [_improved(start, min(_FEW_TRIES, num_tries)) for start in starts[:_NUM_IMPROVED]]
        best = _improved(min(few, key=lambda start: start.step_s), num_tries)
    return plan_of(batch, best.spots, best.setting.rates.recompute_layers, budget_bytes)


def _optimum(start: _Start) -> _Start | None:
    """The fastest division in the setting of a start with one micro-batch; None where there are
    more micro-batches, or too many divisions to know."""
    if start.num_micro_batches > 1:
        return None
    division = Division(start.setting, 1)
    spots = fastest_spots(division, start.step_s)
    if spots is None:
        return None
    division.reset(spots or start.spots)
    return replace(start, step_s=division.step_s(), spots=division.spots)


def _improved(start: _Start, num_tries: int) -> _Start:
    setting, count = start.setting, start.num_micro_batches
    division = Division(setting, count)
    division.reset(start.spots)
    step_s = improve(division, num_tries)
    return _Start(step_s, setting, count, dict(division.spots))


def _starts(found: Sequence[Setting]) -> list[_Start]:
    """The starts of every setting whose bound is below the best of all, fastest first."""
    roomy: dict[int, int] = {}
    queue = [
        (Least.of(setting, setting.fewest).step_s, number, setting.fewest)
        for number, setting in enumerate(found)
    ]
    heapq.heapify(queue)
    starts: list[_Start] = []
    best_s = inf
    while queue:
        bound_s, number, count = heapq.heappop(queue)
        if bound_s >= best_s:
            break
        setting = found[number]
        if number > roomy.get(count, number):
            continue  # what it adds to the room was not needed
        own = _starts_of(setting, count)
        if own:
            starts += own
            best_s = min(best_s, *(start.step_s for start in own))
            if any(start.is_roomy for start in own):
                roomy[count] = min(number, roomy.get(count, number))
        elif count < len(setting.rates.batch.seq_lens):
            heapq.heappush(queue, (Least.of(setting, count + 1).step_s, number, count + 1))
    return sorted(starts, key=lambda start: start.step_s)


def _starts_of(setting: Setting, num_micro_batches: int) -> list[_Start]:
    """The best start that every way to start has in a setting; improvement ends elsewhere from
    each."""
    division, batch = Division(setting, num_micro_batches), setting.rates.batch
    num_spots = len(batch.seq_lens) * batch.pool_size * num_micro_batches
    found: list[_Start] = []
    for way in (by_targets, flexsp_divisions, hybrid_cp_divisions, greedy):
        if way is greedy and found and num_spots > _MOST_SPOTS:
            continue
        own: list[_Start] = []
        for spots in way(division):
            division.reset(spots)
            roomy = 2 * setting.held(division.loads).max() <= setting.device_tokens
            own.append(_Start(division.step_s(), setting, num_micro_batches, spots, bool(roomy)))
        found += sorted(own, key=lambda start: start.step_s)[:1]
    return found
