"""One search over layouts, methods and their options, for `furlong plan` and `furlong train`.

    answer = search(Question(seq_lens, model, limits, num_devices=8))
    answer.best.candidate.layout, answer.best.step_s

Layouts are opened by seconds below which none of their steps gets. In each the candidates of a
method come by an estimate; the first few that fit are timed by the clock over the plans of all
replicas, joined as a run joins them. Planners that search by themselves have to beat what is there.
Work is bounded by counts, never by a clock: equal questions have equal answers.

Batch by batch `BatchPlans` asks the same planners, and takes the fastest by the same clock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log2

from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.plan import ON_DEVICE, ONE_DEVICE, ChunkPlan, Layout
from furlong.planners import chunkflow, fpdt, infinipipe, places, seco, skrull
from furlong.planners.candidates import CHUNKS, chunks, least_s, pairs
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica
from furlong.planners.question import (
    SLACK,
    Answer,
    Candidate,
    Candidates,
    PlanOf,
    Question,
    Space,
    key_of,
)
from furlong.planners.spaco import one_draw
from furlong.simulate.predict import Needs, most_of, needs_of, step_s
from furlong.units import count_words, format_seconds

LAYOUT_SLACK = 1e-4
"""The same of plans in different layouts, which the clock compares as they will run."""
_EQUAL = 1e-9
"""The same of plans whose actions take equal times."""
_NEAR = 0.005
"""Share by which the size named in a message of what would fit may be wrong."""
_MAX_ACTIONS = 16_000
"""Actions that are walked and simulated in all on one device once a plan fits, twice as many while
none does: then the search ends."""
_LESS_AGAIN = 0.9
"""Share of the budget that a method by name keeps when a step of it did not fit."""
_MOST_FITTING = 4
"""Plans of chunks that fit and are timed in each layout of several devices, and of each chunk size
with which replicas wait for each other."""
_WAITING = 0.05
"""Share of the busiest replica's seconds that a step of all takes longer where replicas wait."""
LOCAL = "local sequences"
"""Chunks with whole sequences on one process of a pool where that balances."""

Tell = Callable[[str], None]

METHODS: Mapping[str, Candidates] = {
    "chunkflow": chunkflow.candidates,
    "seco": seco.candidates,
    "spaco": seco.sampled_candidates,
    "infinipipe": infinipipe.candidates,
    "skrull": skrull.candidates,
    "fpdt": fpdt.candidates,
    "places": places.candidates,
}
"""The published systems, by the names of `chunks.method`."""
_OWN_CHUNKS = ("places", "skrull", "infinipipe")
"""Methods that make chunks of their own: `auto` asks them beside all options of chunks, among which
is what the others offer."""


def search(question: Question, tell: Tell | None = None) -> Answer:
    """The plans of `question.method` that fit, the fastest first, of those alike on one device the
    one that needs least memory. Where none fits, not with four times as many chunks and cells
    either, nothing is in `tried`.

    `tell` is called with words for how far it is. Raises ConfigError for sizes that no layout has.
    """
    started_s, tell = time.monotonic(), tell or (lambda words: None)
    if question.method in _OWN_CHUNKS and question.options:
        names = " and ".join(map(key_of, question.options))
        raise ConfigError(
            given=f"{names} with chunks.method = {question.method}",
            required=f"no options of chunks: {question.method} makes chunks of its own",
            source="chunks",
            change=f"leave {names} out, or chunks.method",
        )
    state = _Search(question, tell)
    state.run(own_methods(question))
    if not state.fitting:
        error, most_chunks = state.error, 4 * question.most_chunks
        finer = replace(question, most_chunks=most_chunks, most_cells=4 * question.most_cells)
        state = _Search(finer, tell)
        state.run(own=[])  # methods with chunks of their own cut as finely as they can
        state.error = error
    if not state.fitting:
        state.try_least()
    return state.answer(started_s)


