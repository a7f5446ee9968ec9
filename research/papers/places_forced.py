"""Consequences that a step of given seconds forces, as a linear program.

A sequence that is too long for one process, by memory or by the step, is shared. The slots that
share one wait for its all-to-alls or hide them behind attention of their own, and there is only so
much work that fits beside it. How many such slots there are is unknown: their work is bounded by
the seconds that the step leaves to each part of its passes, the others' by the slots that are left.

The variables: of each sequence the shares that are local on a slot without shared sequences, local
on a slot with some, and shared; the number of slots with shared ones; the seconds of each part.

    K sequences, Z sizes of places, P parts of passes, W processes
"""

from __future__ import annotations

from itertools import product
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack, vstack

from furlong.cost.seconds import Array
from papers.places_least import Least

_ROUNDING = 1e-6
_NEVER_S = 1e9
"""Seconds of a choice that is not allowed."""


def forced_s(least: Least, step_s: float) -> float:
    """Seconds that no step of at most `step_s` undercuts; infinite where there is no such step."""
    allowed = least.alone_s <= step_s
    if not allowed.any(axis=1).all() or least.even_s.sum() > step_s:
        return inf
    num_sequences, num_parts = len(allowed), len(least.even_s)
    aims = np.zeros((2, 3 * num_sequences + 1 + num_parts))
    aims[0, 3 * num_sequences] = 1  # the number of slots with shared sequences
    aims[1, 3 * num_sequences + 1 :] = 1  # the step
    num_shared = _least(aims[0], least, step_s, allowed, 0)
    if num_shared == inf:
        return inf
    # places that share have even numbers of slots
    return _least(aims[1], least, step_s, allowed, 2 * ceil((num_shared - _ROUNDING) / 2))


def _least(
    aim: Array, least: Least, step_s: float, allowed: NDArray[np.bool_], num_shared: int
) -> float:
    """The least value of an aim with at least so many slots with shared sequences; infinite where
    there is no solution."""
    num_sequences = len(allowed)
    rows, limits = _rows(least, step_s, allowed, num_shared)
    local, shared = allowed[:, 0].astype(float), allowed[:, 1:].any(axis=1).astype(float)
    num_slots = least.num_micro_batches * least.num_slots
    bounds = [(0.0, most) for most in (*local, *local, *shared)]
    bounds += [(num_shared, num_slots), *((part_s, inf) for part_s in least.even_s)]
    each = eye_array(num_sequences)
    rest = csr_array((num_sequences, len(aim) - 3 * num_sequences))
    found = linprog(
        aim, vstack([csr_array(np.hstack(row)) for row in rows]), np.concatenate(limits),
        hstack([each, each, each, rest]), np.ones(num_sequences), bounds, method="highs",
    )  # fmt: skip
    return float(found.fun) if found.status == 0 else inf


def _rows(
    least: Least, step_s: float, allowed: NDArray[np.bool_], num_shared: int
) -> tuple[list[list[Array]], list[Array]]:
    """Inequalities: blocks of coefficients in the order of the variables, and what they may add up
    to at most."""
    width, process_s = least.num_slots, least.process_s
    matrices_s, whole_s = least.matrices_s, least.matrices_s + least.attention_s
    exchanges_s, exposed_s = (
        np.where(allowed[:, 1:], own_s[..., 1:], _NEVER_S).min(axis=2, initial=_NEVER_S)
        for own_s in (least.exchanges_s, least.exposed_s)
    )
    moved_s, latency_s = whole_s + exchanges_s, least.latency_s[:, None]
    nothing, none, parts = 0 * whole_s, 0 * latency_s, np.eye(len(process_s))
    # any parts together have what the step leaves when the others take least
    some = np.array([*product((0, 1), repeat=len(process_s))][1:], float)
    others_s = (1 - some) @ least.even_s
    once_s = some @ (process_s + (least.num_micro_batches - 1) * least.floor_s)
    free_s, zeros = (step_s - others_s - once_s)[:, None], np.zeros((len(some), len(process_s)))
    rows = [
        # slots with shared sequences: exchanges behind attention, or the other way round
        [some @ nothing, some @ matrices_s, some @ moved_s, some @ latency_s - free_s, zeros],
        [some @ nothing, some @ whole_s, some @ whole_s, -free_s, zeros],
        # all slots
        [whole_s, matrices_s, moved_s, latency_s, -width * parts],
        [whole_s, whole_s, whole_s + exposed_s, none, -width * parts],
        # the step
        [nothing[:1], nothing[:1], nothing[:1], none[:1], np.ones((1, len(process_s)))],
    ]
    spread_s = -width * least.num_micro_batches * process_s
    limits = [zeros[:, 0], zeros[:, 0], spread_s, spread_s, np.array([step_s])]
    if least.num_micro_batches == 1:  # the other slots go through the same parts
        rows.append([whole_s, nothing, nothing, none, (num_shared - width) * parts])
        limits.append((num_shared - width) * process_s)
    return rows, limits
