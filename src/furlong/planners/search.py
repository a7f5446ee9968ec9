"""One search over layouts, methods and their options, for `furlong plan` and `furlong train`.

    answer = search(Question(seq_lens, model, limits, num_devices=8))
    answer.best.layout, answer.best.step_s

This is a best-first search. Layouts are opened in order of a lower bound on step time, and
candidates of all open layouts are tried in order of their estimates. In each layout the first few
that fit are timed by the simulated clock over the joined plans of all replicas. Planners that make
their own chunks are asked afterwards, in layouts in which chunk options fit, and must be faster.
Work is bounded by counts, not by time, so that equal questions have equal answers.

During training `BatchPlans` asks the same planners for each batch, and takes the fastest plan.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from math import inf, log2

from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.lengths import StepSize
from furlong.plan.plan import ON_DEVICE, ONE_DEVICE, ChunkPlan, Layout
from furlong.planners import chunkflow, fpdt, infinipipe, places, seco, skrull
from furlong.planners.candidates import CHUNKS, chunks, count_kinds, least_s, pairs
from furlong.planners.chunks import by_cost
from furlong.planners.layouts import no_pools, refuse_reshard_alone
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica, stages_of
from furlong.planners.question import (
    SLACK,
    Answer,
    Candidate,
    Candidates,
    PlanOf,
    Question,
    Space,
)
from furlong.planners.spaco import one_draw
from furlong.simulate.predict import Needs, most_of, needs_of, step_s
from furlong.units import count_words, format_seconds

LAYOUT_SLACK = 1e-4
"""Relative tolerance within which plans of different layouts count as equally fast."""
_EQUAL = 1e-9
"""Relative tolerance for plans whose actions take equal times."""
_NEAR = 0.005
"""Relative tolerance of the budget that a message suggests."""
_BADLY = 1.25
"""Multiple of the lower bound on step time above which chunk options count as bad, so that
InfiniPipe's search is worth its time in a pipeline."""
_MAX_ACTIONS = 16_000
"""Actions simulated on one device that end the search; twice as many while no plan fits."""
_LESS_AGAIN = 0.9
"""Factor of the budget of a named method after each out-of-memory step."""
_MOST_TIMES = 8
"""Multiple of `_MAX_ACTIONS` on several devices, which count the actions of the plan that needs
most memory and of the busiest replica of each step. After half of it, one plan per layout is timed.
"""
_CELL_ACTIONS = 6
"""Most actions per cell of a pipeline: three passes, and messages."""
_MOST_ASKED = 128
"""Most devices for which `places` is asked in layouts without a plan of chunk options: with 1,024
it takes a minute."""
_MOST_REFUSED = 3
"""Plans of a layout that do not fit before the candidate that needs least memory is checked."""
_MOST_FITTING = 4
"""Most fitting plans to time in each layout of several devices, and for each chunk size at which
replicas wait for each other."""
_WAITING = 0.05
"""Share of the busiest replica's seconds above which a step's additional time counts as waiting."""
LOCAL = "local sequences"
"""Name of plans in which whole sequences stay on one process of a pool where that balances."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Method:
    """A published system whose plans a run can use."""

    candidates: Candidates
    takes: Callable[[Layout], bool] = lambda layout: layout.pp == 1
    """Whether it has plans in a layout."""
    needs: str = "a layout"
    """Requirements of its plans, in the words of a message."""
    sizes: str = ""
    """Change of the run file that gives it a layout, in words."""
    has_own_chunks: bool = False
    """Whether it cuts sequences itself, so that its plans have no chunk options."""
    takes_options: tuple[str, ...] = ()
    """Options that may be given nevertheless."""


_ALONE = "no pipeline, keep kv, num_retained 0, order chunk-first", "set parallel.pp to 1"
_POOL = (
    lambda layout: layout.sp > 1 and layout.pp == 1,
    "a pool (parallel.sp above 1) without a pipeline", "set parallel.sp to 2 or more", True,
)  # fmt: skip
METHODS: Mapping[str, Method] = {
    "chunkflow": Method(chunkflow.candidates, lambda layout: True),
    "seco": Method(seco.candidates, needs=_ALONE[0], sizes=_ALONE[1]),
    "spaco": Method(
        seco.sampled_candidates, needs=f"chunks.sample, {_ALONE[0]}", sizes=_ALONE[1]
    ),
    "infinipipe": Method(
        infinipipe.candidates, lambda layout: layout.pp > 1, "a pipeline (parallel.pp above 1)",
        "set parallel.pp to 2 or more", True, takes_options=("reshard",),
    ),
    "skrull": Method(skrull.candidates, *_POOL),
    "fpdt": Method(
        fpdt.candidates, sizes=_ALONE[1],
        needs="no pipeline, keep input, num_retained 0, order layer-first, stage_layers 1",
    ),
    "places": Method(places.candidates, *_POOL),
}  # fmt: skip
"""The published systems, by the names of `chunks.method`, which config/schema.py lists, too."""


def search(question: Question, tell: Tell | None = None, *, may_cut_short: bool = False) -> Answer:
    """Search for the fastest plan of `question.method` that fits.

    On one device, the plan that needs least memory is chosen among about equally fast ones. If none
    fits, the search is repeated with four times as many chunks and cells; if still none fits,
    `Answer.tried` is empty.

    `tell`: called with words for the progress. `may_cut_short`: whether a KeyboardInterrupt ends
    the search with the plans so far. Raises ConfigError for sizes that no layout has.
    """
    started_s, tell = time.monotonic(), tell or (lambda words: None)
    own = METHODS.get(question.method)
    odd = [name for name in question.options if own and name not in own.takes_options]
    if own and own.has_own_chunks and odd:
        names = " and ".join(question.keys_of(odd))
        raise ConfigError(
            given=f"{names} with chunks.method = {question.method}",
            required=f"no options of chunks: {question.method} makes chunks of its own, which go"
            " through all layers",
            source="chunks",
            change=f"leave {names} out, or chunks.method",
        )
    state, is_cut_short = _searched(question, tell, may_cut_short)
    on_device = None
    if not state.fitting and question.may_offload_weights:
        away, is_cut_short = _searched(question.offloading(), tell, may_cut_short)
        if not away.fitting:
            away.try_least()
        if away.fitting or away.lacks_cpu_alone:
            state, on_device = away, state.answer(started_s)
    if not state.fitting and on_device is None:
        state.try_least()
    answer = state.answer(started_s)
    return replace(answer, is_cut_short=is_cut_short, on_device=on_device)


def _searched(question: Question, tell: Tell, may_cut_short: bool) -> tuple[_Search, bool]:
    """Run a search, again with finer chunks if nothing fits. Return it, and whether a signal has
    ended it early."""
    state, is_cut_short = _Search(question, tell), False
    try:
        state.run()
    except KeyboardInterrupt:
        if not (may_cut_short and state.fitting):
            raise
        is_cut_short = True
    if not state.fitting:
        error, most_chunks = state.error, 4 * question.most_chunks
        finer = replace(question, most_chunks=most_chunks, most_cells=4 * question.most_cells)
        state = _Search(finer, tell)
        if not has_own_chunks(question.method):  # those already try the finest cuts
            state.run()
        state.error = error
    return state, is_cut_short


def own_methods(question: Question, layout: Layout) -> list[str]:
    """Return the methods with own chunks that `auto` asks in a layout besides chunk options.
    Skrull is omitted, as its plans are special cases of those of `places`."""
    others = [name for name in question.options if name != "reshard" or layout.pp == 1]
    if question.method != "auto" or others or layout == ONE_DEVICE:
        return []
    return ["places"] if layout.pp == 1 else ["infinipipe"]


def candidates_of(name: str) -> Candidates:
    """Return the candidates function of a method; for `auto` that of chunk options."""
    return METHODS[name].candidates if name in METHODS else chunks


def has_own_chunks(name: str) -> bool:
    """Whether a planner's plans have no chunk options."""
    return name in METHODS and METHODS[name].has_own_chunks


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._question, self._limits, self._tell = question, question.limits, tell
        self._spaces = {layout: Space(question, layout) for layout in walkable(question)}
        self._is_one = list(self._spaces) == [ONE_DEVICE]
        self._samples = "sample" in question.given
        """Whether chunks are sampled. Estimates and bounds then overestimate: they count all
        backwards."""
        self._found: list[Candidate] = []
        self.fitting: list[Candidate] = []
        self._refused: list[Candidate] = []
        self._resharding: dict[Layout, Question] = {}
        """Layout -> its question, for layouts whose plans free the weights of stages."""
        self._passing: dict[Layout, Space] = {}
        """Spaces of the pipelines among them, in which each pass gathers weights."""
        self._too_large: dict[Layout, int] = {}
        self._waiting: set[tuple[Layout, int]] = set()
        """(layout, chunk size) at which replicas wait for each other. Estimates ignore such waits,
        so more plans of these sizes are timed."""
        self._hopeless: set[tuple[Layout, Candidates, bool]] = set()
        """(layout, method, whether candidates are long) whose leanest candidate does not fit."""
        self._partial: set[object] = set()
        """Keys of plans that fit the timed sequences, but not a whole step."""
        self._num_actions = 0
        self.error: Exception | None = None
        """Error of a method with own chunks that has no plan."""

    def run(self) -> None:
        """Try candidates in each layout that may be faster than the best plan. If the best plan is
        then refused, start again, as it has kept slower ones from being tried.

        If resharding is not given, layouts reshard (free the weights of stages) whose state does
        not fit otherwise; the other layouts only if nothing fits, or only plans that are far slower
        than the lower bound on step time."""
        asked, limit_bytes = self._question, self._limits.limit_bytes
        first, later = dict[Layout, Question](), dict[Layout, Question]()
        for layout in self._spaces:
            own, may_reshard = asked, asked.may_reshard(layout)
            if may_reshard:
                own = asked.resharding(layout, False)
            lacking_bytes = own.state_bytes(layout) - limit_bytes
            if lacking_bytes > 0 and may_reshard:
                own = asked.resharding(layout)
                lacking_bytes = own.state_bytes(layout) - limit_bytes
            elif may_reshard:
                later[layout] = asked.resharding(layout)
            if lacking_bytes > 0 and not self._is_one:
                self._too_large[layout] = lacking_bytes
            else:
                first[layout] = own
        for questions in filter(None, (first, later)):
            if (
                self.fitting
            ):  # kept ones that recompute, say, where freed ones leave room for graphs
                questions = {
                    layout: own
                    for layout, own in questions.items()
                    if layout.num_devices <= _MOST_ASKED
                    and not self._samples
                    and _BADLY * least_s(self._spaces[layout]) < self._best_s
                }
            if not questions:
                break
            before, self._num_actions = [*self._found], 0
            self._hopeless.clear()
            self._try_all(questions)
            while self._refuse_partial():
                self._found[:] = before
                self._try_all(questions)

    def _try_all(self, questions: Mapping[Layout, Question]) -> None:
        question, bounds_s = self._question, dict[Layout, float]()
        for layout, own in questions.items():
            if own.options.get("reshard"):
                self._resharding[layout] = own
                if layout.pp > 1:
                    self._passing[layout] = Space(own, layout)
            no_bound = self._is_one or self._samples
            bounds_s[layout] = 0.0 if no_bound else least_s(self._spaces[layout])
        ordered = sorted(bounds_s, key=bounds_s.__getitem__)
        method = pairs if question.calls else candidates_of(question.method)
        walks = [
            ((False, bounds_s[layout]), i, self._walk(layout, method, bounds_s[layout]))
            for i, layout in enumerate(ordered)
        ]
        while walks:
            # the priority of an unopened layout is its bound, of others the next estimate
            reached, i, walk = heappop(walks)
            if (following := next(walk, None)) is not None:
                heappush(walks, (max(reached, following), i, walk))
        # methods with own chunks take long, and have to be faster than the best plan
        for layout in ordered:
            for name in own_methods(questions[layout], layout):
                beside = self._beside(layout)
                if layout.pp > 1:
                    is_worth_it = bool(beside) and beside[0].step_s > _BADLY * bounds_s[layout]
                else:  # a pool's chunk options may be slow where places are not
                    is_worth_it = bool(beside) or layout.num_devices <= _MOST_ASKED
                if bounds_s[layout] < self._best_s and is_worth_it:
                    deque(self._walk(layout, candidates_of(name)), maxlen=0)

    def _refuse_partial(self) -> bool:
        """Refuse the best plan if it fits the timed sequences, but not a whole step. Return whether
        it was refused."""
        if (best := self._best()) is None:
            return False
        at = self.fitting.index(best)  # keep its position: ties are resolved by order
        try:
            whole = self._walked(best, self._whole_plans(best))
        except (UserError, PlanError) as error:
            self.error = error
        else:
            if self._limits.hold(whole.needs):
                self.fitting[at] = whole
                return False
            self._refused.append(whole)
        del self.fitting[at]
        self._partial.add(_key_of(best))
        return True

    def _whole_plans(self, candidate: Candidate) -> list[ChunkPlan]:
        """Return plans of a whole step that decide whether it fits. Without a pipeline and without
        resharding the longest sequence decides, so there are none. For a method with own chunks
        that `auto` has chosen, a run falls back to its chunk options, so their plans decide."""
        space, is_named = self._space_of(candidate), candidate.method == self._question.method
        plan_of: PlanOf = candidate.trial
        if candidate.options.reshard and candidate.layout.pp == 1:
            return [plan_of(lens) for lens in space.whole]
        if candidate.layout.pp == 1 and (candidate.longest or not is_named):
            return []
        if not candidate.longest:
            plan_of = self._asked(candidate) if is_named else space.plan_of(candidate.options)
        most = _MAX_ACTIONS * _MOST_TIMES // (4 * _CELL_ACTIONS * candidate.layout.pp)
        most *= candidate.options.size
        return [plan_of(_longest_of(lens, most)) for lens in space.whole]

    def _beside(self, layout: Layout) -> list[Candidate]:
        """Return the fitting chunk options of a layout, the fastest first, that one replica can use
        while another uses a method with own chunks. Such methods keep K,V on the device, and all
        replicas of a step must have the same stages."""
        fitting = [
            one
            for one in self.fitting
            if one.layout == layout
            and one.longest
            and one.options.offloading.kv == "none"
            and (layout.pp > 1 or not one.options.reshard)
            and (layout.dp == 1 or one.options.order == "chunk-first")
        ]
        return sorted(fitting, key=lambda one: one.step_s)

    def _space_of(self, candidate: Candidate) -> Space:
        passing = self._passing if candidate.options.reshard else {}
        return passing.get(candidate.layout, self._spaces[candidate.layout])

    @property
    def _best_s(self) -> float:
        return min((one.step_s for one in self.fitting), default=inf)

    def _walk(
        self, layout: Layout, method: Candidates, bound_s: float = 0.0
    ) -> Iterator[tuple[bool, float]]:
        """Try the candidates of a method in a layout until no further one can be faster. Before
        each try yield its priority (whether it is long, its estimate), so that the caller can try
        other layouts first."""
        if bound_s >= self._best_s:
            return
        beat_s = self._best_s if len(self._spaces[layout].dealt) == 1 else inf
        seconds: dict[int, set[float]] = defaultdict(set)
        """Chunk size, if replicas wait at it, else 0 -> distinct times of fitting plans. Options
        without effect repeat a plan with its time, which counts once."""
        fitting: set[ChunkOptions] = set()
        """Options of fitting plans without offload: with offload they would not be faster."""

        def alike(size: int) -> set[float]:
            return seconds[size if (layout, size) in self._waiting else 0]

        self._say(layout, "")
        question = self._resharding.get(layout, self._question)
        offered = list(method(replace(question, beat_s=beat_s), layout))
        self._found += offered
        hopeful = sorted(filter(self._may_fit, offered), key=self._is_long)
        known = dict[object, float | None]()
        known |= {_key_of(one): one.step_s for one in self.fitting}
        known |= dict.fromkeys((*map(_key_of, self._refused), *self._partial))
        num_refused = 0
        for candidate in hopeful:
            is_long = self._is_long(candidate)
            if (layout, method, is_long) in self._hopeless:
                continue
            yield is_long, candidate.estimate_s
            if is_long and self.fitting:
                return
            on_device, size = replace(candidate.options, offload="none"), candidate.options.size
            if on_device in fitting:
                continue
            if self._is_done(candidate, len(alike(size))):
                continue
            self._say(layout, candidate.method)
            if (key := _key_of(candidate)) in known:
                fits_s = known[key]
            else:
                fits_s = self._try(candidate, self._best_s)
            if fits_s is not None:
                alike(size).add(fits_s)
                fitting.add(on_device)
                continue
            num_refused += 1
            is_hard = num_refused == _MOST_REFUSED and not fitting
            if is_hard and candidate.longest and not self._is_one:
                alike_long = (one for one in hopeful if self._is_long(one) == is_long)
                leanest, num_actions = min(alike_long, key=self._leanness), self._num_actions
                walked = self._walked(leanest, [leanest.trial(tuple(leanest.longest))])
                self._num_actions = num_actions  # this check does not count as work
                if not self._limits.hold(walked.needs):
                    self._refused.append(walked)
                    self._hopeless.add((layout, method, is_long))  # nothing else fits

    def _say(self, layout: Layout, method: str) -> None:
        best = f"best {format_seconds(self._best_s)}" if self.fitting else "none fits so far"
        under_way = method if self._is_one else f"{method} {layout}".strip()
        count = count_words(len(self._found), "candidate")
        self._tell(", ".join(filter(None, (under_way, count, best))))

    def _is_done(self, candidate: Candidate, num_fitting: int) -> bool:
        estimate_s = candidate.estimate_s
        if not self._is_one:
            work = self._num_actions / (_MOST_TIMES * _MAX_ACTIONS)
            is_slower = estimate_s >= self._best_s and not self._samples
            most = _MOST_FITTING if work < 0.5 else 1
            return work > (2 if self.fitting else 1) or is_slower or num_fitting >= most
        if self._num_actions > _MAX_ACTIONS * (1 if self.fitting else 2):
            return True
        if len(self.fitting) < 2 or self._samples:
            return False
        return estimate_s > self._best_s * (1 + SLACK)

    def _is_long(self, candidate: Candidate) -> bool:
        """Whether a candidate's plans would take most of the search's work. Such candidates are
        tried only if no others fit."""
        if self._is_one or not candidate.longest:
            return False
        space, options = self._space_of(candidate), candidate.options
        num_layers = self._question.model.shape.num_layers
        num_stages = max(candidate.layout.pp, len(stages_of(num_layers, options)))
        num_tokens = max(sum(space.lens(step[0])) for step in space.dealt)
        num_cells = num_stages * max(num_tokens, sum(candidate.longest)) / options.size
        return num_cells * _CELL_ACTIONS > _MOST_TIMES * _MAX_ACTIONS / 2

    def _leanness(self, candidate: Candidate) -> tuple[int, Needs]:
        """Return a sort key by memory: chunk size first, as bounds of large chunks are loose."""
        return candidate.options.size, candidate.least or Needs(0)

    def _may_fit(self, candidate: Candidate) -> bool:
        return candidate.least is None or self._limits.hold(candidate.least)

    def _try(self, candidate: Candidate, beat_s: float) -> float | None:
        """Simulate a candidate. Return None if its plans do not fit, else the seconds of a step; or
        of its busiest replica, a lower bound, if that alone takes `beat_s` or more."""
        space, layout = self._space_of(candidate), candidate.layout
        exact, sampling = cache(candidate.trial), candidate.options.sampling
        plan_of: PlanOf = cache(lambda lens: one_draw(exact(lens), sampling))
        if candidate.longest:
            plan = exact(tuple(candidate.longest))  # any draw may be of all chunks
            candidate = self._walked(candidate, [plan])
            if not self._limits.hold(candidate.needs):
                self._refused.append(candidate)
                return None
            if self._is_one:
                seconds = candidate.estimate_s
                is_plain = candidate.options.offloading == ON_DEVICE and sampling is None
                is_plain = is_plain and not space.model.training.offload_weights
                if not is_plain and not self._question.calls:
                    seconds = space.busiest_s(plan_of)
                    self._num_actions += sum(map(len, plan.actions))
                self.fitting.append(replace(candidate, step_s=seconds))
                return seconds
        try:
            if candidate.method == self._question.method and not candidate.longest:
                self._plan_longest(candidate)
            alone_s = inf if layout.dp == 1 else space.busiest_s(plan_of)
            if layout.dp > 1 and alone_s >= beat_s:
                return alone_s if candidate.longest else None
            # planners with own chunks take long, so their plans may be abandoned at `beat_s`
            step_s = space.step_s(plan_of, inf if candidate.longest else beat_s)
        except (UserError, PlanError) as error:
            if candidate.longest:
                raise
            self.error = error  # no plan of the method fits, or none is faster
            return None
        busiest = sorted({space.lens(step[0]) for step in space.dealt})
        if candidate.longest:
            self._num_actions += sum(len(own) for n in busiest for own in plan_of(n).actions)
        if step_s == inf:
            return None
        holds_more = layout.pp > 1 or candidate.options.reshard
        if candidate.longest and holds_more and step_s < self._best_s:
            # early stages hold chunks of more sequences than `candidate.longest` has
            walked = self._walked(candidate, [plan_of(lens) for lens in busiest])
            if not self._limits.hold(walked.needs):
                self._refused.append(walked)
                return None
        if step_s > alone_s * (1 + _WAITING):
            self._waiting.add((layout, candidate.options.size))
        if not candidate.longest:
            candidate = self._walked(candidate, [plan_of(lens) for lens in busiest])
            candidate = replace(candidate, options=self._options_beside(candidate))
        self.fitting.append(replace(candidate, step_s=step_s))
        return step_s

    def _walked(self, candidate: Candidate, plans: Sequence[ChunkPlan]) -> Candidate:
        """Return the candidate with its needs raised to those of these plans."""
        space = self._space_of(candidate)
        memory, ranks = space.model.memory(), [*range(candidate.layout.pp)]
        if candidate.longest and space.stages:
            # later stages of a kind have equal cells, and hold fewer of them
            ranks = sorted(count_kinds(space.model.shape, space.stages)[0])
        curves = [memory.curve(plan, rank) for plan in plans for rank in ranks]
        self._num_actions += sum(len(own) for plan in plans for own in plan.actions)
        needs = most_of((candidate.needs, *map(needs_of, curves)))
        if needs == candidate.needs:
            return candidate
        curve = max(curves, key=lambda curve: self._limits.lacking(needs_of(curve)))
        return replace(candidate, needs=needs, peak=curve.peak)

    def _options_beside(self, candidate: Candidate) -> ChunkOptions:
        """Return chunk options to use with a method with own chunks, for evaluations and for
        batches that it has no plan of: the fastest fitting ones; if none was tried, the first by
        estimate that fit, or else those closest to fitting by their bounds."""
        layout = candidate.layout
        question = self._resharding.get(layout, self._question)
        if beside := self._beside(layout):
            return beside[0].options
        offered = [
            one
            for one in chunks(question, layout)
            if one.options.offloading.kv == "none" and one.options.order == "chunk-first"
        ]
        hopeful = sorted(filter(self._may_fit, offered), key=lambda one: one.estimate_s)
        for one in hopeful[:_MOST_REFUSED]:
            walked = self._walked(one, [one.trial(tuple(one.longest or ()))])
            if self._limits.hold(walked.needs):
                return one.options
        lacking = [self._limits.lacking(one.least or Needs(0)) for one in offered]
        return offered[lacking.index(min(lacking))].options

    def _plan_longest(self, candidate: Candidate) -> None:
        """Raise UserError if the named method has no plan of the longest sequence, however slow."""
        self._asked(candidate)([self._question.longest])

    def _asked(self, candidate: Candidate) -> PlanOf:
        """Return the plan function of the named method, without a step time to beat."""
        question = self._resharding.get(candidate.layout, self._question)
        (asked,) = candidates_of(candidate.method)(replace(question, beat_s=inf), candidate.layout)
        return asked.plan_of

    @property
    def lacks_cpu_alone(self) -> bool:
        """Whether the plan closest to fitting lacks only CPU memory."""
        least = min((one.needs for one in self._refused), key=self._nearness, default=None)
        return least is not None and [*self._limits.exceeded(least)] == ["cpu"]

    def _nearness(self, needs: Needs) -> tuple[int, int]:
        """Return the bytes that are lacking outside CPU memory, 0 unless weights lie there, and
        those lacking in all memories. Weights on the CPU are there because the device does not hold
        them, so no plan is nearer for taking less RAM and more of the device."""
        lacking = self._limits.lacking(needs)
        if not self._question.model.training.offload_weights:
            return 0, lacking
        return replace(self._limits, cpu_bytes=None).lacking(needs), lacking

    def try_least(self) -> None:
        """Find the plan closest to fitting, for the message that no plan fits."""
        known = {(one.layout, one.options) for one in self._refused}
        most = self._num_actions + 2 * _MAX_ACTIONS
        bounded = [(c.least, c) for c in self._found if c.least is not None]
        for least, candidate in sorted(
            bounded,
            key=lambda pair: (self._nearness(pair[0]), sum(pair[0]), pair[1].estimate_s),
        ):
            nearest = min((self._nearness(one.needs) for one in self._refused), default=None)
            first, short = self._nearness(least)
            near = _NEAR * sum(least) if short else 0  # candidates that may fit are all tried
            if self.fitting or (nearest and nearest <= (first, short + near)):
                break
            if nearest and self._num_actions > most:
                break
            if (candidate.layout, candidate.options) not in known:
                self._try(candidate, inf)
                while self._refuse_partial():
                    pass

    def _best(self) -> Candidate | None:
        """Return the chosen plan."""

        def simplest(one: Candidate) -> tuple[object, ...]:
            layout = one.layout
            return (one.needs, one.step_s) if self._is_one else (layout.pp, layout.sp, one.step_s)

        return min(self._alike(), key=simplest, default=None)

    def _alike(self) -> list[Candidate]:
        """Return the plans within the slack of the fastest one; on one device only those with its
        order, stages and offload."""
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
        """Return the outcome, including the layouts in which nothing was tried."""
        best, limits = self._best(), self._limits
        tried = sorted(self.fitting, key=lambda one: (one is not best, one.step_s))
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
            refused=tuple(sorted(self._refused, key=lambda one: self._nearness(one.needs))),
            too_large=tuple((layout, n) for layout, n in too_large.items() if n),
            slower=tuple(sorted(slower.items(), key=lambda pair: pair[1])),
            error=self.error if self._question.method != "auto" and not tried else None,
            alike=len(self._alike()),
            num_pruned=len(self._found) - len(tried) - len(self._refused),
            seconds=time.monotonic() - started_s,
        )


