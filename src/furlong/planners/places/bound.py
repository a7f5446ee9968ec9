"""A lower bound of every plan of whole sequences on a pool, one stage, all processes in step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from furlong.cost.model import CostModel
from furlong.planners.places.rates import TOKENS, Batch
from furlong.planners.places.setting import Setting, settings


def least_step_s(setting: Setting, num_micro_batches: int) -> float:
    """Seconds that no step of a setting undercuts: neither is it shorter than all work spread
    evenly over all slots, nor than the longest sequence alone on its best place. Attention is
    taken to be as efficient as it is for a full process, and only the longest sequence pays its
    all-to-alls."""
    rates, batch = setting.rates, setting.rates.batch
    even = batch.added[:, 0].sum(axis=0) / (batch.pool_size * num_micro_batches)
    longest = batch.added[np.argmax(batch.seq_lens)]
    longest = longest[setting.held(longest.T) <= setting.device_tokens]
    loads = np.concatenate([even[None], longest]).T
    full, empty, own = loads.copy(), np.zeros_like(loads), np.zeros_like(loads)
    full[TOKENS] = empty[TOKENS] = setting.device_tokens
    own[TOKENS] = loads[TOKENS]
    attention = rates.seconds(full, floors=False) - rates.seconds(empty, floors=False)
    seconds = attention + rates.seconds(own, floors=False)
    least_s = rates.least_s
    spread_s = num_micro_batches * np.maximum(seconds[:, 0], least_s)
    alone_s = np.maximum(seconds[:, 1:], least_s[:, None]).sum(axis=0).min()
    alone_s += (num_micro_batches - 1) * least_s.sum()
    return max(float(spread_s.sum()), float(alone_s))


def lower_bound_s(
    seq_lens: Sequence[int], model: CostModel, *, pool_size: int, budget_bytes: int | None = None
) -> float:
    """Seconds that no step of whole sequences on the pool undercuts; infinite where none fits."""
    batch = Batch.of(seq_lens, model, pool_size)
    found = settings(batch, budget_bytes, range(model.shape.num_layers + 1))
    return min((least_step_s(setting, setting.fewest) for setting in found), default=inf)
