"""One search over layouts, methods and their options, for `furlong plan` and `furlong train`.

    answer = search(Question([seq_lens], model, limits, num_devices=8))
    answer.best.layout, answer.best.step_s

This is a best-first search. Layouts are opened in order of a lower bound on step time, and
candidates of all open layouts are tried in order of their estimates. In each layout the first few
that fit are timed by the simulated clock over the joined plans of all replicas. Methods that make
their own chunks are tried last, mostly in layouts in which chunk options fit. They are chosen only
if they are faster than the best plan so far. Work is bounded by counts, not by time, so that equal
questions have equal answers.

During training `BatchPlans` asks the same planners for each batch, and takes the fastest plan.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from furlong.report.patience import Tell
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
"""Multiple of `_MAX_ACTIONS` on several devices, where the actions of the plan that needs most
memory and of each step's busiest replica count. After half of it, one plan per layout is timed.
"""
_CELL_ACTIONS = 6
"""Most actions per cell of a pipeline: three passes, and messages."""
_MOST_ASKED = 128
"""Most devices for which `places` plans in layouts in which no chunk options fit: with 1,024 it
takes a minute."""
_MOST_REFUSED = 3
"""Number of a layout's plans that do not fit after which the candidate that needs least memory is
checked."""
_MOST_FITTING = 4
"""Most fitting plans to time in each layout of several devices, and for each chunk size at which
replicas wait for each other."""
_WAITING = 0.05
"""Share of the busiest replica's seconds above which a step's additional time counts as waiting."""
LOCAL = "local sequences"
"""Name of plans in which whole sequences stay on one process of a pool if that balances work."""


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
    """Options that may be given although the method has own chunks."""


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
    """Return the outcome of a search for the fastest plan of `question.method` that fits.

    On one device, of all plans that are about as fast as the fastest, the one that needs least
    memory is chosen. If no plan fits, a second search allows four times as many chunks and (chunk,
    stage) cells. If still none fits, both searches are repeated with weights, gradients and
    optimizer in CPU memory, where the user's options allow this. If none fits even so,
    `Answer.tried` is empty.

    `tell`: called with words for the progress. `may_cut_short`: whether a KeyboardInterrupt ends
    the search with the plans so far. Raises ConfigError for sizes that no layout has.
    """
    started_s, tell = time.monotonic(), tell or (lambda words: None)
    own = METHODS.get(question.method)
    odd = [name for name in question.options if own and name not in own.takes_options]
    if own and own.has_own_chunks and odd:
        names = " and ".join(question.keys_of(odd))
        has_layout = any(map(own.takes, question.layouts()))
        sizes = "" if has_layout else f" and, on several devices, {own.sizes}"
        raise ConfigError(
            given=f"{names} with chunks.method = {question.method}",
            required=f"no options of chunks: {question.method} makes chunks of its own, which go"
            " through all layers",
            source="chunks",
            change=f"leave {names} out{sizes}, or remove chunks.method",
        )
    trials, on_device = _searched(question, tell, may_cut_short), None
    if not trials.fitting and question.may_offload_weights:
        away = _searched(question.offloading(), tell, may_cut_short)
        if not away.fitting:
            _try_least(away)
        least = min((one.needs for one in away.refused), key=away.nearness, default=Needs(0))
        if away.fitting or [*question.limits.exceeded(least)] in (["cpu"], ["device"]):
            trials, on_device = away, _answer(trials, started_s)
    if not trials.fitting and on_device is None:
        _try_least(trials)
    return replace(_answer(trials, started_s), on_device=on_device)


def _searched(question: Question, tell: Tell, may_cut_short: bool) -> Trials:
    """Return the results of a search or, if nothing fits, of a second one with finer chunks."""
    trials = Trials(question, tell)
    try:
        _run(trials)
    except KeyboardInterrupt:
        if not (may_cut_short and trials.fitting):
            raise
        trials.is_cut_short = True
    if trials.fitting:
        return trials
    most_chunks, most_cells = 4 * question.most_chunks, 4 * question.most_cells
    finer = Trials(replace(question, most_chunks=most_chunks, most_cells=most_cells), tell)
    if not has_own_chunks(question.method):  # those already try the finest cuts
        _run(finer)
    finer.error = trials.error
    return finer


def own_method(space: Space) -> str | None:
    """Return the name of the method that `auto` tries in a layout in addition to chunk options:
    `places` without a pipeline, `infinipipe` in a pipeline. Both cut sequences into chunks
    themselves. (Skrull does, too, but its plans are special cases of those of `places`.)

    Return None on one device, and if the user has named a method or set chunk options (in a
    pipeline, other than reshard).
    """
    question, layout = space.question, space.layout
    others = [name for name in question.options if name != "reshard" or layout.pp == 1]
    if question.method != "auto" or others or layout == ONE_DEVICE:
        return None
    return "places" if layout.pp == 1 else "infinipipe"


def candidates_of(name: str) -> Candidates:
    """Return the function that yields a method's candidates; for `auto` it is `chunks`."""
    return METHODS[name].candidates if name in METHODS else chunks


