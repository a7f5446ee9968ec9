"""One search over every planner: dials pruned by lower bounds, ranked by simulation.

    found = search(Problem(seq_lens=lens, model=model, num_devices=64), PUBLISHED)
    found.best.plan, found.best.step_s, found.others[0].step_s

Best first, with bounds. The work of the busiest replica, and all its tokens in one chunk, bound
every plan of a layout: layouts are opened in that order. Its chunks on its slowest stage bound
every way to schedule them: ladders are tried in that order, until the bound reaches the best step.
Its simulated time is the last: only dials below the best step are planned for the whole batch.
Work is bounded by counts, never by a clock: equal problems have equal answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from furlong.errors import PlanError, UserError
from furlong.plan.plan import Layout
from furlong.planners.question import DoesNotFitError
from papers.fits import fit
from papers.published.bounds import stage_bounds_s
from papers.published.build import replica_model
from papers.published.catalogue import SHARING_WHOLE, Method
from papers.published.dials import Dials, Ladder
from papers.published.late import improve
from papers.published.pools import pool_dials
from papers.published.problem import Found, Problem, nothing_fits
from papers.published.replicas import Outcome, ReplicaPlans
from papers.published.room import Room, rooms_of

_LEAST_TOKENS = (1024, 256, 64)
"""Least tokens of a chunk per device: smaller ones are tried where none of those before fits, or
the smallest of them is the best."""
_BETWEEN = 0.98
"""Least share of the bounds of powers of two that numbers between them may have."""

QueueEntry = tuple[float, int, Room | Ladder]
"""An entry of a queue: a bound of the step, the place among equals, what it is a bound of."""


class _SlowerError(Exception):
    """No rung of a ladder from here on is faster than the best step."""


def search(problem: Problem, methods: Mapping[str, Method]) -> Found:
    """The fastest plan of `problem` over all dials of `methods`.

    Raises ConfigError where no plan fits: by how much the nearest one fails, what to change.
    """
    state, below = _Search(problem, methods), None
    state.plan_pools()  # first, for they are often the fastest: what cannot beat them is left out
    for least in _LEAST_TOKENS:
        state.run(least, below)
        if not state.wants_smaller(least):
            break
        below = least
    state.improve_best()
    return state.found()


class _Search:
    def __init__(self, problem: Problem, methods: Mapping[str, Method]) -> None:
        self._problem = problem
        self._methods = methods
        self._replicas = ReplicaPlans(problem.seq_lens, problem.model, problem.limit_bytes)
        self._bounds_s: dict[Dials, float] = {}
        self._rooms_s: dict[Room, float] = {}
        self._seen: set[Dials] = set()
        self._too_large: dict[Layout, DoesNotFitError | None] = {}
        """Where not even one token fits, and why; None where it does."""
        self._outcomes: list[Outcome] = []
        self._tried: list[tuple[float, Dials]] = []
        """Seconds of the busiest replica of the dials that fit it."""
        self._refused: list[UserError | PlanError] = []
        self._slower: list[tuple[float, Dials]] = []

    def run(self, least: int, below: int | None) -> None:
        """Everything with chunks of at least `least` and less than `below` tokens per device."""
        rooms: list[QueueEntry] = []
        numbers = count()
        for room in rooms_of(self._problem, least=least, below=below):
            heappush(rooms, (self._replicas.work_s(room.dials("any")), next(numbers), room))
        # InfiniPipe's chunks are known only when it has planned: it has to beat all others' best
        self._walk(self._walk(rooms, numbers), numbers)

    def _walk(self, queue: list[QueueEntry], numbers: Iterator[int]) -> list[QueueEntry]:
        """Best first, until a bound reaches the best step; returns the ladders that are to come
        after all others."""
        last: list[QueueEntry] = []
        while queue:
            bound_s, _, item = heappop(queue)
            if bound_s >= self._best_s:
                break
            if not isinstance(item, Room):
                if (own_s := self._sliced_s(item[0])) > bound_s:
                    heappush(queue, (own_s, next(numbers), item))
                    continue
                self._climb_down(item)
            elif item not in self._rooms_s:
                self._rooms_s[item] = max(bound_s, self._replicas.least_s(item.dials("any")))
                heappush(queue, (self._rooms_s[item], next(numbers), item))
            elif (error := self._lacks(item)) is not None:
                offered = next(self._ladders(item), None)
                self._refused += [error] if offered else []
            else:
                for ladder in self._ladders(item):
                    if ladder[0].walk == "elastic":
                        own_s = max(bound_s, self._elastic_s(item, ladder[0]))
                        heappush(last, (own_s, next(numbers), ladder))
                        continue
                    own_s = max(bound_s, self._bound_s(ladder[0]))
                    heappush(queue, (own_s, next(numbers), ladder))
        return last

    def wants_smaller(self, least: int) -> bool:
        """Whether chunks smaller than `least` tokens per device may be better."""
        if not self._outcomes:
            return bool(self._refused)
        timed = [*self._slower, *((outcome.step_s, outcome.dials) for outcome in self._outcomes)]
        # the very best may have no size of chunks
        sized = sorted((s, d.size, d.layout.sp) for s, d in timed if d.size and d.cuts_by_size)
        return any(size == least * sp for _, size, sp in sized[:1])

    def plan_pools(self) -> None:
        """Tries whole sequences on places of one pool of all devices."""
        for dials in pool_dials(self._problem, self._methods.values()):
            try:
                self._outcomes.append(self._replicas.plan_whole(dials))
                self._tried.append((self._outcomes[-1].step_s, dials))
            except (UserError, PlanError) as error:
                self._refused.append(error)

    def improve_best(self) -> None:
        """Gives the plans near the fastest the dials that are tried late."""
        improve(self._outcomes, [*self._slower, *self._tried], self._replicas)

    def found(self) -> Found:
        if not self._outcomes:
            raise nothing_fits(self._problem, self._refused)
        best, *others = sorted(self._outcomes, key=lambda outcome: outcome.step_s)
        return Found(best, tuple(others))

    @property
    def _best_s(self) -> float:
        return min((outcome.step_s for outcome in self._outcomes), default=float("inf"))

    def _ladders(self, room: Room) -> Iterator[Ladder]:
        """The ladders that were not there yet."""
        for method in self._methods.values():
            for rungs in method(room) if not room.gathers or method in SHARING_WHOLE else ():
                if not rungs or rungs[0] in self._seen:
                    continue
                self._seen.add(rungs[0])
                if rungs[0].cut in ("packed", "placed") and rungs[0].size is None:
                    rungs = self._replicas.sized(rungs)
                if rungs:
                    yield rungs

    def _lacks(self, room: Room) -> DoesNotFitError | None:
        """The error of a layout in which not even one token fits beside the state: no plan does."""
        if room.layout not in self._too_large:
            self._too_large[room.layout] = None
            try:
                self._replicas.require_room(room.dials("any"))
            except DoesNotFitError as error:
                self._too_large[room.layout] = error
        return self._too_large[room.layout]

    def _sliced_s(self, dials: Dials) -> float:
        """The bound of slices as they are cut, which takes longer to make than that of whole
        sequences; 0 of all else."""
        return self._bound_s(dials, cut=True) if dials.cut == "slices" else 0.0

    def _bound_s(self, dials: Dials, *, cut: bool = False) -> float:
        """A bound of all rungs below: what the busiest replica computes on its slowest stage, with
        nothing waited for but the pipeline's fill and drain. `cut`: of slices as they are."""
        key, uncut = dials.chunks_only(), dials.cut == "slices" and not cut
        if uncut:  # however many slices there are: they take no less than whole sequences
            key = replace(key, slices=1, by_work=False)
        if key not in self._bounds_s:
            lens, chunks = self._replicas.busiest_chunks(key)
            self._bounds_s[key] = max(
                stage_bounds_s(
                    chunks, lens, key.stages, key.layout.sp,
                    replica_model(key, self._problem.model),
                    recompute_layers=key.recompute_layers, fills=not uncut,
                )
            )  # fmt: skip
        return self._bounds_s[key]

    def _elastic_s(self, room: Room, dials: Dials) -> float:
        """About a bound of InfiniPipe, whose numbers of slices lie between powers of two."""
        alike = (room.dials("any", cut=dials.cut, hybrid=True, size=size) for size in room.sizes)
        return _BETWEEN * min(map(self._bound_s, alike), default=0.0)

    def _climb_down(self, ladder: Ladder) -> None:
        """To the highest rung that fits on all replicas, or is known to be no better."""
        while ladder:
            try:
                place = self._highest(ladder)
            except _SlowerError:
                return
            if place is None:
                return
            try:
                self._outcomes.append(self._replicas.plan_whole(ladder[place]))
                return
            except (UserError, PlanError) as error:
                self._refused.append(error)
                if isinstance(error, PlanError):
                    return  # replicas that cannot go together, whatever is kept
            ladder = ladder[place + 1 :]

    def _highest(self, ladder: Ladder) -> int | None:
        """The place of the first rung that fits the busiest replica, by bisection, since all below
        one that fits do. Raises _SlowerError where a rung above it is no faster than the best."""
        step_s = self._try(ladder[0])
        low, high = 0, 0 if step_s is not None else len(ladder) - 1
        if step_s is None:
            if not high or self._try(ladder[high], must_beat=False) is None:
                return None
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._try(ladder[middle]) is None else (low, middle)
            step_s = self._try(ladder[high])
        assert step_s is not None
        self._tried.append((step_s, ladder[high]))
        return high

    def _try(self, dials: Dials, *, must_beat: bool = True) -> float | None:
        """Seconds of the busiest replica's plan, where it fits. `must_beat`: raises _SlowerError
        where they are no fewer than the best step's: all rungs below take no less."""
        beat_s = self._best_s if must_beat else inf
        try:
            plan, step_s = self._replicas.plan_busiest(dials, beat_s)
            if step_s >= beat_s:
                self._slower.append((step_s, dials))
                raise _SlowerError
            fit(plan, replica_model(dials, self._problem.model), self._problem.limit_bytes)
            return step_s
        except (UserError, PlanError) as error:
            self._refused.append(error)
            return None
