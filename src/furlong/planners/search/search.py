"""One search over every planner: dials pruned by lower bounds, ranked by simulation.

    found = search(Problem(seq_lens=lens, model=model, num_devices=64), SEARCHED)
    found.best.plan, found.best.step_s, found.others[0].step_s

Best first, with bounds. The work of the busiest replica, and all its tokens in one chunk, bound
every plan of a layout: layouts are opened in that order. Its chunks on its slowest stage bound
every way to schedule them: ladders are tried in that order, until the bound reaches the best step.
Its simulated time is the last: only dials below the best step are planned for the whole batch.
Work is bounded by counts, never by a clock: equal problems have equal answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, product

from furlong.cost.memory.training import ZeroStage
from furlong.errors import PlanError, UserError
from furlong.plan.values import ChunkPlan
from furlong.planners.budget import DoesNotFitError
from furlong.planners.chunks.micro_batches import fitting_tokens
from furlong.planners.infinipipe.plan import NotFasterError
from furlong.planners.layout import Layout, cut_layers, layouts, mean_attended_keys
from furlong.planners.search.bounds import least_s, stage_bounds_s
from furlong.planners.search.build import groups_of, replica_model
from furlong.planners.search.catalogue import Method
from furlong.planners.search.dials import Dials, Ladder
from furlong.planners.search.problem import Found, Problem, Refusal, Trial, nothing_fits
from furlong.planners.search.replicas import Outcome, Replicas
from furlong.planners.search.room import Room, chunk_sizes, stage_heights, ways_to_deal, within
from furlong.simulate.clock import time_actions

_LEAST_TOKENS = (1024, 256, 64)
"""Of a chunk per device: smaller ones are tried where none of those before fits, or the smallest of
them is the best."""
_DEALT_BY_TIME = 4
"""Plans whose replicas are dealt again by the time of their plans: those of least bounds."""


Entry = tuple[float, int, Room | Ladder]
"""Of a queue: a bound of the step, the place among equals, what it is a bound of."""


def search(
    problem: Problem, methods: Mapping[str, Method], *, tell: Callable[[str], None] | None = None
) -> Found:
    """The fastest plan of `problem` over all dials of `methods`.

    `tell` is called with words for how far it is. Raises ConfigError where no plan fits: by how
    much the nearest one fails, what to change; NothingOfferedError where there is none to try.
    """
    state = _Search(problem, methods, tell or (lambda words: None))
    below = None
    for least in _LEAST_TOKENS:
        state.run(least, below)
        if "size" in problem.given or not state.wants_smaller(least):
            break
        below = least
    state.deal_by_time()
    return state.found()


class _Search:
    def __init__(
        self, problem: Problem, methods: Mapping[str, Method], tell: Callable[[str], None]
    ) -> None:
        self._problem = problem
        self._methods = methods
        self._tell = tell
        self._started_s = time.monotonic()
        self._replicas = Replicas(problem.seq_lens, problem.model, problem.limit_bytes)
        self._bounds_s: dict[Dials, float] = {}
        self._capacities: dict[tuple[Layout, ZeroStage, tuple[int, ...]], int] = {}
        self._rooms_s: dict[Room, float] = {}
        self._seen: set[Dials] = set()
        self._too_large: dict[tuple[Layout, ZeroStage], DoesNotFitError] = {}
        self._outcomes: list[Outcome] = []
        self._trials: list[Trial] = []
        self._refused: list[Refusal] = []
        self._num_pruned = 0
        self._num_rooms = 0

    def run(self, least: int, below: int | None) -> None:
        """Everything with chunks of at least `least` and less than `below` tokens per device."""
        rooms: list[Entry] = []
        numbers = count()
        for bound_s, room in self._rooms(least, below):
            heappush(rooms, (bound_s, next(numbers), room))
        last = self._walk(rooms, numbers)
        # InfiniPipe's chunks are known only when it has planned: it has to beat all others' best
        self._walk(last, numbers)

    def _walk(self, queue: list[Entry], numbers: Iterator[int]) -> list[Entry]:
        """Best first, until a bound reaches the best step; returns the ladders that are to come
        after all others."""
        last: list[Entry] = []
        while queue:
            bound_s, _, item = heappop(queue)
            if bound_s >= self._best_s:
                left = [other for _, _, other in (*queue, (bound_s, 0, item))]
                self._num_pruned += sum(len(one) for one in left if not isinstance(one, Room))
                break
            if not isinstance(item, Room):
                self._tell(f"{len(self._trials)} tried, {len(queue)} ways to cut chunks left")
                self._climb_down(item)
            elif item not in self._rooms_s:
                self._rooms_s[item] = max(bound_s, self._room_s(item))
                heappush(queue, (self._rooms_s[item], next(numbers), item))
            else:
                for ladder in self._ladders(item):
                    if ladder[0].walk == "elastic":
                        heappush(last, (bound_s, next(numbers), ladder))
                        continue
                    own_s = max(bound_s, self._bound_s(ladder[0]))
                    heappush(queue, (own_s, next(numbers), ladder))
        return last

    def wants_smaller(self, least: int) -> bool:
        """Whether chunks smaller than `least` tokens per device may be better."""
        if not self._outcomes:
            return bool(self._refused)
        dials = min(self._outcomes, key=lambda outcome: outcome.step_s).dials
        return dials.size == least * dials.layout.sp

    def deal_by_time(self) -> None:
        """Deals the replicas of the most promising plans by the time of their plans."""
        by_time = [t for t in self._trials if t.dials.balance == "time"]
        for trial in sorted(by_time, key=lambda trial: trial.bound_s)[:_DEALT_BY_TIME]:
            with suppress(UserError, PlanError):  # a replica that has got more does not fit
                self._outcomes.append(self._replicas.plan_by_time(trial.dials))

    def found(self) -> Found:
        if not self._outcomes:
            raise nothing_fits(self._problem, self._refused, offered=self._num_rooms == 0)
        best, *others = sorted(self._outcomes, key=lambda outcome: outcome.step_s)
        return Found(
            best=best,
            others=tuple(others),
            trials=tuple(sorted(self._trials, key=lambda trial: trial.bound_s)),
            refused=tuple(self._refused),
            num_pruned=self._num_pruned,
            seconds=time.monotonic() - self._started_s,
        )

    @property
    def _best_s(self) -> float:
        return min((outcome.step_s for outcome in self._outcomes), default=float("inf"))

    def _rooms(self, least: int, below: int | None) -> Iterator[tuple[float, Room]]:
        """Every layout, way to deal and ZeRO stage, and a bound from the work alone."""
        problem, lens = self._problem, self._problem.seq_lens
        shape, given = problem.model.shape, problem.given
        mean_keys, longest = mean_attended_keys(lens), max(lens)
        cuts: dict[int, tuple[int, ...]] = {}
        for layout in layouts(
            problem.num_devices, shape, dp=problem.dp, sp=problem.sp, pp=problem.pp,
            tp_size=problem.model.training.tp_size, idle=True,
        ):  # fmt: skip
            if layout.dp > len(lens):
                continue
            if layout.pp not in cuts:
                cuts[layout.pp] = cut_layers(shape, layout.pp, mean_keys)
            number = given.get("num_retained")
            sizes = chunk_sizes(layout, longest, least=least, below=below)
            for zero, balance in product(self._zeros(layout), ways_to_deal(layout, len(lens))):
                room = Room(
                    layout=layout, stages=cuts[layout.pp], zero=zero, balance=balance,
                    longest_tokens=longest, tiers=problem.tiers,
                    sizes=within(sizes, given.get("size")),
                    heights=within(stage_heights(shape.num_layers), given.get("stage_layers")),
                    num_retained=None if number is None else int(str(number)),
                )  # fmt: skip
                self._num_rooms += 1
                yield self._replicas.work_s(room.dials("any")), room

    def _room_s(self, room: Room) -> float:
        """A bound of all its plans, from all tokens of the busiest replica."""
        dials = room.dials("any")
        lens, model = self._replicas.busiest(dials), replica_model(dials, self._problem.model)
        return least_s(lens, room.stages, room.layout.sp, model)

    def _zeros(self, layout: Layout) -> tuple[ZeroStage, ...]:
        """Where nobody shares the state, one of them."""
        zeros = self._problem.zeros or (self._problem.model.training.zero_stage,)
        return zeros if layout.dp * layout.sp > 1 else zeros[:1]

    def _ladders(self, room: Room) -> Iterator[Ladder]:
        """Those that have the given dials and were not there yet."""
        given, strict = self._problem.given, self._problem.strict
        for method in self._methods.values():
            for ladder in method(room):
                rungs = tuple(d for d in ladder if d.agree(given, strict=strict))
                if not rungs or rungs[0] in self._seen:
                    continue
                self._seen.add(rungs[0])
                if rungs[0].cut in ("packed", "placed") and rungs[0].size is None:
                    rungs = self._sized(rungs)
                if rungs:
                    yield rungs

    def _sized(self, ladder: Ladder) -> Ladder:
        """Micro-batches of as many tokens as a device can hold; none where that is too few for the
        longest sequence, unless no more can be checkpointed, which a refusal then tells."""
        (dials,) = ladder
        key = dials.layout, dials.zero, dials.recompute_layers
        sp_size, longest = dials.layout.sp, max(self._problem.seq_lens)
        if key not in self._capacities:
            self._capacities[key] = sp_size * fitting_tokens(
                replica_model(dials, self._problem.model), self._problem.limit_bytes,
                dp_size=1, sp_size=sp_size, recompute_layers=sum(dials.recompute_layers),
            )  # fmt: skip
        size = self._capacities[key]
        if size < longest and dials.recompute_layers != dials.stages:
            return ()
        return (replace(dials, size=max(size, longest)),)

    def _bound_s(self, dials: Dials) -> float:
        """A bound of all rungs below: what the busiest replica computes on its slowest stage, with
        nothing waited for but the pipeline's fill and drain."""
        key, uncut = dials.chunks_only(), dials.cut == "slices"
        if uncut:  # however many slices there are: they take no less than whole sequences
            key = replace(key, slices=1, by_work=False)
        if key not in self._bounds_s:
            lens, model = self._replicas.busiest(dials), replica_model(dials, self._problem.model)
            padded, groups = groups_of(key, lens, model)
            chunks = [chunk for group in groups for chunk in group]
            self._bounds_s[key] = max(
                stage_bounds_s(
                    chunks, padded, dials.stages, dials.layout.sp, model,
                    recompute_layers=dials.recompute_layers, fills=not uncut,
                )
            )  # fmt: skip
        return self._bounds_s[key]

    def _climb_down(self, ladder: Ladder) -> None:
        """To the highest rung that fits on all replicas, or is known to be no better."""
        while ladder:
            place = self._highest(ladder)
            if place is None:
                return
            trial = self._trials[-1]
            if trial.bound_s >= self._best_s:
                return
            try:
                self._outcomes.append(self._replicas.plan_whole(ladder[place]))
                return
            except (UserError, PlanError) as error:
                self._refused.append(Refusal(ladder[place], error))
            ladder = ladder[place + 1 :]

    def _highest(self, ladder: Ladder) -> int | None:
        """The place of the first rung that fits the busiest replica, which is then the last trial;
        by bisection, since all below one that fits do."""
        plans = {0: self._try(ladder[0])}
        if plans[0] is not None or len(ladder) == 1:
            return self._timed(ladder, 0, plans[0])
        low, high = 0, len(ladder) - 1
        plans[high] = self._try(ladder[high])
        if plans[high] is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            plans[middle] = self._try(ladder[middle])
            low, high = (middle, high) if plans[middle] is None else (low, middle)
        return self._timed(ladder, high, plans[high])

    def _timed(self, ladder: Ladder, place: int, plan: ChunkPlan | None) -> int | None:
        if plan is None:
            return None
        dials = ladder[place]
        costs = replica_model(dials, self._problem.model).costs(plan)
        self._trials.append(Trial(dials, time_actions(plan, costs).duration_s))
        return place

    def _try(self, dials: Dials) -> ChunkPlan | None:
        """The busiest replica's plan, where it fits."""
        key = dials.layout, dials.zero
        try:
            if key in self._too_large:
                raise self._too_large[key]
            return self._replicas.plan_busiest(dials, self._best_s)
        except NotFasterError:
            self._num_pruned += 1
            return None
        except (UserError, PlanError) as error:
            if isinstance(error, DoesNotFitError) and error.part == "state":
                self._too_large[key] = error  # whatever the chunks are
            self._refused.append(Refusal(dials, error))
            return None