def has_own_chunks(name: str) -> bool:
    """Whether a method cuts sequences itself, so that its plans have no chunk options."""
    return name in METHODS and METHODS[name].has_own_chunks


@dataclass
class Trials:
    """The candidates of a search, and the results of those that have been tried."""

    question: Question
    tell: Tell
    offered: list[Candidate] = field(default_factory=list)
    fitting: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)
    known: dict[object, float | None] = field(default_factory=dict)
    """`_key_of(candidate)` -> seconds of its step; None if it does not fit."""
    too_large: dict[Layout, int] = field(default_factory=dict)
    """Bytes by which the state alone exceeds the limit, in layouts in which it does."""
    bounds_s: dict[Layout, float] = field(default_factory=dict)
    """Lower bounds on step time, if there are any."""
    waiting: set[tuple[Layout, int]] = field(default_factory=set)
    """(layout, chunk size) at which replicas wait for each other. Estimates ignore such waits, so
    more plans of these sizes are timed."""
    num_actions: int = 0
    """Actions simulated so far, the measure of a search's work."""
    error: Exception | None = None
    """Error of a method with own chunks that has no plan."""
    is_cut_short: bool = False

    @property
    def is_one(self) -> bool:
        return self.question.num_devices == 1

    @property
    def samples(self) -> bool:
        """Whether chunks are sampled. Estimates and bounds then overestimate: they count all
        backwards."""
        return "sample" in self.question.given

    @property
    def best_s(self) -> float:
        return min((one.step_s for one in self.fitting), default=inf)

    def bound_s(self, space: Space) -> float:
        return self.bounds_s.get(space.layout, 0.0)

    def hold(self, needs: Needs) -> bool:
        return self.question.limits.hold(needs)

    def nearness(self, needs: Needs) -> tuple[int, int]:
        """Return a sort key (first, lacking), which is least for the plan closest to fitting.

        `lacking` is the bytes above the limits, summed over all memories. `first` is 0 if weights
        are on the device. If weights are in CPU memory, `first` is the bytes above the limits
        outside CPU memory. Weights are there because the device cannot hold them, so a plan that
        takes less RAM but more of the device is not closer.
        """
        limits = self.question.limits
        lacking = limits.lacking(needs)
        if not self.question.model.training.offload_weights:
            return 0, lacking
        return replace(limits, cpu_bytes=None).lacking(needs), lacking

    def walked(self, candidate: Candidate, plans: Sequence[ChunkPlan]) -> Candidate:
        """Return the candidate with its needs raised to the simulated peak bytes of `plans`."""
        space = candidate.space
        memory, ranks = space.model.memory(), [*range(candidate.layout.pp)]
        if candidate.longest and space.stages:
            # later stages of a kind have equal cells, and hold fewer of them
            ranks = sorted(count_kinds(space.model.shape, space.stages)[0])
        curves = [memory.curve(plan, rank) for plan in plans for rank in ranks]
        self.num_actions += _num_actions(plans)
        needs = most_of((candidate.needs, *map(needs_of, curves)))
        if needs == candidate.needs:
            return candidate
        curve = max(curves, key=lambda curve: self.question.limits.lacking(needs_of(curve)))
        return replace(candidate, needs=needs, peak=curve.peak)

    def refuse(self, candidate: Candidate) -> None:
        self.refused.append(candidate)
        self.known[_key_of(candidate)] = None

    def accept(self, candidate: Candidate, step_s: float) -> float:
        self.fitting.append(replace(candidate, step_s=step_s))
        self.known[_key_of(candidate)] = step_s
        return step_s

    def say(self, layout: Layout, method: str = "") -> None:
        best = f"best {format_seconds(self.best_s)}" if self.fitting else "none fits so far"
        under_way = method if self.is_one else f"{method} {layout}".strip()
        count = count_words(len(self.offered), "candidate")
        self.tell(", ".join(filter(None, (under_way, count, best))))


