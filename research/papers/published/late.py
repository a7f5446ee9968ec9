"""Late effort of the search: dials that only plans near the fastest get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from furlong.errors import PlanError, UserError
from papers.published.dials import Dials
from papers.published.replicas import Outcome, ReplicaPlans

_IMPROVED_LATE: tuple[tuple[str, str], ...] = (("balance", "time"), ("group_order", "searched"))
"""Dials, and values of them that are tried late, one after the other."""
_NEAR = 1.1
"""Times of the fastest step up to which a plan may become the fastest: in 200 random cases no order
of groups gained more than 8.5 %."""
_MOST_OF_A_METHOD = 2
_MOST = 6
"""Plans that get a dial."""


def improve(
    outcomes: list[Outcome], tried: Sequence[tuple[float, Dials]], replicas: ReplicaPlans
) -> None:
    """Deals the replicas of the fastest plans by the time of their plans, then searches the order
    of the groups of the fastest, where their methods allow it; adds what is faster to `outcomes`.

    `tried`: seconds of the busiest replica, with the dials.
    """
    for name, value in _IMPROVED_LATE:
        change: dict[str, Any] = {name: value}
        asked = {dials.planned_first() for _, dials in tried if getattr(dials, name) == value}
        for step_s, dials in _near(outcomes, tried, asked):
            with suppress(UserError, PlanError):  # a replica that has got more does not fit
                better = replicas.plan_improved(replace(dials, **change))
                outcomes += [better] if better.step_s < step_s else []


def _near(
    outcomes: Sequence[Outcome], tried: Iterable[tuple[float, Dials]], asked: set[Dials]
) -> list[tuple[float, Dials]]:
    """The fastest of the plans whose dials, as they are planned first, are asked for: a few of each
    method, for a method's second may become its fastest."""
    planned = {outcome.dials: outcome.step_s for outcome in outcomes}
    first = {dials.planned_first(): step_s for step_s, dials in tried}
    timed = {dials: step_s for dials, step_s in first.items() if dials not in planned} | planned
    found: list[tuple[float, Dials]] = []
    of_method = Counter[str]()
    least_s = min(planned.values(), default=0.0)
    for dials, step_s in sorted(timed.items(), key=lambda pair: pair[1]):
        if step_s > _NEAR * least_s or len(found) == _MOST:
            break
        if dials.planned_first() in asked and of_method[dials.method] < _MOST_OF_A_METHOD:
            of_method[dials.method] += 1
            found.append((step_s, dials))
    return found
