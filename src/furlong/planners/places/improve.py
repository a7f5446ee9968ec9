"""Improvement of a division: tabu search over moves and swaps of what the slowest processes hold.

The best of a few changes is made even where it is none for the better, and what has moved stays
for a while (Glover, 1986): so that the search climbs out of a division that no one change betters.
"""

from __future__ import annotations

import random

import numpy as np

from furlong.planners.places.division import Division, Spot, by_place

_NUM_TRIED = 6
"""Sequences whose moves are compared for every change."""
_NUM_PARTNERS = 16
"""Sequences that one is tried against in a swap."""
_TENURE = 6
"""Changes, at least, for which a sequence that has moved stays; at most nearly twice as many."""


def improve(division: Division, num_tries: int) -> float:
    """Seconds of the step of the best division that is found with so many tries, each of one
    sequence's moves or swaps; `division` is that one afterwards."""
    draw = random.Random(0)
    best_s, best_spots = division.step_s(), dict(division.spots)
    stays: dict[int, int] = {}
    """Until which change each sequence that has moved stays."""
    tried = change = 0
    while tried < num_tries:
        change += 1
        free = [i for i in _slowest(division) if stays.get(i, 0) < change] or [*division.spots]
        chosen = draw.sample(free, min(_NUM_TRIED, len(free)))
        tried += len(chosen) + 1
        for seq_id in _change(division, chosen, stays, change):
            stays[seq_id] = change + _TENURE + draw.randrange(_TENURE)
        step_s = division.step_s()
        if step_s < best_s:
            best_s, best_spots = step_s, dict(division.spots)
    division.reset(best_spots)
    return best_s


def _change(
    division: Division, chosen: list[int], stays: dict[int, int], change: int
) -> tuple[int, ...]:
    """Makes the best of the moves of the chosen sequences and of the swaps of the first one;
    returns those that have moved."""
    least_s = np.inf
    best: tuple[int, Spot] | None = None
    for seq_id in chosen:
        spot = division.take(seq_id)
        found = division.best_spot(seq_id, but=spot)
        division.put(seq_id, spot)
        if found is not None and found[1] < least_s:
            least_s, best = found[1], (seq_id, found[0])
    others = [i for i in _partners(division, chosen[0]) if stays.get(i, 0) < change]
    norms_s = division.swap_norms(chosen[0], others)
    if others and norms_s.min() < least_s:
        division.swap(chosen[0], partner := others[norms_s.argmin()])
        return chosen[0], partner
    if best is None:
        return ()
    division.take(best[0])
    division.put(*best)
    return best[:1]


def _slowest(division: Division) -> list[int]:
    """Sequences on the slowest process of any part of any micro-batch, most work first."""
    rates, slowest = division.rates, division.seconds().argmax(axis=2)
    slots = {(batch, int(slot)) for row in slowest for batch, slot in enumerate(row)}
    found = [
        seq_id
        for seq_id, spot in division.spots.items()
        if any(
            (spot.micro_batch, process) in slots
            for process in range(spot.first, spot.first + rates.batch.sizes[spot.kind])
        )
    ]
    return sorted(found, key=lambda i: -rates.alone_s[i, division.spots[i].kind])


def _partners(division: Division, seq_id: int) -> list[int]:
    """The sequences whose exchange with `seq_id` would make both places' seconds most alike."""
    rates, here = division.rates, division.spots[seq_id]
    busy_s = division.seconds().sum(axis=0)
    by_kind = [by_place(busy_s, size).max(axis=-1) for size in rates.batch.sizes]
    at = np.array([(s.micro_batch, s.kind, s.first) for _, s in sorted(division.spots.items())])
    busy_there = np.array([by_kind[k][m, f // rates.batch.sizes[k]] for m, k, f in at.tolist()])
    kinds, alone_s, ids = at[:, 1], rates.alone_s, range(len(at))
    gains_s = alone_s[seq_id, here.kind] - alone_s[:, here.kind]
    costs_s = alone_s[seq_id, kinds] - alone_s[ids, kinds]
    after_s = np.abs(busy_there[seq_id] - gains_s - busy_there - costs_s)
    after_s[(gains_s <= 0) | (at == at[seq_id]).all(axis=1)] = np.inf
    nearest: list[int] = after_s.argsort(kind="stable")[:_NUM_PARTNERS].tolist()
    return [other for other in nearest if np.isfinite(after_s[other])]