def _run(trials: Trials) -> None:
    """In each layout, try candidates that may be faster than the best plan. If the best plan turns
    out not to fit a whole step, start again without it, as it made the search skip slower plans.

    If the user has not set reshard, a layout reshards (frees the weights of stages) if its state
    does not fit otherwise. Other layouts reshard only if nothing fits, or if even the best plan is
    far slower than the layout's lower bound on step time.
    """
    asked, first, later = trials.question, list[Space](), list[Space]()
    for layout in walkable(asked):
        ways = [asked]
        if asked.may_reshard(layout):
            ways = [asked.resharding(layout, reshard) for reshard in (False, True)]
        lacking_bytes = [way.state_bytes(layout) - asked.limits.limit_bytes for way in ways]
        some = zip(ways, lacking_bytes, strict=True)
        held = [Space(way, layout) for way, n in some if n <= 0 or trials.is_one]
        first, later = first + held[:1], later + held[1:]
        if not held:
            trials.too_large[layout] = lacking_bytes[-1]
        elif not (trials.is_one or trials.samples):
            trials.bounds_s[layout] = least_s(Space(asked, layout))
    for spaces in (first, later):
        if trials.fitting:  # kept ones that recompute, say, where freed ones leave room for graphs
            is_quick = asked.num_devices <= _MOST_ASKED and not trials.samples
            best_s = trials.best_s if is_quick else 0.0
            spaces = [space for space in spaces if _BADLY * trials.bound_s(space) < best_s]
        if spaces:
            before, trials.num_actions = [*trials.offered], 0
            _try_all(trials, spaces)
            while _refuse_partial(trials):
                trials.offered[:] = before
                _try_all(trials, spaces)


def _try_all(trials: Trials, spaces: Sequence[Space]) -> None:
    question, ordered = trials.question, sorted(spaces, key=trials.bound_s)
    method = pairs if question.calls else candidates_of(question.method)
    walks = [
        ((False, trials.bound_s(space)), i, _walk(trials, space, method))
        for i, space in enumerate(ordered)
    ]
    while walks:
        # the priority of an unopened layout is its bound, of others the next estimate
        reached, i, walk = heappop(walks)
        if (following := next(walk, None)) is not None:
            heappush(walks, (max(reached, following), i, walk))
    # methods with own chunks take long, and have to be faster than the best plan
    for space in ordered:
        if (name := own_method(space)) is None:
            continue
        beside = _beside(trials, space.layout)
        if space.layout.pp > 1:
            is_worth_it = bool(beside) and beside[0].step_s > _BADLY * trials.bound_s(space)
        else:  # a pool's chunk options may be slow where places are not
            is_worth_it = bool(beside) or question.num_devices <= _MOST_ASKED
        if is_worth_it:
            deque(_walk(trials, space, candidates_of(name)), maxlen=0)


