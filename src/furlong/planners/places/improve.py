"""Local improvement of a division: moves and swaps of what the slowest processes hold."""

from __future__ import annotations

import random

import numpy as np

from furlong.planners.places.division import Division, Value, most_by_place

_NUM_PARTNERS = 16
"""Sequences that one is tried against."""
_MOST_KICKS = 12
"""In a row that lead to nothing better."""


def improve(division: Division, num_tries: int) -> Value:
    """The value of the best division that is found with so many tries, each of one sequence's moves
    and swaps; `division` is that one afterwards."""
    draw = random.Random(0)
    value = division.value()
    best, best_spots = value, dict(division.spots)
    tried = kicks = 0
    while tried < num_tries and kicks < _MOST_KICKS:
        moved = False
        for seq_id in _slowest(division):
            tried += 1
            better = _try(division, seq_id, value)
            if better is not None:
                value, moved = better, True
                break
            if tried >= num_tries:
                break
        if value.beats(best):
            best, best_spots, kicks = value, dict(division.spots), 0
        if not moved:
            kicks += 1
            division.reset(best_spots)
            _kick(division, draw)
            value = division.value()
    division.reset(best_spots)
    return best


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


def _try(division: Division, seq_id: int, value: Value) -> Value | None:
    """The better value after a move or a swap of a sequence; None where none is better."""
    spot = division.take(seq_id)
    found = division.best_spot(seq_id)
    if found is not None and found[1].beats(value):
        division.put(seq_id, found[0])
        return found[1]
    division.put(seq_id, spot)
    best, partner = value, -1
    others = _partners(division, seq_id)
    for other, after in zip(others, division.swap_values(seq_id, others), strict=True):
        if after is not None and after.beats(best):
            best, partner = after, other
    if partner < 0:
        return None
    division.swap(seq_id, partner)
    return best


def _partners(division: Division, seq_id: int) -> list[int]:
    """Those whose exchange with `seq_id` would bring both places' seconds nearest to each other."""
    rates, here = division.rates, division.spots[seq_id]
    busy_s = division.seconds().sum(axis=0)
    by_kind = [most_by_place(busy_s, size) for size in rates.batch.sizes]
    at = np.array([(s.micro_batch, s.kind, s.first) for _, s in sorted(division.spots.items())])
    busy_there = np.array([by_kind[k][m, f // rates.batch.sizes[k]] for m, k, f in at.tolist()])
    kinds, alone_s, ids = at[:, 1], rates.alone_s, range(len(at))
    gains_s = alone_s[seq_id, here.kind] - alone_s[:, here.kind]
    costs_s = alone_s[seq_id, kinds] - alone_s[ids, kinds]
    after_s = np.abs(busy_there[seq_id] - gains_s - busy_there - costs_s)
    after_s[(gains_s <= 0) | (at == at[seq_id]).all(axis=1)] = np.inf
    nearest: list[int] = after_s.argsort(kind="stable")[:_NUM_PARTNERS].tolist()
    return [other for other in nearest if np.isfinite(after_s[other])]


def _kick(division: Division, draw: random.Random) -> None:
    """One sequence of the slowest processes and two others leave, and come back in a drawn order,
    each to its best spot; no change where one finds no room."""
    before = dict(division.spots)
    chosen = {draw.choice(_slowest(division)), *draw.sample(sorted(before), min(2, len(before)))}
    for seq_id in chosen:
        division.take(seq_id)
    for seq_id in draw.sample(sorted(chosen), len(chosen)):
        found = division.best_spot(seq_id)
        if found is None:
            division.reset(before)
            return
        division.put(seq_id, found[0])