def _longest_of(seq_lens: Sequence[int], most_tokens: int) -> tuple[int, ...]:
    """Return the longest sequences with at most `most_tokens` together, at least one."""
    ordered = sorted(seq_lens, reverse=True)
    return tuple(ordered[: StepSize(tokens=most_tokens).stops(ordered)[0]])


def walkable(question: Question) -> list[Layout]:
    """Return the layouts that the given options allow, without those with idle replicas unless all
    have some. Raises ConfigError."""
    some = question.layouts()
    found, reshards = some, question.given.get("reshard", False)
    if reshards:
        training = question.model.training
        refuse_reshard_alone(
            question.num_devices, training.replicate, offloads=bool(training.offload_weights)
        )
        replicate = training.replicate
        found = [own for own in found if own.pp == 1 or (own.sp > 1 and replicate in (1, own.dp))]
        if not found:
            raise no_pools(some[0], replicate)
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


def _key_of(candidate: Candidate) -> tuple[str, Layout, ChunkOptions | None]:
    """Return a key that is unique to a candidate in a search."""
    options = candidate.options if candidate.longest else None  # own chunks: options are a fallback
    return candidate.method, candidate.layout, options


def _order_of(candidate: Candidate) -> tuple[object, ...]:
    options = candidate.options
    return options.order, options.stage_layers, options.offloading