def _refuse_partial(trials: Trials) -> bool:
    """Refuse the best plan if it fits the timed sequences, but not a whole step. Return whether it
    was refused."""
    if (best := _best(trials)) is None:
        return False
    at = trials.fitting.index(best)  # keep its position: ties are resolved by order
    try:
        whole = trials.walked(best, _whole_plans(trials.question, best))
    except (UserError, PlanError) as error:
        trials.error, trials.known[_key_of(best)] = error, None
    else:
        if trials.hold(whole.needs):
            trials.fitting[at] = whole
            return False
        trials.refuse(whole)
    del trials.fitting[at]
    return True


def _whole_plans(question: Question, candidate: Candidate) -> list[ChunkPlan]:
    """Return plans of whole steps that must fit in memory, in addition to the longest sequence.

    Such plans are needed in a pipeline, with reshard, and for a named method that makes its own
    chunks. In all other cases the longest sequence decides, and the list is empty. If `auto` chose
    a method that makes its own chunks, in a pipeline, the plans use the chunk options that replace
    the method where it has no plan.
    """
    space, is_named = candidate.space, candidate.method == question.method
    plan_of: PlanOf = candidate.trial
    if candidate.options.reshard and space.layout.pp == 1:
        return [plan_of(lens) for lens in space.whole]
    if space.layout.pp == 1 and (candidate.longest or not is_named):
        return []
    if not candidate.longest:
        plan_of = _asked(candidate) if is_named else space.plan_of(candidate.options)
    num_chunks = _MAX_ACTIONS * _MOST_TIMES // (4 * _CELL_ACTIONS * space.layout.pp)
    most = StepSize(tokens=num_chunks * candidate.options.size)  # of the longest, at least one
    return [plan_of(tuple(most.cut(sorted(lens, reverse=True))[0])) for lens in space.whole]


def _asked(candidate: Candidate) -> PlanOf:
    """Return the plan function of the candidate's method, without a step time to beat."""
    (asked,) = candidates_of(candidate.method)(replace(candidate.space, beat_s=inf))
    return asked.plan_of


def _beside(trials: Trials, layout: Layout) -> list[Candidate]:
    """Return the candidates of a layout that fit and whose chunk options can be used beside a
    method that makes its own chunks, the fastest first.

    One replica of a step may run such a method while another one runs chunk options. All replicas
    must then have the same stages, and the same offload. These methods keep K,V on the device, so
    the options must do so, too.
    """
    fitting = [
        one
        for one in trials.fitting
        if one.layout == layout
        and one.longest
        and one.options.offloading.kv == "none"
        and (layout.pp > 1 or not one.options.reshard)
        and (layout.dp == 1 or one.options.order == "chunk-first")
    ]
    return sorted(fitting, key=lambda one: one.step_s)


def _options_beside(trials: Trials, candidate: Candidate) -> ChunkOptions:
    """Return the chunk options that a run uses if `candidate`, a method that makes its own chunks,
    is chosen. The run needs them for evaluations, and for batches that the method has no plan for.

    They are the fastest options that fit, if any have been tried (`_beside`). Otherwise a few
    options are simulated, in the order of the bytes that they lack by their bounds, then of
    estimated time. The first that fit are returned or, if none fit, the first of all.
    """
    if beside := _beside(trials, candidate.layout):
        return beside[0].options
    lacking = trials.question.limits.lacking
    offered = [
        one
        for one in chunks(replace(candidate.space, beat_s=inf))
        if one.options.offloading.kv == "none" and one.options.order == "chunk-first"
    ]
    offered.sort(key=lambda one: lacking(one.least))
    for one in offered[:_MOST_REFUSED]:
        if trials.hold(trials.walked(one, [one.trial(tuple(one.longest))]).needs):
            return one.options
    return offered[0].options


