"""A lower bound of every plan of whole sequences on a pool, one stage, all processes in step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from furlong.cost.model import CostModel
from furlong.planners.chunks.micro_batches import fitting_tokens
from furlong.planners.places.rates import TOKENS, Batch, Rates


class Setting:
    """A number of checkpointed layers, with the tokens that a process can then hold at a time."""

    def __init__(self, batch: Batch, recompute_layers: int, device_tokens: int) -> None:
        self.rates = Rates(batch, recompute_layers)
        self.device_tokens = device_tokens
        num_tokens = sum(batch.seq_lens)
        self.fewest = -(-num_tokens // (batch.pool_size * device_tokens))
        """Micro-batches."""

    def bound_s(self, num_micro_batches: int) -> float:
        """No step is shorter: neither than all work spread evenly over all slots, nor than the
        longest sequence alone on its best place. Attention is taken to be as efficient as it is for
        a full process, and only the longest sequence pays its all-to-alls."""
        rates, batch = self.rates, self.rates.batch
        even = batch.added[:, 0].sum(axis=0) / (batch.pool_size * num_micro_batches)
        longest = batch.added[max(range(len(batch.seq_lens)), key=batch.seq_lens.__getitem__)]
        loads = np.concatenate([even[None], longest]).T
        full, empty, own = loads.copy(), np.zeros_like(loads), np.zeros_like(loads)
        full[TOKENS] = empty[TOKENS] = self.device_tokens
        own[TOKENS] = loads[TOKENS]
        attention = rates.seconds(full, floors=False) - rates.seconds(empty, floors=False)
        seconds = attention + rates.seconds(own, floors=False)
        least_s = rates.least_s
        spread_s = num_micro_batches * np.maximum(seconds[:, 0], least_s)
        alone_s = np.maximum(seconds[:, 1:], least_s[:, None]).sum(axis=0).min()
        alone_s += (num_micro_batches - 1) * least_s.sum()
        return max(float(spread_s.sum()), float(alone_s))


def settings(
    batch: Batch, budget_bytes: int | None, recompute_layers: Iterable[int]
) -> list[Setting]:
    """Those in which the longest sequence has room."""
    model, pool_size = batch.model, batch.pool_size
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    found = []
    for layers in recompute_layers:
        tokens = fitting_tokens(
            model, budget, dp_size=1, sp_size=pool_size, recompute_layers=layers
        )
        if tokens * batch.sizes[-1] >= max(batch.seq_lens):
            found.append(Setting(batch, layers, tokens))
    return found


def lower_bound_s(
    seq_lens: Sequence[int], model: CostModel, *, pool_size: int, budget_bytes: int | None = None
) -> float:
    """Seconds that no step of whole sequences on the pool undercuts; infinite where none fits."""
    batch = Batch.of(seq_lens, model, pool_size)
    found = settings(batch, budget_bytes, range(model.shape.num_layers + 1))
    return min((setting.bound_s(setting.fewest) for setting in found), default=inf)
