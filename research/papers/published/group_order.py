"""The order in which a pipeline runs its groups of chunks: simple ones, and a search by simulation.

A pipeline fills with its first groups and drains with its last, and a long group among short ones
holds its neighbours up. No simple order is best for all batches, so a few of them are the start of
a bounded local search. Tokens and memory of each chunk stay as they are: only the moments change at
which graphs are held, so whoever searches asks whether an order still fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Literal

from furlong.cost.model import CostModel
from furlong.errors import UserError
from furlong.plan.plan import Action, ChunkPlan, Computing
from furlong.simulate.clock import time_actions
from papers.fits import fit

_MOST_TRIED = 64
"""Orders that a search times at most."""
_LEAST_TRIED = 8
"""Orders that it times however large the plan is."""
_MOST_ACTIONS = 200_000
"""Actions, of all ranks and all orders together, that it times above the least number."""

GroupOrder = Literal["as listed", "longest first", "shortest first", "longest inside", "searched"]
"""Ways to order groups: as who made them lists them; by falling or by rising seconds; short ones
first and last; the best that is found."""

Order = tuple[int, ...]
"""The indices of groups, as they run."""


def choose_order(
    plan: ChunkPlan,
    numbered: Sequence[range],
    lists: Callable[[Sequence[range]], Iterable[Sequence[Action]]],
    model: CostModel,
    wanted: GroupOrder,
    *,
    budget_bytes: int | None = None,
) -> Order:
    """The wanted order of the groups of one replica.

    `plan`: the replica's as its groups are listed, whose chunks have the numbers `numbered`;
    `lists` makes the lists of its ranks for groups in any order. `budget_bytes` of a device: a
    searched order fits, if the one that is listed does.
    """
    listed = tuple(range(len(numbered)))
    if wanted == "as listed" or len(listed) < 2:
        return listed
    costs = model.costs(plan)
    busy_s = [0.0] * len(plan.chunks)
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if isinstance(action, Computing):
                busy_s[action.chunk] += costs.compute_s(action, rank)
    group_s = [sum(busy_s[chunk] for chunk in group) for group in numbered]
    if wanted != "searched":
        return simple_order(group_s, wanted)

    def plan_of(order: Order) -> ChunkPlan:
        return replace(plan, actions=tuple(map(tuple, lists([numbered[i] for i in order]))))

    def fits(order: Order) -> bool:
        with suppress(UserError):
            return fit(plan_of(order), model, budget_bytes) > 0
        return False

    most = max(_LEAST_TRIED, min(_MOST_TRIED, _MOST_ACTIONS // sum(map(len, plan.actions))))
    return improve_order(
        group_s, lambda order: time_actions(plan_of(order), costs).duration_s, fits, max_tried=most
    )


def simple_order(group_s: Sequence[float], wanted: GroupOrder) -> Order:
    """Groups of `group_s` seconds each in one of the simple orders; equal ones as they come."""
    falling = tuple(sorted(range(len(group_s)), key=lambda group: -group_s[group]))
    match wanted:
        case "longest first":
            return falling
        case "shortest first":
            return falling[::-1]
        case "longest inside":
            return falling[::-2] + falling[len(falling) % 2 :: 2]
        case _:
            return tuple(range(len(group_s)))


def improve_order(
    group_s: Sequence[float],
    step_s: Callable[[Order], float],
    fits: Callable[[Order], bool] = lambda order: True,
    *,
    max_tried: int,
) -> Order:
    """The fastest of the orders that are tried and fit; the one that is listed where none is
    faster.

    `group_s`: seconds of each group, for the simple orders. `step_s`: seconds of a step in an
    order. The first of `max_tried` orders are the simple ones; the others come from the best so far
    by moving a group or swapping two, drawn by a fixed seed: equal questions have equal answers.
    """
    simple: tuple[GroupOrder, ...] = (
        "as listed", "longest first", "shortest first", "longest inside"
    )  # fmt: skip
    starts = [simple_order(group_s, wanted) for wanted in simple]
    best = starts[0]
    found: dict[Order, float] = {}
    draws = Random(0)
    for number in range(4 * max_tried):
        order = starts[number] if number < len(starts) else _neighbour(best, draws)
        if order in found:
            continue
        if len(found) == max_tried:
            break
        found[order] = step_s(order)
        if found[order] < found[best] * (1 - 1e-9) and fits(order):
            best = order
    return best


def _neighbour(order: Order, draws: Random) -> Order:
    """The order with one group moved, or with two swapped."""
    changed = list(order)
    a, b = (draws.randrange(len(order)) for _ in range(2))
    if draws.random() < 0.5:
        changed.insert(b, changed.pop(a))
    else:
        changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)