def _walk(trials: Trials, space: Space, method: Candidates) -> Iterator[tuple[bool, float]]:
    """Try the candidates of a method in a layout until no further one can be faster. Before each
    try yield the candidate's priority (whether it takes long to simulate, its estimated seconds),
    so that the caller can try other layouts first."""
    if trials.bound_s(space) >= trials.best_s:
        return
    layout, seconds = space.layout, defaultdict[int, set[float]](set)
    """Distinct step times of plans that fit, by chunk size if replicas wait at it, else under 0.
    Options without effect give the same plan and time, which counts once."""
    fitting: set[ChunkOptions] = set()
    """Options of fitting plans without offload: with offload they would not be faster."""
    hopeless: set[bool] = set()
    """Values of `_is_long` for which even the candidate that needs least memory does not fit."""
    num_refused = 0

    def alike(size: int) -> set[float]:
        return seconds[size if (layout, size) in trials.waiting else 0]

    trials.say(layout)
    if len(space.question.steps) == 1:
        space = replace(space, beat_s=trials.best_s)
    offered = list(method(space))
    trials.offered += offered
    hopeful = sorted((one for one in offered if trials.hold(one.least)), key=_is_long)
    for candidate in hopeful:
        is_long, size = _is_long(candidate), candidate.options.size
        if is_long in hopeless:
            continue
        yield is_long, candidate.estimate_s
        if is_long and trials.fitting:
            return
        on_device = replace(candidate.options, offload="none")
        if on_device in fitting or _is_done(trials, candidate, len(alike(size))):
            continue
        trials.say(layout, candidate.method)
        if (key := _key_of(candidate)) in trials.known:
            fits_s = trials.known[key]
        else:
            fits_s = _try(trials, candidate, trials.best_s)
        if fits_s is not None:
            alike(size).add(fits_s)
            fitting.add(on_device)
            continue
        num_refused += 1
        is_hard = num_refused == _MOST_REFUSED and not fitting
        if is_hard and candidate.longest and not trials.is_one:
            leanest, num_actions = (
                min(
                    (one for one in hopeful if _is_long(one) == is_long),
                    key=lambda one: (
                        one.options.size,
                        one.least,
                    ),  # bounds of large chunks are loose
                ),
                trials.num_actions,
            )
            if (key := _key_of(leanest)) not in trials.known:
                leanest = trials.walked(leanest, [leanest.trial(tuple(leanest.longest))])
                trials.num_actions = num_actions  # this check does not count as work
                if not trials.hold(leanest.needs):
                    trials.refuse(leanest)
            if trials.known.get(key, 0.0) is None:
                hopeless.add(is_long)  # nothing else fits


def _is_done(trials: Trials, candidate: Candidate, num_fitting: int) -> bool:
    estimate_s = candidate.estimate_s
    if not trials.is_one:
        work = trials.num_actions / (_MOST_TIMES * _MAX_ACTIONS)
        is_slower = estimate_s >= trials.best_s and not trials.samples
        most = _MOST_FITTING if work < 0.5 else 1
        return work > (2 if trials.fitting else 1) or is_slower or num_fitting >= most
    if trials.num_actions > _MAX_ACTIONS * (1 if trials.fitting else 2):
        return True
    if len(trials.fitting) < 2 or trials.samples:
        return False
    return estimate_s > trials.best_s * (1 + SLACK)


def _is_long(candidate: Candidate) -> bool:
    """Whether simulating a candidate would take most of the work of a search over several devices.
    Such candidates are tried only if no others fit."""
    space, options = candidate.space, candidate.options
    if space.layout == ONE_DEVICE or not candidate.longest:
        return False
    num_stages = len(space.stages or stages_of(space.model.shape.num_layers, options))
    num_tokens = max(sum(candidate.longest), *map(sum, space.busiest))
    num_cells = num_stages * num_tokens / options.size
    return num_cells * _CELL_ACTIONS > _MOST_TIMES * _MAX_ACTIONS / 2


