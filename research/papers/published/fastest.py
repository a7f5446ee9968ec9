"""The fastest of the divisions that a published method's rule makes of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from furlong.cost.model import CostModel
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import does_not_fit, recompute_choices, refuse_unusable
from furlong.planners.places import (
    Division,
    PoolBatch,
    Setting,
    plan_of,
    settings,
)

_TRIED_COUNTS = 4
"""Numbers of micro-batches that are tried, from the fewest that fit."""


def plan_fastest(
    seq_lens: Sequence[int],
    model: CostModel,
    divide: Callable[[Setting, int], Iterator[Division]],
    *,
    pool_size: int,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
) -> ChunkPlan:
    """The checked plan of the fastest division: one rank, a pool of `pool_size` devices.

    `divide`: the divisions of a setting into a number of micro-batches. `budget_bytes` of a device:
    None takes the hardware's. `recompute_layers`: checkpointed layers of every sequence; None tries
    a few numbers.
    Raises ConfigError where the longest sequence fits on no place.
    """
    refuse_unusable(seq_lens)
    batch = PoolBatch.of(seq_lens, model, pool_size)
    few = recompute_choices(model.shape.num_layers)
    tried = few if recompute_layers is None else [recompute_layers]
    best: Division | None = None
    for layers in tried:
        for setting in settings(batch, budget_bytes, [layers]):
            best = _fastest_in(setting, divide, best)
        if best is not None and 2 * best.setting.held(best.loads).max() <= (
            best.setting.device_tokens
        ):
            break  # half of the room is free, which more recomputation only adds to
    if best is None:
        raise does_not_fit(
            seq_lens, model, budget_bytes, sp_size=pool_size, recompute_layers=tried[-1]
        )
    return plan_of(batch, best.spots, best.setting.recompute_layers, budget_bytes)


def _fastest_in(
    setting: Setting,
    divide: Callable[[Setting, int], Iterator[Division]],
    best: Division | None,
) -> Division | None:
    """The fastest division of a setting, where it is faster than the best one of others."""
    found = 0
    for count in range(setting.fewest, len(setting.batch.seq_lens) + 1):
        if best is not None and setting.least_s(count) >= best.step_s():
            break
        own = [*divide(setting, count)]
        best = min([*([best] if best else []), *own], key=Division.step_s, default=None)
        found += bool(own)
        if found == _TRIED_COUNTS:
            break
    return best