def own_methods(question: Question) -> list[str]:
    """Methods that make their own chunks among those that a question leaves."""
    if question.method == "auto":
        return [] if question.options else list(_OWN_CHUNKS)
    return [question.method] if question.method in _OWN_CHUNKS else []


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._question, self._limits, self._tell = question, question.limits, tell
        self._spaces = {layout: Space(question, layout) for layout in walkable(question)}
        self._is_one = list(self._spaces) == [ONE_DEVICE]
        self._found: list[Candidate] = []
        self.fitting: list[Candidate] = []
        self._refused: list[Candidate] = []
        self._too_large: dict[Layout, int] = {}
        self._waiting: set[tuple[Layout, int]] = set()
        """Chunk sizes of a layout with which replicas wait for each other: no estimate knows, so
        others may be faster."""
        self._num_actions = 0
        self.error: Exception | None = None
        """Why a method that fits its plans itself has none."""

    def run(self, own: Sequence[str]) -> None:
        """Try the methods with chunks of their own, and all options unless one of them is named."""
        question, bounds_s = self._question, dict[Layout, float]()
        for layout, space in self._spaces.items():
            lacking_bytes = question.state_bytes(layout) - self._limits.limit_bytes
            if lacking_bytes > 0 and not self._is_one:
                self._too_large[layout] = lacking_bytes
            else:
                bounds_s[layout] = 0.0 if self._is_one else least_s(space)
        methods = [METHODS[name] for name in own]
        if question.method not in _OWN_CHUNKS:
            # first, for planners with chunks of their own take long, and have to beat the best
            methods.insert(0, pairs if question.pair else METHODS.get(question.method, chunks))
        for method in methods:
            for layout in sorted(bounds_s, key=bounds_s.__getitem__):
                if bounds_s[layout] < self._best_s:
                    self._walk(layout, method)
        self._find_options()

    @property
    def _best_s(self) -> float:
        return min((one.step_s for one in self.fitting), default=inf)

    def _walk(self, layout: Layout, method: Candidates) -> None:
        """Try the candidates of a method in a layout until no further one can be faster."""
        beat_s = self._best_s if len(self._spaces[layout].dealt) == 1 else inf
        seconds: dict[int, set[float]] = defaultdict(set)
        """Times of the plans that fit, of sizes with which replicas wait by themselves (others:
        0): options that do not act make the same plan again."""
        fitting: set[ChunkOptions] = set()
        """Their options with all on the device: what is offloaded for no need gains nothing."""

        def alike(size: int) -> set[float]:
            return seconds[size if (layout, size) in self._waiting else 0]

        for candidate in method(replace(self._question, beat_s=beat_s), layout):
            self._found.append(candidate)
            best = f"best {format_seconds(self._best_s)}" if self.fitting else "none fits so far"
            self._tell(f"{count_words(len(self._found), 'candidate')}, {best}")
            on_device, size = replace(candidate.options, offload="none"), candidate.options.size
            if (
                on_device not in fitting
                and self._may_fit(candidate)
                and not self._is_done(candidate, len(alike(size)))
                and (fits_s := self._try(candidate, self._best_s)) is not None
            ):
                alike(size).add(fits_s)
                fitting.add(on_device)

    def _is_done(self, candidate: Candidate, num_fitting: int) -> bool:
        estimate_s = candidate.estimate_s
        if not self._is_one:
            return estimate_s >= self._best_s or num_fitting >= _MOST_FITTING
        if self._num_actions > _MAX_ACTIONS * (1 if self.fitting else 2):
            return True
        if len(self.fitting) < 2 or "sample" in self._question.given:
            return False  # the estimates are of whole backwards
        return estimate_s > self._best_s * (1 + SLACK)

    def _may_fit(self, candidate: Candidate) -> bool:
        return candidate.least is None or self._limits.hold(candidate.least)

    def _try(self, candidate: Candidate, beat_s: float) -> float | None:
        """Seconds of a candidate's plans if they fit, else None: of a step or, where that alone
        takes `beat_s`, of one replica, of which no step takes less."""
        space, layout = self._spaces[candidate.layout], candidate.layout
        plan_of: PlanOf = cache(candidate.plan_of)
        if candidate.longest:
            plan = plan_of(tuple(candidate.longest))
            candidate = self._walked(candidate, [plan])
            if not self._limits.hold(candidate.needs):
                self._refused.append(candidate)
                return None
            if self._is_one:
                options, seconds = candidate.options, candidate.estimate_s
                is_plain = options.offloading == ON_DEVICE and options.sampling is None
                if not is_plain and not self._question.pair:
                    seconds = space.busiest_s(
                        lambda lens: one_draw(plan_of(lens), options.sampling)
                    )
                    self._num_actions += sum(map(len, plan.actions))
                self.fitting.append(replace(candidate, step_s=seconds))
                return seconds
        try:
            alone_s = inf if layout.dp == 1 else space.busiest_s(plan_of)
            if layout.dp > 1 and alone_s >= beat_s:
                return alone_s if candidate.longest else None
            # the plans of planners with chunks of their own take long
            step_s = space.step_s(plan_of, inf if candidate.longest else beat_s)
        except (UserError, PlanError) as error:
            if candidate.longest:
                raise
            self.error = error  # none of its plans fits, or none is faster
            return None
        if step_s == inf:
            return None
        if step_s > alone_s * (1 + _WAITING):
            self._waiting.add((layout, candidate.options.size))
        if not candidate.longest:
            busiest = {space.lens(step[0]) for step in space.dealt}
            candidate = self._walked(candidate, [plan_of(lens) for lens in sorted(busiest)])
        self.fitting.append(replace(candidate, step_s=step_s))
        return step_s

    def _walked(self, candidate: Candidate, plans: Sequence[ChunkPlan]) -> Candidate:
        """The candidate with the bytes of these plans."""
        memory = self._spaces[candidate.layout].model.memory()
        curves = [memory.curve(p, rank) for p in plans for rank in range(len(p.actions))]
        curve = max(curves, key=lambda curve: self._limits.lacking(needs_of(curve)))
        self._num_actions += sum(len(own) for plan in plans for own in plan.actions)
        return replace(candidate, needs=most_of(map(needs_of, curves)), peak=curve.peak)

    def _find_options(self) -> None:
        """Find options that stand in for the chosen plan, which a run needs beside a method's own
        chunks. Where none fits, the plans of such methods in that layout are given up, unless the
        method is named and plans the longest sequence itself: then options that lack least do."""
        while self.fitting:
            chosen = self._ranked()[0]
            if any(one.stands_in_for(chosen) for one in self.fitting):
                return
            offered = [c for c in chunks(self._question, chosen.layout) if c.stands_in_for(chosen)]
            self._found += offered
            if any(self._may_fit(c) and self._try(c, inf) is not None for c in offered):
                return
            if offered and chosen.method == self._question.method and self._plans_longest(chosen):
                spare = min(offered, key=lambda c: self._limits.lacking(c.least or Needs(0)))
                spare = self._walked(spare, [spare.plan_of(spare.longest)])
                self.fitting.append(replace(spare, step_s=spare.estimate_s))
                return
            self.fitting = [c for c in self.fitting if c.layout != chosen.layout or c.longest]

    def _plans_longest(self, candidate: Candidate) -> bool:
        """Whether a planner that fits its plans itself has one of the longest sequence, which may
        take longer than the step that the candidate had to beat."""
        question = self._question
        try:
            asked = next(iter(METHODS[candidate.method](question, candidate.layout)))
            asked.plan_of([question.longest])
        except (UserError, PlanError) as error:
            self.error = error
            return False
        return True

    def try_least(self) -> None:
        """Find what lacks least, for the message that no plan fits."""
        lacking = self._limits.lacking
        known = {(one.layout, one.options) for one in self._refused}
        most = self._num_actions + 2 * _MAX_ACTIONS
        bounded = [(c.least, c) for c in self._found if c.least is not None]
        for least, candidate in sorted(
            bounded, key=lambda pair: (lacking(pair[0]), sum(pair[0]), pair[1].estimate_s)
        ):
            nearest = min((lacking(one.needs) for one in self._refused), default=inf)
            short = lacking(least)
            near = _NEAR * sum(least) if short else 0  # what may fit is tried
            if self.fitting or nearest <= short + near:
                break
            if nearest < inf and self._num_actions > most:
                break
            if (candidate.layout, candidate.options) not in known:
                self._try(candidate, inf)

    def _ranked(self) -> list[Candidate]:
        """The plans that fit, the chosen one first, then by their seconds."""

        def simplest(one: Candidate) -> tuple[object, ...]:
            layout = one.layout
            return (one.needs, one.step_s) if self._is_one else (layout.pp, layout.sp, one.step_s)

        best = min(self._alike(), key=simplest, default=None)
        return sorted(self.fitting, key=lambda one: (one is not best, one.step_s))

    def _alike(self) -> list[Candidate]:
        """The plans within the slack of the fastest one; on one device those of its order, its
        stages and its offload."""
        method = self._question.method
        wanted = [one for one in self.fitting if one.method == method] or self.fitting
        fastest_s = min((one.step_s for one in wanted), default=inf)
        slack = SLACK if self._is_one else LAYOUT_SLACK
        near = [one for one in wanted if one.step_s <= fastest_s * (1 + slack)]
        if not self._is_one or not near:
            return near
        equal = [one for one in near if one.step_s <= fastest_s * (1 + _EQUAL)]
        fastest = min(equal, key=lambda c: (len(c.options.offloading.targets), c.needs))
        return [one for one in near if _order_of(one) == _order_of(fastest)]

    def answer(self, started_s: float) -> Answer:
        """The outcome, with the layouts of which nothing was tried."""
        tried, limits = self._ranked(), self._limits
        opened = {one.layout for one in (*self.fitting, *self._refused)}
        too_large, slower = dict(self._too_large), dict[Layout, float]()
        for candidate in self._found:
            layout, least = candidate.layout, candidate.least
            if least is not None and layout not in opened:
                lacking_bytes = limits.lacking(least)
                too_large[layout] = min(lacking_bytes, too_large.get(layout, lacking_bytes))
                if not lacking_bytes:
                    slower[layout] = min(candidate.estimate_s, slower.get(layout, inf))
        return Answer(
            question=self._question,
            tried=tuple(tried),
            refused=tuple(sorted(self._refused, key=lambda one: limits.lacking(one.needs))),
            too_large=tuple((layout, n) for layout, n in too_large.items() if n),
            slower=tuple(sorted(slower.items(), key=lambda pair: pair[1])),
            error=self.error if self._question.method != "auto" and not tried else None,
            alike=len(self._alike()),
            num_pruned=len(self._found) - len(tried) - len(self._refused),
            seconds=time.monotonic() - started_s,
        )


