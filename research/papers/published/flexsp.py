"""FlexSP: sequence-parallel groups of different sizes side by side; a baseline.

FlexSP (Wang et al., ASPLOS 2025, as InfiniPipe describes it) divides the devices anew for every
micro-batch: long sequences on large groups, short ones on small groups that stay within a node,
under ZeRO-3 over all devices. Its groups of one micro-batch are disjoint places of one pool, and
all wait for the slowest. It solves an integer program per micro-batch; here every way to divide the
devices into powers of two is tried, and the longest sequence goes first to the group that would be
done with it earliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from furlong.cost.seconds import Array
from furlong.planners.places import Division, Setting, Spot
from papers.published.fastest import plan_fastest

_AT_A_TIME = 32
"""Partitions that are filled together."""
_MOST_PARTITIONS = 256
"""Partitions that are filled for a micro-batch: all of up to 32 devices, of larger pools those of
the least bounds."""
_MOST_GROUPS = 64
"""Groups side by side; beyond as many devices the smallest group is larger than one."""


def flexsp_divisions(setting: Setting, count: int) -> Iterator[Division]:
    """The batch in micro-batches of similar lengths (as FlexSP cuts it), and of lengths as mixed as
    possible, each divided over disjoint groups; only those that fit."""
    batch, seq_lens = setting.batch, setting.batch.seq_lens
    order = sorted(range(len(seq_lens)), key=lambda seq_id: -seq_lens[seq_id])
    mixed = [order[first::count] for first in range(count)]
    exponents = _partitions(batch.pool_size)
    partitions = np.where(exponents < 0, -1, np.searchsorted(batch.sizes, 2.0**exponents))
    for cut in [mixed] if count == 1 else [_runs(order, seq_lens, count), mixed]:
        if any(
            sum(seq_lens[i] for i in own) > setting.device_tokens * batch.pool_size for own in cut
        ):
            continue
        spots: dict[int, Spot] = {}
        for number, own in enumerate(cut):
            spots |= _divide(own, number, setting, partitions)
        if len(spots) == len(seq_lens):
            yield Division(setting, count, spots)


plan_flexsp = partial(plan_fastest, divide=flexsp_divisions)
"""`model`: with ZeRO-3 for FlexSP's own way."""


def _runs(order: Sequence[int], seq_lens: Sequence[int], count: int) -> list[list[int]]:
    """`order` cut into at most `count` runs of about equal tokens."""
    total = sum(seq_lens)
    runs: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for seq_id in order:
        middle = before + seq_lens[seq_id] / 2
        runs[min(count - 1, int(middle * count / total))].append(seq_id)
        before += seq_lens[seq_id]
    return [run for run in runs if run]


def _divide(
    seq_ids: Sequence[int],
    micro_batch: int,
    setting: Setting,
    partitions: NDArray[np.int64],
) -> dict[int, Spot]:
    """The spots of one micro-batch whose sequences come by falling length, for the best of the
    partitions (A of them, each of up to B groups); none where no partition has room.

    Partitions are tried in the order of their bounds, a few at a time, until no bound is better.
    """
    own, sizes = list(seq_ids), np.array(setting.batch.sizes)
    held = setting.held(setting.batch.added[own].transpose(2, 0, 1))
    alone_s = np.where(setting.fits[own], setting.alone_s[own], inf)
    bounds_s = _bounds_s(alone_s, setting, partitions)
    by_bound = bounds_s.argsort(kind="stable")[:_MOST_PARTITIONS]
    best_s, best, chosen = inf, 0, np.zeros(0, dtype=int)
    for start in range(0, len(by_bound), _AT_A_TIME):
        rows = by_bound[start : start + _AT_A_TIME]
        if bounds_s[rows[0]] > best_s * (1 + 1e-9):
            break
        slowest_s, choices = _fill(alone_s, held, setting, partitions[rows])
        least = min(range(len(rows)), key=lambda i: (slowest_s[i], rows[i]))
        if (slowest_s[least], rows[least]) < (best_s, best):
            best_s, best, chosen = float(slowest_s[least]), int(rows[least]), choices[:, least]
    if best_s == inf:
        return {}
    kind = partitions[best]
    firsts = [0, *accumulate(sizes[kind[kind >= 0]].tolist())]
    return {
        seq_id: Spot(micro_batch, int(kind[choice]), firsts[choice])
        for seq_id, choice in zip(seq_ids, chosen.tolist(), strict=True)
    }


def _bounds_s(alone_s: Array, setting: Setting, partitions: NDArray[np.int64]) -> Array:
    """(A,) seconds that the slowest group of each partition takes at least: as long as any sequence
    where it is done first, and as all of them, evenly spread, where they keep fewest devices busy.

    `alone_s`: (K, Z) of each sequence on each size, infinite where it has no room.
    """
    sizes = np.array(setting.batch.sizes)
    counts = (partitions[:, :, None] == np.arange(len(sizes))).sum(axis=1)
    kinds, of_partition = np.unique(counts > 0, axis=0, return_inverse=True)
    longest_s, busy_s = np.zeros((2, len(kinds)))
    for row, own in enumerate(kinds):
        longest_s[row] = (setting.fixed_s + alone_s)[:, own].min(axis=1).max()
        busy_s[row] = (alone_s * sizes)[:, own].min(axis=1).sum()
    spread_s = (busy_s[of_partition] + counts @ (sizes * setting.fixed_s)) / setting.batch.pool_size
    bounds_s: Array = np.maximum(longest_s[of_partition], spread_s)
    return bounds_s


def _fill(
    alone_s: Array, held: Array, setting: Setting, partitions: NDArray[np.int64]
) -> tuple[Array, NDArray[np.int64]]:
    """(A,) seconds of the slowest group of each partition, infinite where there is no room, and
    (K, A) the group of each sequence: the one that is done with it earliest.

    `alone_s`, `held`: (K, Z) seconds of each sequence on each size, tokens that it takes up.
    """
    exists = partitions >= 0
    kind = np.maximum(partitions, 0)
    room = np.where(exists, float(setting.device_tokens), -1.0)
    busy_s = np.where(exists, setting.fixed_s[kind], inf)
    rows = np.arange(len(partitions))
    choices = np.zeros((len(held), len(partitions)), dtype=int)
    for place, (own_s, tokens) in enumerate(zip(alone_s, held, strict=True)):
        after = room - tokens[kind]
        done_s = np.where(after >= 0, busy_s + own_s[kind], inf)
        choices[place] = choice = done_s.argmin(axis=1)
        # a partition without room keeps an infinite time from here on
        busy_s[rows, choice] = done_s[rows, choice]
        room[rows, choice] = after[rows, choice]
    return np.where(exists, busy_s, 0.0).max(axis=1), choices


def _partitions(num_devices: int) -> NDArray[np.int64]:
    """(A, B) every way to divide the devices into powers of two, the largest group first, as
    exponents; -1: no group. Larger pools leave out groups of one, of two, ..."""
    least = 0
    while num_devices >> least > _MOST_GROUPS:
        least += 1

    def divide(rest: int, exponent: int) -> Iterator[tuple[int, ...]]:
        if not exponent:
            yield (least,) * rest
            return
        for count in range(rest >> exponent, -1, -1):
            for others in divide(rest - (count << exponent), exponent - 1):
                yield (exponent + least,) * count + others

    units = num_devices >> least
    largest = (num_devices & -num_devices).bit_length() - 1
    found = list(divide(units, max(0, largest - least)))
    table = np.full((len(found), units), -1)
    for row, exponents in enumerate(found):
        table[row, : len(exponents)] = exponents
    return table
