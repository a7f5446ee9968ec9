"""The fastest of all divisions of a batch over the places of a pool, in one micro-batch.

Sequences get their places one after the other, the longest first, in all divisions of those before
it at once: those that may still become the fastest. Of places that are alike only the first is
tried. A few sequences leave so few divisions that all are looked at.

    F sums of a load, K sequences, N divisions, P parts of passes, W processes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from furlong.cost.seconds import Array
from furlong.planners.places.division import Division, Spot, Spots
from furlong.planners.places.least import Least

_MOST_TRIED = 2**20
"""Loads of processes that are looked at: about a second."""


def fastest_spots(division: Division, step_s: float) -> Spots | None:
    """The spots of the fastest division in one micro-batch; empty where none takes less than
    `step_s` seconds, None where there are too many to know."""
    setting, batch = division.setting, division.rates.batch
    width, even_s = batch.pool_size, Least.of(setting, 1).even_s[:, None]
    places = [
        Spot(0, kind, first)
        for kind, size in enumerate(batch.sizes)
        for first in range(0, width, size)
    ]
    loads, taken = np.zeros((batch.added.shape[2], 1, width)), np.zeros((1, 0), dtype=int)
    steps_s, left = np.zeros(1), _MOST_TRIED
    order = sorted(range(len(batch.seq_lens)), key=lambda i: -batch.seq_lens[i])
    for seq_id in order:
        grown: list[tuple[Array, NDArray[np.int64], Array]] = []
        for number, spot in enumerate(places):
            rows = _first_alike(loads, batch.sizes, spot)
            left -= width * int(rows.sum())
            if left < 0:
                return None
            after = loads[:, rows]
            there = slice(spot.first, spot.first + batch.sizes[spot.kind])
            after[..., there] += batch.added[seq_id, spot.kind][:, None, None]
            # more load is never faster, and no part of a step is faster than all work spread evenly
            parts_s = np.maximum(setting.rates.seconds(after).max(axis=2), even_s).sum(axis=0)
            fits = setting.held(after).max(axis=1) <= setting.device_tokens
            kept = fits & (parts_s < step_s)
            own = np.full((int(kept.sum()), 1), number)
            grown.append((after[:, kept], np.hstack([taken[rows][kept], own]), parts_s[kept]))
        loads = np.concatenate([one[0] for one in grown], axis=1)
        taken = np.concatenate([one[1] for one in grown])
        steps_s = np.concatenate([one[2] for one in grown])
        if not len(taken):
            return {}
    fastest: list[int] = taken[steps_s.argmin()].tolist()
    return {seq_id: places[number] for seq_id, number in zip(order, fastest, strict=True)}


def _first_alike(loads: Array, sizes: Sequence[int], spot: Spot) -> NDArray[np.bool_]:
    """(N,) whether no place before `spot` is like it: neither its own loads nor those of a larger
    place that it is in are those of a neighbour within the next larger one."""
    first = np.ones(loads.shape[1], dtype=bool)
    for size, larger in pairwise((*sizes[spot.kind :], loads.shape[2])):
        start = spot.first // size * size
        for other in range(spot.first // larger * larger, start, size):
            alike = loads[..., other : other + size] == loads[..., start : start + size]
            first &= ~alike.all(axis=(0, 2))
    return first