@dataclass(frozen=True)
class BatchPlans:
    """The planners that a run asks for each batch besides its chunk options."""

    question: Question
    """Question of the run, with its model, limits, given options and method."""
    layout: Layout
    options: ChunkOptions
    """Options at the start of the run."""
    has_shrunk: bool = False
    """Whether a step has run out of memory."""

    def best_plan(
        self,
        seq_lens: Sequence[int],
        plan: ChunkPlan,
        options: ChunkOptions,
        *,
        frozen_layers: int = 0,
    ) -> tuple[str, ChunkPlan]:
        """Return the name and the plan of the method predicted to be fastest on one replica's
        sequences: `plan`, which `options` make, unless another one is faster by more than
        `LAYOUT_SLACK`. A named method with own chunks is always used; raises UserError if it has no
        plan."""
        question, method = self.question, self.question.method
        if has_own_chunks(method):
            return method, self._plan_by_name(seq_lens, plan, options)
        if method != "auto":
            return method, plan
        # after an out-of-memory step other plans that are predicted to fit are not trusted
        is_free = options == self.options and not self.has_shrunk and not plan.frozen_stages
        # without a pipeline, methods with own chunks keep all weights
        is_free = is_free and (self.layout.pp > 1 or not options.reshard)
        names = own_methods(question, self.layout)
        is_free = is_free and options.offloading.kv == "none" and bool(names)
        if plan.sp_size == 1 and not is_free:
            return CHUNKS, plan
        model, found = question.model_of(self.layout), dict[str, ChunkPlan]()
        plan_s = step_s(model, gathered_first(plan))  # as the plans of all replicas begin
        if plan.sp_size > 1:
            found[LOCAL] = plan_replica(
                seq_lens, options, num_layers=model.shape.num_layers,
                stages=plan.stages if self.layout.pp > 1 else (), sp_size=plan.sp_size,
                frozen_layers=frozen_layers, local_in=model.shape,
            )  # fmt: skip
        if is_free and self.layout.pp > 1:
            step = replace(
                question, seq_lens=tuple(seq_lens), sequences_per_step=0, tokens_per_step=None
            )
            is_free = plan_s > _BADLY * least_s(Space(step, replace(self.layout, dp=1)))
        for name in names if is_free else ():
            # errors mean that none of its plans fits or is faster
            with suppress(UserError, PlanError, StopIteration):
                found[name] = self._plan_of(name, seq_lens, plan_s)
        # other replicas may use the options, and all replicas of a step have the same stages
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
        """Return the plan of the named method, in a tenth less memory for each time that chunks
        were halved after an out-of-memory step."""
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
        """Return the plan of a method with own chunks. Its `offload` is that of the options, as all
        replicas must have the same one; the plan itself offloads nothing."""
        question = replace(self.question, seq_lens=tuple(seq_lens), beat_s=beat_s)
        plan = next(iter(candidates_of(method)(question, self.layout))).plan_of(seq_lens)
        return replace(plan, offload=self.options.offloading)


def best_plan(
    seq_lens: Sequence[int], answer: Answer, options: ChunkOptions | None = None
) -> tuple[str, ChunkPlan]:
    """Return the names of the replicas' planners and the plan of a step over these sequences, as a
    run would plan it. `options`: chunk options to use instead of the answer's."""
    question, chosen = answer.asked, answer.best
    if chosen.layout == ONE_DEVICE:
        return chosen.method, chosen.plan_of(seq_lens)
    space, options = Space(question, chosen.layout), options or answer.options
    work_s = question.model.sequence_seconds(seq_lens)
    dealt = by_cost(work_s, min(chosen.layout.dp, len(seq_lens)))
    asked, plan_of = BatchPlans(question, chosen.layout, options), space.plan_of(options)

    @cache
    def planned(lens: tuple[int, ...]) -> tuple[str, ChunkPlan]:
        return asked.best_plan(lens, plan_of(lens), options)

    found = [planned(tuple(seq_lens[i] for i in own)) for own in dealt]
    names, plans = dict.fromkeys(name for name, _ in found), [plan for _, plan in found]
    return ", ".join(names), join_kept(plans, dealt, seq_lens, chosen.layout.dp)
