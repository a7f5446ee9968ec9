"""Fit the cost model's rates to the measured seconds of actions, such as the forward of a chunk.

The seconds of an action are linear in the inverse rates. So each rate has a column in a linear
system: the seconds that the cost model predicts for each action with this inverse rate set to 1 and
the others to 0. Where kernel launches overlap with work, an action takes the longer of their two
times; which one is longer is decided again after each fit. Fits minimize the squared relative
error, so that small values count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from furlong.cost.machine import CALLS, EFFICIENCIES, Efficiency, Machine
from furlong.cost.model import CostModel
from furlong.cost.seconds import Array
from furlong.plan.passes import passes
from furlong.plan.plan import ChunkPlan

_LAUNCHES = ("pass_launch_s", "layer_launch_s", "slice_launch_s")
_BYTES = "activation_bytes_per_s"
_NO_COST = Efficiency(best=inf, half_tokens=0.0)
_ROUNDS = 8
_SHORTEST_S = 2e-4
"""Shorter actions are bookkeeping, which the cost model leaves out."""


@dataclass(frozen=True)
class Sample:
    """One plan run on one model, with the seconds of each action."""

    model: CostModel
    plan: ChunkPlan
    seconds: tuple[float, ...]


def fit_rates(samples: Sequence[Sample], spec: Machine) -> dict[str, Any]:
    """Fit rates of `Machine` to samples, and return them as its fields.

    `spec` gives the peak and the fields that are not rates. Raises ValueError if the samples do not
    determine all terms.
    """
    # a kernel that works in tiles is as efficient with few tokens, except for what tiles waste
    saturating = EFFICIENCIES[:1] if spec.tile_tokens else EFFICIENCIES
    names = [*EFFICIENCIES, *(f"{name} half" for name in saturating), *_LAUNCHES, _BYTES]
    if not spec.tile_tokens:  # a CPU has one kernel for all calls
        # extra time of causal squares over blocks without a mask, which are at least as fast
        names += [f"{name} {call}" for name in EFFICIENCIES[1:] for call in CALLS[1:]]
    table, measured = _table(samples, spec, names)
    found = relative_fit(table, measured)
    if spec.hides_launches:
        headless = []
        for sample in samples:
            shape = replace(sample.model.shape, vocab_size=0)
            headless.append(replace(sample, model=replace(sample.model, shape=shape)))
        stages, _ = _table(headless, spec, names)
        found = _fit_hidden(stages, table - stages, measured, found, names)
    return _fields(dict(zip(names, found.tolist(), strict=True)))


def _fit_hidden(
    stages: Array, heads: Array, measured: Array, found: Array, names: Sequence[str]
) -> Array:
    """Return coefficients that are fitted to measured seconds, on a device where kernel launches
    overlap with work.

    An action then takes the time of its launches or of its work in the layers, whichever is longer,
    and the time of the head. `stages`, `heads`: the seconds (actions, names) in the layers and in
    the head for coefficients of 1. `found`: the coefficients to begin with.
    """
    is_work = np.array([name not in _LAUNCHES for name in names])
    for _ in range(_ROUNDS):
        launched = stages[:, ~is_work] @ found[~is_work] > stages[:, is_work] @ found[is_work]
        longer = stages.copy()
        longer[np.ix_(launched, is_work)] = 0.0
        longer[np.ix_(~launched, ~is_work)] = 0.0
        found = relative_fit(longer + heads, measured)
    return found


def _table(samples: Sequence[Sample], spec: Machine, names: Sequence[str]) -> tuple[Array, Array]:
    """Return the linear system to which rates are fitted: the predicted seconds (actions, names)
    for inverse rates of 1, and the measured seconds (actions,). Only actions that compute are in
    it, without the shortest ones. Raises ValueError if there are fewer actions than rates."""
    rows, measured = [], []
    for sample in samples:
        columns: dict[str, Array] = {}
        for term in names:
            name, _, more = term.partition(" ")
            changed = {"": {}, "half": {"half_tokens": 1.0}}.get(more, {more: 0.5})
            columns[term] = _seconds(sample, _only(spec, name, **changed))
            columns[term] -= columns[name] if more else 0.0
        for what, seconds, *row in zip(
            passes(sample.plan, 0), sample.seconds, *(columns[n] for n in names), strict=True
        ):
            if what.computes != "nothing" and seconds >= _SHORTEST_S:
                rows.append(row)
                measured.append(seconds)
    if len(rows) < len(names):
        raise ValueError(f"{len(rows)} measured actions for {len(names)} rates")
    return np.array(rows), np.array(measured)


def _only(spec: Machine, name: str, **changed: float) -> Machine:
    """Return a machine on which only the term `name` takes time, at rate 1; `changed`: fields of
    its `Efficiency`."""
    free: dict[str, Any] = dict.fromkeys(EFFICIENCIES, _NO_COST)
    free |= dict.fromkeys(_LAUNCHES, 0.0) | {_BYTES: inf, "peak_flops_per_s": 1.0}
    if name in EFFICIENCIES:
        free["peak_flops_per_s"] = spec.peak_flops_per_s
        free[name] = Efficiency(**{"best": 1.0, "half_tokens": 0.0} | changed)
    else:
        free[name] = 1.0
    return replace(spec, **free)


def _seconds(sample: Sample, spec: Machine) -> Array:
    costs = replace(sample.model, hardware=spec).costs(sample.plan)
    return np.array([costs.compute_s(action, 0) for action in sample.plan.actions[0]])


def _fields(found: Mapping[str, float]) -> dict[str, Any]:
    """Return fields of `Machine` from inverse rates by name."""
    fields: dict[str, Any] = {name: found[name] for name in _LAUNCHES}
    # if bytes cost nothing, set inf: the rate in the spec would add to what was fitted
    fields[_BYTES] = 1 / found[_BYTES] if found[_BYTES] > 0 else inf
    for name in EFFICIENCIES:
        each, half = found[name], found.get(f"{name} half", 0.0)
        if each == 0:
            raise ValueError(f"the measured actions do not tell the rate of {name} from a cost"
                             " per call")  # fmt: skip
        each = max(1.0, each)  # noise may make a few short calls seem faster than the peak
        shares = {call: each / (each + found.get(f"{name} {call}", 0.0)) for call in CALLS[1:]}
        fields[name] = Efficiency(best=1 / each, half_tokens=half / each, **shares)
    return fields


def fit_memory(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return non-negative coefficients of the cost model's memory terms, fitted to measured plans.

    The squares of the errors, relative to the measured bytes, are minimized. A row per plan has
    these columns: the measured bytes; the measured bytes minus the bytes that the cost model counts
    exactly; and for each coefficient, the bytes that it adds if it is 1.
    """
    table = np.array(rows)
    lacking = np.maximum(table[:, 1], 0.0) / table[:, 0]
    found: list[float] = _nonnegative(table[:, 2:] / table[:, :1], lacking).tolist()
    return found


def relative_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the non-negative (slope, constant) that minimize the sum of
    ((slope * x + constant) / y - 1)^2, for y > 0 and at least two different xs."""
    slope, constant = relative_fit(np.stack([xs, np.ones(len(xs))], axis=1), np.array(ys))
    return float(slope), float(constant)


def relative_fit(table: Array, ys: Array) -> Array:
    """Return non-negative c (n,) that minimize the squares of table (m, n) @ c / ys (m,) - 1."""
    return _nonnegative(table / ys[:, None], np.ones(len(ys)))


def _nonnegative(table: Array, targets: Array) -> Array:
    """Return non-negative c (n,) that minimize the squares of table (m, n) @ c - targets (m,)."""
    from scipy.optimize import nnls  # here, since the import takes half a second

    # columns of equal scale keep the solver's tolerance meaningful
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    solution: Array = nnls(table / scale, targets)[0] / scale
    return solution
