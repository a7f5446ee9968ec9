"""The fastest of the divisions that a published method's rule makes of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from furlong.cost.model import CostModel
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import recompute_choices, refuse_unusable
from furlong.planners.places import (
    Division,
    PoolBatch,
    Setting,
    Spots,
    nothing_fits,
    plan_of,
    settings,
)

_TRIED_COUNTS = 4
"""Numbers of micro-batches that are tried, from the fewest that fit."""


@dataclass(frozen=True, slots=True)
class _Best:
    step_s: float
    recompute_layers: int
    spots: Spots
    is_roomy: bool
    """Whether no process holds half of what it could."""


def plan_fastest(
    seq_lens: Sequence[int],
    model: CostModel,
    divide: Callable[[Division], Iterator[Spots]],
    *,
    pool_size: int,
    budget_bytes: int | None,
    recompute_layers: int | None,
) -> ChunkPlan:
    """The checked plan of the fastest division: one rank, a pool of `pool_size` devices.

    `divide`: the divisions of a number of micro-batches. `budget_bytes` of a device: None takes the
    hardware's. `recompute_layers`: checkpointed layers of every sequence; None tries a few numbers.
    Raises ConfigError where the longest sequence fits on no place.
    """
    refuse_unusable(seq_lens)
    batch = PoolBatch.of(seq_lens, model, pool_size)
    few = recompute_choices(model.shape.num_layers)
    tried = few if recompute_layers is None else [recompute_layers]
    best: _Best | None = None
    for layers in tried:
        for setting in settings(batch, budget_bytes, [layers]):
            best = _fastest_in(setting, divide, best)
        if best is not None and best.is_roomy:
            break  # what more recomputation adds to the room is not needed
    if best is None:
        raise nothing_fits(batch, tried[-1], budget_bytes)
    return plan_of(batch, best.spots, best.recompute_layers, budget_bytes)


def _fastest_in(
    setting: Setting, divide: Callable[[Division], Iterator[Spots]], best: _Best | None
) -> _Best | None:
    """The fastest division of a setting, where it is faster than the best one of others."""
    found = 0
    for count in range(setting.fewest, len(setting.rates.batch.seq_lens) + 1):
        if best is not None and setting.least_s(count) >= best.step_s:
            break
        division = Division(setting, count)
        ways = list(divide(division))
        for spots in ways:
            division.reset(spots)
            step_s = division.step_s()
            if best is None or step_s < best.step_s:
                roomy = 2 * setting.held(division.loads).max() <= setting.device_tokens
                best = _Best(step_s, setting.rates.recompute_layers, spots, bool(roomy))
        found += bool(ways)
        if found == _TRIED_COUNTS:
            break
    return best