def _try(trials: Trials, candidate: Candidate, beat_s: float) -> float | None:
    """Simulate a candidate. Return the mean seconds of a step, or None if its plans do not fit in
    memory.

    If the busiest replica alone takes `beat_s` or longer, the other replicas are not planned, and
    the seconds of the busiest one are returned, a lower bound. For a method that makes its own
    chunks, None is returned in this case, and if it has no plan.
    """
    space, layout, question = candidate.space, candidate.layout, trials.question
    exact, sampling = cache(candidate.trial), candidate.options.sampling
    plan_of: PlanOf = cache(lambda lens: one_draw(exact(lens), sampling))
    if candidate.longest:
        plan = exact(tuple(candidate.longest))  # any draw may be of all chunks
        candidate = trials.walked(candidate, [plan])
        if not trials.hold(candidate.needs):
            trials.refuse(candidate)
            return None
        if trials.is_one:
            seconds = candidate.estimate_s
            is_plain = candidate.options.offloading == ON_DEVICE and sampling is None
            is_plain = is_plain and not space.model.training.offload_weights
            if not is_plain and not question.calls:
                seconds = space.busiest_s(plan_of)
                trials.num_actions += _num_actions([plan])
            return trials.accept(candidate, seconds)
    try:
        if candidate.method == question.method and not candidate.longest:
            _asked(candidate)([question.longest])  # there must be a plan of it, however slow
        alone_s = inf if layout.dp == 1 else space.busiest_s(plan_of)
        if layout.dp > 1 and alone_s >= beat_s:
            return alone_s if candidate.longest else None
        # planners with own chunks take long, so their plans may be abandoned at `beat_s`
        step_s = space.step_s(plan_of, inf if candidate.longest else beat_s)
    except (UserError, PlanError) as error:
        if candidate.longest:
            raise
        trials.error = error  # no plan of the method fits, or none is faster
        return None
    if step_s == inf:
        return None
    plans = [plan_of(lens) for lens in sorted(set(space.busiest))]
    if not candidate.longest:
        candidate = trials.walked(candidate, plans)
        candidate = replace(candidate, options=_options_beside(trials, candidate))
        return trials.accept(candidate, step_s)
    trials.num_actions += _num_actions(plans)
    if (layout.pp > 1 or candidate.options.reshard) and step_s < trials.best_s:
        # early stages hold chunks of more sequences than `candidate.longest` has
        whole = trials.walked(candidate, plans)
        if not trials.hold(whole.needs):
            trials.refuse(whole)
            return None
    if step_s > alone_s * (1 + _WAITING):
        trials.waiting.add((layout, candidate.options.size))
    return trials.accept(candidate, step_s)


def _num_actions(plans: Iterable[ChunkPlan]) -> int:
    return sum(len(own) for plan in plans for own in plan.actions)


def _try_least(trials: Trials) -> None:
    """Simulate the candidates that may be closest to fitting, after a search in which nothing fits.
    The results are in `trials.refused`; error messages name the closest one. If a candidate does
    fit, the search has a plan after all."""
    most = trials.num_actions + 2 * _MAX_ACTIONS
    bounded = [one for one in trials.offered if one.longest]
    bounded.sort(key=lambda one: (trials.nearness(one.least), sum(one.least), one.estimate_s))
    for candidate in bounded:
        nearest = min((trials.nearness(one.needs) for one in trials.refused), default=None)
        first, short = trials.nearness(candidate.least)
        near = _NEAR * sum(candidate.least) if short else 0  # those that may fit are all tried
        if trials.fitting or (nearest and nearest <= (first, short + near)):
            break
        if nearest and trials.num_actions > most:
            break
        if _key_of(candidate) not in trials.known:
            _try(trials, candidate, inf)
            while _refuse_partial(trials):
                pass


def _best(trials: Trials) -> Candidate | None:
    """Return the candidate that the search chooses, or None if none fits."""

    def simplest(one: Candidate) -> tuple[object, ...]:
        layout = one.layout
        return (one.needs, one.step_s) if trials.is_one else (layout.pp, layout.sp, one.step_s)

    return min(_alike(trials), key=simplest, default=None)


