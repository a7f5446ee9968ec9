"""A batch divided over the micro-batches and processes of a pool, and what a change would cost.

All micro-batches of all processes are slots; a place is an aligned run of slots of one micro-batch.
A step is the sum, over micro-batches and parts of their passes, of the slowest process.

    F sums of a load, P parts of passes, M micro-batches, W processes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from furlong.cost.seconds import Array
from furlong.planners.places.setting import Setting

_ALIKE = 1e-9
"""Share of the tokens that a process can hold below which two are equal."""
_POWER = 96
"""Exponent of the norm that stands for a maximum: the larger, the nearer to it."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a sequence is: micro-batch, number of the size of its place, first process."""

    micro_batch: int
    kind: int
    first: int


Spots = dict[int, Spot]
"""Where each sequence is."""


class Division:
    """Sequences on spots; it is changed in place."""

    def __init__(self, setting: Setting, num_micro_batches: int) -> None:
        self.setting = setting
        self.rates = setting.rates
        self.spots: Spots = {}
        self._seconds: Array | None = None
        batch = setting.rates.batch
        self.loads = np.zeros((batch.added.shape[2], num_micro_batches, batch.pool_size))

    def put(self, seq_id: int, spot: Spot) -> None:
        self.spots[seq_id], self._seconds = spot, None
        self.loads[self._slots(spot)] += self.rates.batch.added[seq_id, spot.kind][:, None]

    def take(self, seq_id: int) -> Spot:
        """The spot that it leaves."""
        spot, self._seconds = self.spots.pop(seq_id), None
        self.loads[self._slots(spot)] -= self.rates.batch.added[seq_id, spot.kind][:, None]
        return spot

    def reset(self, spots: Spots) -> None:
        """To other spots of all sequences."""
        self.spots, self._seconds = {}, None
        self.loads[:] = 0.0
        for seq_id, spot in spots.items():
            self.put(seq_id, spot)

    def seconds(self) -> Array:
        """(P, M, W) of every slot."""
        if self._seconds is None:
            self._seconds = self.rates.seconds(self.loads)
        return self._seconds

    def step_s(self) -> float:
        return float(self.seconds().max(axis=2).sum())

    def norm_s(self) -> float:
        """The same with a norm in the place of every maximum over processes: it falls, too, where
        one of several that are about as slow gets faster."""
        return float(_norms(self.seconds()[:, None])[0])

    def best_spot(self, seq_id: int, but: Spot | None = None) -> tuple[Spot, float] | None:
        """The spot with the least norm for an absent sequence, and that norm; `but` is left out.
        None where no spot has room."""
        batch, before = self.rates.batch, self.seconds()
        loads = self.loads[:, None] + batch.added[seq_id].T[:, :, None, None]
        after = self.rates.seconds(loads)  # (P, Z, M, W)
        scale = after.max(axis=(1, 2, 3)).reshape(-1, 1, 1)
        powers = (before / scale) ** _POWER
        grown = (after / scale[:, None]) ** _POWER - powers[:, None]
        sums = powers.sum(axis=2, keepdims=True)
        now_s = scale * sums ** (1 / _POWER)
        held, room = self.setting.held(loads), self.setting.device_tokens * (1 + _ALIKE)
        best: tuple[Spot, float] | None = None
        for kind, size in enumerate(batch.sizes):
            there = sums + by_place(grown[:, kind], size).sum(axis=-1)
            more_s = (scale * there ** (1 / _POWER) - now_s).sum(axis=0)
            more_s[by_place(held[kind], size).max(axis=-1) > room] = np.inf
            if but is not None and but.kind == kind:
                more_s[but.micro_batch, but.first // size] = np.inf
            number, place = divmod(int(more_s.argmin()), more_s.shape[1])
            least_s = float(more_s[number, place])
            if np.isfinite(least_s) and (best is None or least_s < best[1]):
                best = Spot(number, kind, place * size), least_s
        return best and (best[0], best[1] + float(now_s.sum()))

    def swap_norms(self, seq_id: int, others: Sequence[int]) -> Array:
        """(N,) each if `seq_id` and one of the others changed spots; infinite where that has no
        room."""
        added, here = self.rates.batch.added, self.spots[seq_id]
        loads = np.repeat(self.loads[:, None], len(others), axis=1)
        for i, other in enumerate(others):
            there = self.spots[other]
            for spot, comes, goes in ((here, other, seq_id), (there, seq_id, other)):
                batch, first, kind = spot.micro_batch, spot.first, spot.kind
                change = added[comes, kind] - added[goes, kind]
                loads[:, i, batch, first : first + self.rates.batch.sizes[kind]] += change[:, None]
        most = self.setting.held(loads).max(axis=(1, 2))
        fits = most <= self.setting.device_tokens * (1 + _ALIKE)
        return np.where(fits, _norms(self.rates.seconds(loads)), np.inf)

    def swap(self, one: int, other: int) -> None:
        here, there = self.take(one), self.take(other)
        self.put(one, there)
        self.put(other, here)

    def _slots(self, spot: Spot) -> tuple[slice, int, slice]:
        stop = spot.first + self.rates.batch.sizes[spot.kind]
        return slice(None), spot.micro_batch, slice(spot.first, stop)


def _norms(seconds: Array) -> Array:
    """(P, N, M, W) seconds of N divisions -> (N,) the sums of their norms over processes."""
    most = np.maximum(seconds.max(axis=-1, keepdims=True), 1e-30)
    powers = ((seconds / most) ** _POWER).sum(axis=-1)
    norms: Array = (most[..., 0] * powers ** (1 / _POWER)).sum(axis=(0, 2))
    return norms


def by_place(values: Array, size: int) -> Array:
    """(..., W) -> (..., W / size, size): the processes of every place of a size."""
    return values.reshape(*values.shape[:-1], -1, size)
