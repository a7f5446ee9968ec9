"""A setting: how many layers are checkpointed, and what a process can then hold at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from furlong.cost.seconds import Array
from furlong.planners.chunks import fitting_tokens
from furlong.planners.places.rates import GATHERED, TOKENS, PoolBatch, Rates


class Setting:
    """A number of checkpointed layers, with the tokens that a process can then hold at a time."""

    def __init__(
        self, batch: PoolBatch, recompute_layers: int, device_tokens: int, gather_weight: float
    ) -> None:
        self.rates = Rates(batch, recompute_layers)
        self.device_tokens = device_tokens
        self._gather_weight = gather_weight
        num_tokens = sum(batch.seq_lens)
        self.fewest = -(-num_tokens // (batch.pool_size * device_tokens))
        """Micro-batches."""

    def held(self, loads: Array) -> Array:
        """(...) tokens of `device_tokens` that loads (F, ...) take up: K and V that are gathered
        from other processes count as so many tokens as take equal bytes."""
        weighted: Array = loads[TOKENS] + self._gather_weight * loads[GATHERED]
        return weighted


def settings(
    batch: PoolBatch, budget_bytes: int | None, recompute_layers: Iterable[int]
) -> list[Setting]:
    """The settings in which the longest sequence has room."""
    model, pool_size, largest = batch.model, batch.pool_size, batch.sizes[-1]
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    share = model.shape.kv_share(largest) * largest
    """K,V that a process of the largest place keeps, over its own part."""
    whole = max((n for n in batch.sizes if model.shape.kv_share(n) * n == 1), default=1)
    longest = batch.added[np.argmax(batch.seq_lens)].T
    found = []
    for layers in recompute_layers:
        own, gathered = (
            fitting_tokens(
                model, budget, dp_size=1, sp_size=pool_size, recompute_layers=layers,
                place_size=size,
            )
            for size in (whole, largest)
        )  # fmt: skip
        # bytes grow on straight lines: what lies between two loads that fit does too
        weight = (own / max(1, gathered) - 1) / (share - 1) if share > 1 else 0.0
        setting = Setting(batch, layers, own, weight) if own else None
        if setting is not None and setting.held(longest).min() <= own:
            found.append(setting)
    return found
