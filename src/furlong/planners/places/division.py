"""A batch divided over the micro-batches and processes of a pool, and what a change would cost.

All micro-batches of all processes are slots; a place is an aligned run of slots of one micro-batch.
A step is the sum, over micro-batches and parts of their passes, of the slowest process.

    F sums of a load, P parts of passes, M micro-batches, W processes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from furlong.cost.seconds.chunks import Array
from furlong.planners.places.setting import Setting

_ALIKE = 1e-9
"""Share of a step below which two are equal."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a sequence is: micro-batch, number of the size of its place, first process."""

    micro_batch: int
    kind: int
    first: int


Spots = dict[int, Spot]
"""Where each sequence is."""


@dataclass(frozen=True, slots=True)
class Value:
    """How good a division is; less is better."""

    step_s: float
    uneven: float
    """Sum of the squared seconds of all slots and parts: it falls where work moves to others, also
    where the slowest process stays as slow."""

    def beats(self, other: Value) -> bool:
        margin = _ALIKE * other.step_s
        if abs(self.step_s - other.step_s) > margin:
            return self.step_s < other.step_s
        return self.uneven < other.uneven * (1 - _ALIKE)


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

    def best_spot(self, seq_id: int, *, small: bool = False) -> tuple[Spot, Value] | None:
        """The spot where an absent sequence costs least, of equal ones the one that leaves slots
        most even, or with `small` the one on fewest processes; None where no spot has room."""
        rates, before = self.rates, self.seconds()
        added = rates.batch.added[seq_id].T[:, :, None, None]
        after = rates.seconds(self.loads[:, None] + added)
        slowest = before.max(axis=2)
        now_s, now_uneven = slowest.sum(), (before**2).sum()
        grown = (after**2 - (before**2)[:, None]).sum(axis=0)
        held, grows = self.setting.held(self.loads), self.setting.held(added)[:, 0, 0]
        room = self.setting.device_tokens * (1 + _ALIKE)
        best: tuple[Spot, Value] | None = None
        for kind, size in enumerate(rates.batch.sizes):
            step_s = now_s + (most_by_place(after[:, kind], size) - slowest[..., None]).clip(
                min=0
            ).sum(axis=0)
            step_s[most_by_place(held, size) + grows[kind] > room] = np.inf
            least = step_s.min()
            if not np.isfinite(least):
                continue
            uneven = now_uneven + grown[kind].reshape(*step_s.shape, size).sum(axis=2)
            uneven[step_s > least * (1 + _ALIKE)] = np.inf
            batch, place = divmod(int(uneven.argmin()), step_s.shape[1])
            found = Value(float(least), float(uneven[batch, place]))
            if best is None or (
                found.step_s < best[1].step_s * (1 - _ALIKE) if small else found.beats(best[1])
            ):
                best = Spot(batch, kind, place * size), found
        return best

    def value(self) -> Value:
        return value_of(self.seconds())

    def swap_values(self, seq_id: int, others: list[int]) -> list[Value | None]:
        """Each if `seq_id` and one of the others changed spots; None where that has no room."""
        added, here = self.rates.batch.added, self.spots[seq_id]
        loads = np.repeat(self.loads[:, None], len(others), axis=1)
        for i, other in enumerate(others):
            there = self.spots[other]
            for spot, comes, goes in ((here, other, seq_id), (there, seq_id, other)):
                batch, first, kind = spot.micro_batch, spot.first, spot.kind
                change = added[comes, kind] - added[goes, kind]
                loads[:, i, batch, first : first + self.rates.batch.sizes[kind]] += change[:, None]
        most = self.setting.held(loads).max(axis=(1, 2))
        seconds = self.rates.seconds(loads)
        fits = most <= self.setting.device_tokens * (1 + _ALIKE)
        return [value_of(seconds[:, i]) if fits[i] else None for i in range(len(others))]

    def swap(self, one: int, other: int) -> None:
        here, there = self.take(one), self.take(other)
        self.put(one, there)
        self.put(other, here)

    def _slots(self, spot: Spot) -> tuple[slice, int, slice]:
        stop = spot.first + self.rates.batch.sizes[spot.kind]
        return slice(None), spot.micro_batch, slice(spot.first, stop)


def value_of(seconds: Array) -> Value:
    """Of a division whose slots take (P, M, W) seconds."""
    return Value(float(seconds.max(axis=2).sum()), float((seconds**2).sum()))


def most_by_place(values: Array, size: int) -> Array:
    """(..., W) -> (..., W / size): the most of every place of a size."""
    most: Array = values.reshape(*values.shape[:-1], -1, size).max(axis=-1)
    return most