def _alike(trials: Trials) -> list[Candidate]:
    """Return the candidates about as fast as the fastest one; on one device only those with the
    same order, stages and offload."""
    wanted = [one for one in trials.fitting if one.method == trials.question.method]
    wanted = wanted or trials.fitting
    fastest_s = min((one.step_s for one in wanted), default=inf)
    slack = SLACK if trials.is_one else LAYOUT_SLACK
    near = [one for one in wanted if one.step_s <= fastest_s * (1 + slack)]
    if not trials.is_one or not near:
        return near
    equal = [one for one in near if one.step_s <= fastest_s * (1 + _EQUAL)]
    fastest = min(equal, key=lambda c: (len(c.options.offloading.targets), c.needs))
    return [one for one in near if _order_of(one) == _order_of(fastest)]


def _answer(trials: Trials, started_s: float) -> Answer:
    """Return the outcome, including the layouts in which nothing was tried."""
    best, question = _best(trials), trials.question
    tried = sorted(trials.fitting, key=lambda one: (one is not best, one.step_s))
    opened = {one.layout for one in (*trials.fitting, *trials.refused)}
    too_large, slower = dict(trials.too_large), dict[Layout, float]()
    for candidate in trials.offered:
        if candidate.longest and (layout := candidate.layout) not in opened:
            lacking_bytes = question.limits.lacking(candidate.least)
            too_large[layout] = min(lacking_bytes, too_large.get(layout, lacking_bytes))
            if not lacking_bytes:
                slower[layout] = min(candidate.estimate_s, slower.get(layout, inf))
    return Answer(
        question=question,
        tried=tuple(tried),
        refused=tuple(sorted(trials.refused, key=lambda one: trials.nearness(one.needs))),
        too_large=tuple((layout, n) for layout, n in too_large.items() if n),
        slower=tuple(sorted(slower.items(), key=lambda pair: pair[1])),
        error=trials.error if question.method != "auto" and not tried else None,
        alike=len(_alike(trials)),
        num_pruned=len(trials.offered) - len(tried) - len(trials.refused),
        seconds=time.monotonic() - started_s,
        is_cut_short=trials.is_cut_short,
    )


def walkable(question: Question) -> list[Layout]:
    """Return the layouts that the options allow; those with idle replicas only if there are no
    others. Raises ConfigError if there is none."""
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
    return [one for one in found if one.dp <= (question.size.sequences or 0)] or found


def _key_of(candidate: Candidate) -> tuple[str, Layout, ChunkOptions | None]:
    """Return a key that is unique to a candidate in a search."""
    options = candidate.options if candidate.longest else None  # own chunks: options are a fallback
    return candidate.method, candidate.layout, options


def _order_of(candidate: Candidate) -> tuple[object, ...]:
    options = candidate.options
    return options.order, options.stage_layers, options.offloading


