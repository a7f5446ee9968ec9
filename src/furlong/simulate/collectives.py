"""Collectives of the ranks of a stage: unshard weights, reduce gradients, and passes in step.

    collective      starts when                     its ranks go on
    Unshard         all have come, links are free   at once; their next cell waits for it
    Reduce          all have come, links are free   at once
    pass in step    all have come                   when the slowest of them is through
    gathering pass  all have come                   when they are through themselves
    reducing pass   all have come                   when they are through themselves

A pass is in step where the plan gathers weights with every pass: then the n-th passes of all ranks
of a stage, whatever their chunks, are one collective. Else the first pass of a stage gathers its
weights, unless an Unshard does, and its last Backward adds gradients up: whoever comes to them
first waits, and so does the gradient that it has for the stage before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import repeat
from typing import Literal

from furlong.plan.passes import directions
from furlong.plan.values import Action, Backward, ChunkPlan, Forward, Reduce, Unshard

Collective = tuple[type[Action] | Literal["pass", "gathering", "reducing"], int]
"""The kind of a collective, and its stage. Every rank numbers its occurrences from 0."""


class Collectives:
    """The ranks that have come to each collective, and its end; writes the times of its actions."""

    def __init__(
        self,
        plan: ChunkPlan,
        compute_s: Callable[[Action, int], float],
        start_s: list[list[float]],
        stop_s: list[list[float]],
    ) -> None:
        self._plan = plan
        self._compute_s = compute_s
        self._start_s, self._stop_s = start_s, stop_s
        shared = _shared_stages(plan)
        self.joins = [_joins(plan, rank, shared) for rank in range(len(plan.actions))]
        """Per rank and action, the collective that it is part of."""
        self._come: dict[Collective, dict[int, int]] = defaultdict(dict)
        """Per collective, its ranks, each with how many occurrences it has come to."""
        for rank, joins in enumerate(self.joins):
            for key in joins:
                if key is not None:
                    self._come[key][rank] = 0
        self._waiting: dict[Collective, list[list[tuple[int, int, float]]]] = defaultdict(list)
        """Per collective and occurrence, the (rank, place in its list, time) that have come."""
        self.settled_s: dict[Collective, list[float]] = defaultdict(list)
        """Per collective, when each occurrence stops, as far as all have come."""
        self._link_free_s = [0.0] * len(plan.actions)

    def join(self, rank: int, index: int, now: float) -> tuple[Collective, int]:
        """Come to the collective of an action; the last rank to come settles its times."""
        key = self.joins[rank][index]
        assert key is not None
        occurrence = self._come[key][rank]
        self._come[key][rank] += 1
        waiting = self._waiting[key]
        if occurrence == len(waiting):
            waiting.append([])
        waiting[occurrence].append((rank, index, now))
        if len(waiting[occurrence]) == len(self._come[key]):
            self._settle(key, waiting[occurrence])
        return key, occurrence

    def _settle(self, key: Collective, joined: list[tuple[int, int, float]]) -> None:
        on_link = isinstance(key[0], type)
        start = max(max(at, self._link_free_s[one]) if on_link else at for one, _, at in joined)
        own_s = [self._compute_s(self._plan.actions[one][i], one) for one, i, _ in joined]
        stop = start + max(own_s)
        for (one, i, _), seconds in zip(joined, own_s, strict=True):
            # a link is in use to the end; a rank that is through with its pass only waits
            self._start_s[one][i], self._stop_s[one][i] = start, stop
            if on_link:
                self._link_free_s[one] = stop
            else:
                self._stop_s[one][i] = start + seconds
        self.settled_s[key].append(stop)


def _shared_stages(plan: ChunkPlan) -> frozenset[int]:
    """The stages that several ranks hold."""
    if len(plan.actions) == 1:
        return frozenset()
    held = [{a.stage for a in own if isinstance(a, Forward)} for own in plan.actions]
    counts = Counter(stage for stages in held for stage in stages)
    return frozenset(stage for stage, count in counts.items() if count > 1)


def _joins(plan: ChunkPlan, rank: int, shared: frozenset[int]) -> list[Collective | None]:
    actions = plan.actions[rank]
    joins: list[Collective | None] = [None] * len(actions)
    gathered = {action.stage for action in actions if isinstance(action, Unshard)}
    reducing: dict[int, int] = {}
    ways = directions(plan, rank) if plan.regathers or shared else repeat(None)
    for index, (action, way) in enumerate(zip(actions, ways, strict=False)):
        if isinstance(action, (Unshard, Reduce)):
            joins[index] = type(action), action.stage
        elif way and plan.regathers:
            joins[index] = "pass", action.stage
        elif way and action.stage in shared:
            if action.stage not in gathered:
                gathered.add(action.stage)
                joins[index] = "gathering", action.stage
            elif isinstance(action, Backward):
                reducing[action.stage] = index
    for stage, index in reducing.items():
        joins[index] = "reducing", stage
    return joins