def walkable(question: Question) -> list[Layout]:
    """The layouts that the given options can have; of these those without an idle replica, if there
    are any. Raises ConfigError."""
    some = question.layouts()
    found = some
    if question.given.get("order") == "layer-first":
        found = [layout for layout in found if layout.pp == 1]
    if not found:
        raise ConfigError(
            given=f"chunks.order = layer-first with {some[0]}",
            required="chunk-first: a pipeline has stages of its own, one for each rank",
            source="chunks.order or chunks.stage_layers, and parallel.pp",
            change="leave chunks.order and chunks.stage_layers out, or set parallel.pp to 1",
        )
    return [one for one in found if one.dp <= question.sequences_per_step] or found


def _order_of(candidate: Candidate) -> tuple[object, ...]:
    options = candidate.options
    return options.order, options.stage_layers, options.offloading


@dataclass(frozen=True)
class BatchPlans:
    """The planners that a run asks for every batch, beside that of its options."""

    question: Question
    """Its model, limits, given options and method."""
    layout: Layout
    options: ChunkOptions
    """The options that the run has begun with."""
    has_shrunk: bool = False
    """Whether a step did not fit before, although it was predicted to."""

    def best_plan(
        self,
        seq_lens: Sequence[int],
        plan: ChunkPlan,
        options: ChunkOptions,
        *,
        frozen_layers: int = 0,
    ) -> tuple[str, ChunkPlan]:
        """The name and the plan of one replica's sequences that is predicted to be fastest: that of
        `options`, which is `plan`, unless another one is faster by more than the slack
        with which layouts were compared. A method that is named is what runs: raises UserError
        where it has no plan."""
        question, method = self.question, self.question.method
        if method in _OWN_CHUNKS:
            return method, self._plan_by_name(seq_lens, plan, options)
        if method != "auto":
            return method, plan
        model, found = question.model_of(self.layout), dict[str, ChunkPlan]()
        plan_s = step_s(model, gathered_first(plan))  # as the plans of all replicas begin
        if plan.sp_size > 1:
            found[LOCAL] = plan_replica(
                seq_lens, options, num_layers=model.shape.num_layers,
                stages=plan.stages if self.layout.pp > 1 else (), sp_size=plan.sp_size,
                frozen_layers=frozen_layers, local_in=model.shape,
            )  # fmt: skip
        # smaller chunks than at the start: what was predicted to fit did not
        is_free = options == self.options and not self.has_shrunk and not plan.frozen_stages
        for name in own_methods(question) if is_free and options.offloading.kv == "none" else ():
            with suppress(UserError, StopIteration):  # none of its plans fits, or none is faster
                found[name] = self._plan_of(name, seq_lens, plan_s)
        # another replica may take the options, and all of a step share its stages
        seconds = {
            name: step_s(model, gathered_first(one))
            for name, one in found.items()
            if self.layout.dp == 1 or one.stages == plan.stages
        }
        best = min(seconds, key=seconds.__getitem__, default=CHUNKS)
        if seconds.get(best, inf) < plan_s * (1 - LAYOUT_SLACK):
            return best, found[best]
        return CHUNKS, plan

    def _plan_by_name(
        self, seq_lens: Sequence[int], plan: ChunkPlan, options: ChunkOptions
    ) -> ChunkPlan:
        """The plan of the method that is named. Where a step did not fit, although it was predicted
        to, and the options' chunks were halved, in a tenth less memory for each time."""
        method = self.question.method
        if plan.frozen_stages:
            raise ConfigError(
                given=f"chunks.method = {method}, and {count_words(plan.frozen_stages, 'stage')}"
                " without trained weights",
                required="trained weights on every stage",
                source="chunks.method, and the model's frozen weights or adapters",
                change="leave chunks.method out, or train weights of the first layers too",
            )
        times = log2(max(1.0, self.options.size / options.size))
        limits = self.question.limits
        less = replace(limits, device_bytes=int(limits.device_bytes * _LESS_AGAIN**times))
        asked = replace(self, question=replace(self.question, limits=less))
        return asked._plan_of(method, seq_lens, inf)

    def _plan_of(self, method: str, seq_lens: Sequence[int], beat_s: float) -> ChunkPlan:
        """The plan of a method with its own chunks, with the offload of the options, for replicas
        have the same ones: nothing of it lies there."""
        question = replace(self.question, seq_lens=tuple(seq_lens), beat_s=beat_s)
        plan = next(iter(METHODS[method](question, self.layout))).plan_of(seq_lens)
        return replace(plan, offload=self.options.offloading)


def best_plan(
    seq_lens: Sequence[int], answer: Answer, options: ChunkOptions | None = None
) -> tuple[str, ChunkPlan]:
    """The plan of a step over these sequences as a run makes it of an answer, and the names of the
    planners of its replicas. `options`: others than the answer's."""
    question, chosen = answer.question, answer.best
    if chosen.layout == ONE_DEVICE:
        return chosen.method, chosen.plan_of(seq_lens)
    space, options = Space(question, chosen.layout), options or answer.options
    work_s = question.model.sequence_seconds(seq_lens)
    dealt = by_cost(work_s, min(chosen.layout.dp, len(seq_lens)))
    asked, plan_of = BatchPlans(question, chosen.layout, options), space.plan_of(options)
    names, plans = [], []
    for own in dealt:
        lens = [seq_lens[i] for i in own]
        name, plan = asked.best_plan(lens, plan_of(lens), options)
        names.append(name)
        plans.append(plan)
    return ", ".join(dict.fromkeys(names)), join_kept(plans, dealt, seq_lens, chosen.layout.dp)