@dataclass(frozen=True)
class BatchPlans:
    """Planners of single batches, whose plans may replace those of a run's chunk options."""

    space: Space
    """Question of the run, with its model, limits, given options and method, in its layout."""
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
        """Return (name, plan) of the method predicted to be fastest on one replica's sequences.
        This is `plan`, which `options` make, unless another plan is faster by more than
        `LAYOUT_SLACK`. If the user has named a method with own chunks, its plan is returned;
        UserError is raised if it has none."""
        question, layout, model = self.space.question, self.space.layout, self.space.model
        if has_own_chunks(question.method):
            return question.method, self._plan_by_name(seq_lens, plan, options)
        if question.method != "auto":
            return question.method, plan
        name, found = own_method(self.space), dict[str, ChunkPlan]()
        # after an out-of-memory step other plans that are predicted to fit are not trusted
        is_free = options == self.options and not self.has_shrunk and not plan.frozen_stages
        # without a pipeline, methods with own chunks keep all weights
        is_free = is_free and (layout.pp > 1 or not options.reshard)
        is_free = is_free and options.offloading.kv == "none" and name is not None
        if plan.sp_size == 1 and not is_free:
            return CHUNKS, plan
        plan_s = step_s(model, gathered_first(plan))  # as the plans of all replicas begin
        if plan.sp_size > 1:
            found[LOCAL] = plan_replica(
                seq_lens, options, num_layers=model.shape.num_layers,
                stages=plan.stages if layout.pp > 1 else (), sp_size=plan.sp_size,
                frozen_layers=frozen_layers, local_in=model.shape,
            )  # fmt: skip
        if is_free and layout.pp > 1:
            alone = Space(question.of_step(seq_lens), replace(layout, dp=1))
            is_free = plan_s > _BADLY * least_s(alone)
        if is_free and name:
            # errors mean that none of its plans fits or is faster
            with suppress(UserError, PlanError, StopIteration):
                found[name] = self._plan_of(name, seq_lens, plan_s)
        # other replicas may use the options, and all replicas of a step have the same stages
        seconds = {
            name: step_s(model, gathered_first(one))
            for name, one in found.items()
            if layout.dp == 1 or one.stages == plan.stages
        }
        best = min(seconds, key=seconds.__getitem__, default=CHUNKS)
        if seconds.get(best, inf) < plan_s * (1 - LAYOUT_SLACK):
            return best, found[best]
        return CHUNKS, plan

    def _plan_by_name(
        self, seq_lens: Sequence[int], plan: ChunkPlan, options: ChunkOptions
    ) -> ChunkPlan:
        """Return the plan of the method that the user has named. A run halves its chunks after a
        step that is out of memory. This method makes its own chunks, so its memory budget falls
        instead: by a tenth for each time that chunks were halved to those of `options`."""
        question = self.space.question
        method, limits = question.method, question.limits
        if plan.frozen_stages:
            raise ConfigError(
                given=f"chunks.method = {method}, and {count_words(plan.frozen_stages, 'stage')}"
                " without trained weights",
                required="trained weights on every stage",
                source="chunks.method, and the model's frozen weights or adapters",
                change="leave chunks.method out, or train weights of the first layers too",
            )
        times = log2(max(1.0, self.options.size / options.size))
        less = replace(limits, device_bytes=int(limits.device_bytes * _LESS_AGAIN**times))
        space = replace(self.space, question=replace(question, limits=less))
        return replace(self, space=space)._plan_of(method, seq_lens, inf)

    def _plan_of(self, method: str, seq_lens: Sequence[int], beat_s: float) -> ChunkPlan:
        """Return the plan of a method with own chunks. The method offloads nothing, but `offload`
        of its plan is set to that of the chunk options, as the plans of all replicas must have the
        same."""
        asked = Space(self.space.question.of_step(seq_lens), self.space.layout, beat_s)
        plan = next(iter(candidates_of(method)(asked))).plan_of(seq_lens)
        return replace(plan, offload=self.options.offloading)


def best_plan(
    seq_lens: Sequence[int], answer: Answer, options: ChunkOptions | None = None
) -> tuple[str, ChunkPlan]:
    """Return (names of the methods that plan the replicas, plan of a step over these sequences), as
    a run would plan it. `options`: chunk options to use instead of the answer's."""
    chosen, space, options = answer.best, answer.best.space, options or answer.options
    if space.layout == ONE_DEVICE:
        return chosen.method, chosen.plan_of(seq_lens)
    work_s = space.question.model.sequence_seconds(seq_lens)
    dealt = by_cost(work_s, min(space.layout.dp, len(seq_lens)))
    asked, plan_of = BatchPlans(space, options), space.plan_of(options)

    @cache
    def planned(lens: tuple[int, ...]) -> tuple[str, ChunkPlan]:
        return asked.best_plan(lens, plan_of(lens), options)

    found = [planned(tuple(seq_lens[i] for i in own)) for own in dealt]
    names, plans = dict.fromkeys(name for name, _ in found), [plan for _, plan in found]
    return ", ".join(names), join_kept(plans, dealt, seq_lens, space.layout.dp)
