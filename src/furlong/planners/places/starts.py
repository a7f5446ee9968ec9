"""Ways to divide a batch that improvement starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from furlong.planners.places.division import Division, Spot, Spots

_TARGETS = tuple(1 + 0.02 * step for step in range(8))
"""Multiples of the mean seconds of a slot that are tried as a target."""


def greedy(division: Division) -> Iterator[Spots]:
    """Every sequence, the longest first, where the step's norm grows least; nothing where one
    finds no room."""
    division.reset({})
    lens = division.rates.batch.seq_lens
    for seq_id in sorted(range(len(lens)), key=lambda i: -lens[i]):
        found = division.best_spot(seq_id)
        if found is None:
            return
        division.put(seq_id, found[0])
    yield dict(division.spots)


def by_targets(division: Division) -> Iterator[Spots]:
    """Dual approximation (Turek, Ludwig, Tiwari 1994): if no process may take longer than a target,
    every sequence has a smallest place; those on large places go first, to where they end earliest.
    Aligned places of falling sizes leave no holes."""
    rates = division.rates
    num_slots = division.loads.shape[1] * division.loads.shape[2]
    mean_s = float(rates.alone_s[:, 0].sum()) / num_slots
    seen: set[tuple[int, ...]] = set()
    for target in _TARGETS:
        kinds = _smallest_kinds(division, target * mean_s)
        if tuple(kinds) in seen:
            continue
        seen.add(tuple(kinds))
        found = earliest_first(division, kinds)
        if found is not None:
            yield found


def _smallest_kinds(division: Division, target_s: float) -> list[int]:
    """For each sequence the number of the smallest size that holds it within the target."""
    rates, setting = division.rates, division.setting
    short = rates.fixed_s + rates.alone_s <= target_s
    fits = setting.held(rates.batch.added.transpose(2, 0, 1)) <= setting.device_tokens
    last = len(rates.batch.sizes) - 1
    chosen = np.where((short & fits).any(axis=1), (short & fits).argmax(axis=1), last)
    kinds: list[int] = chosen.tolist()
    return kinds


def earliest_first(division: Division, kinds: Sequence[int]) -> Spots | None:
    """Sequences on places of given sizes, or larger ones where those have no room, the largest
    places first and of those the longest work, each to where it ends earliest; None where one finds
    no room."""
    rates, setting = division.rates, division.setting
    held = setting.held(rates.batch.added.transpose(2, 0, 1))
    _, num_batches, pool_size = division.loads.shape
    busy_s, tokens = np.zeros((num_batches, pool_size)), np.zeros((num_batches, pool_size))
    work_s = rates.alone_s[range(len(kinds)), kinds]
    spots: Spots = {}
    for seq_id in sorted(range(len(kinds)), key=lambda i: (-kinds[i], -work_s[i])):
        for kind in range(kinds[seq_id], len(rates.batch.sizes)):
            size, share = rates.batch.sizes[kind], held[seq_id, kind]
            until = busy_s.reshape(num_batches, -1, size).max(axis=2)
            full = tokens.reshape(num_batches, -1, size).max(axis=2) + share
            until[full > setting.device_tokens] = np.inf
            batch, place = divmod(int(until.argmin()), until.shape[1])
            if np.isfinite(until[batch, place]):
                where = batch, slice(place * size, (place + 1) * size)
                busy_s[where] += rates.alone_s[seq_id, kind]
                tokens[where] += share
                spots[seq_id] = Spot(batch, kind, place * size)
                break
        else:
            return None
    return spots
