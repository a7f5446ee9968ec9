"""Local improvement of a division: moves and swaps of what the slowest processes hold."""

from __future__ import annotations

import random

import numpy as np

from furlong.planners.places.division import Division, Value

_SWAPS = 16
"""Sequences that one is tried against."""


def improve(division: Division, num_tries: int) -> Value:
    """The value of the best division that is found with so many tries, each of one sequence's moves
    and swaps; `division` is that one afterwards."""
    draw = random.Random(0)
    value = division.value()
    best, best_spots = value, dict(division.spots)
    tried = 0
    while tried < num_tries:
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
            best, best_spots = value, dict(division.spots)
        if not moved and tried < num_tries:
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
    others = _partners(division, seq_id)
    if others:
        values = division.swap_values(seq_id, others)
        least, other = None, -1
        for after, candidate in zip(values, others, strict=True):
            if after is not None and after.beats(least or value):
                least, other = after, candidate
        if least is not None:
            division.swap(seq_id, other)
        return least
    return None


def _partners(division: Division, seq_id: int) -> list[int]:
    """Those whose exchange with `seq_id` would bring both places' seconds nearest to each other."""
    rates, here = division.rates, division.spots[seq_id]
    busy_s = division.seconds().sum(axis=0)

    def seconds_at(i: int) -> float:
        spot = division.spots[i]
        where = slice(spot.first, spot.first + rates.batch.sizes[spot.kind])
        return float(busy_s[spot.micro_batch, where].max())

    own_s, busy_here = rates.alone_s[seq_id, here.kind], seconds_at(seq_id)
    scores = []
    for other, spot in division.spots.items():
        gains_s = own_s - rates.alone_s[other, here.kind]
        if other != seq_id and spot != here and gains_s > 0:
            costs_s = rates.alone_s[seq_id, spot.kind] - rates.alone_s[other, spot.kind]
            after = abs((busy_here - gains_s) - (seconds_at(other) + costs_s))
            scores.append((after, other))
    return [other for _, other in sorted(scores)[:_SWAPS]]


def _kick(division: Division, draw: random.Random) -> None:
    """One of the slowest and two others each to the best spot without them, in a drawn order."""
    chosen = [draw.choice(_slowest(division)), *draw.sample(sorted(division.spots), 2)] if (
        len(division.spots) > 2
    ) else sorted(division.spots)
    before = dict(division.spots)
    for seq_id in dict.fromkeys(chosen):
        division.take(seq_id)
    for seq_id in sorted(set(chosen), key=lambda i: draw.random()):
        found = division.best_spot(seq_id)
        if found is None:
            division.reset(before)
            return
        division.put(seq_id, found[0])


