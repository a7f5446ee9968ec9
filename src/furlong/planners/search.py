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
from dataclasses import dataclass, replace
from math import inf, log2

from furlong.cost.model import CostModel, update_s
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.plan import ONE_DEVICE, ChunkPlan, Layout
from furlong.planners import chunkflow, fpdt, infinipipe, places, seco, skrull
from furlong.planners.candidates import (
    CHUNKS,
    Dealt,
    Space,
    chunks,
    deal_steps,
    least_s,
    num_lowered,
    space_of,
)
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica, stages_of
from furlong.planners.predict import Needs, needs_of, step_s
from furlong.planners.question import Answer, Candidate, Candidates, Question, Trial
from furlong.units import count_words, format_seconds

SLACK = 0.02
"""Plans whose times differ by less are alike: no prediction is better."""
LAYOUT_SLACK = 1e-4
"""The same of plans in different layouts, which the clock compares as they will run."""
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
"""Methods that make chunks of their own: `auto` asks them beside all dials of chunks, among which
is what the others offer."""


def search(question: Question, tell: Tell | None = None) -> Answer:
    """The plans of `question.method` that fit, the fastest first, of those alike on one device the
    one that needs least memory. Where none fits, not with four times as many chunks and cells
    either, nothing is in `tried`.

    `tell` is called with words for how far it is. Raises ConfigError for sizes that no layout has.
    """
    started_s = time.monotonic()
    if question.method in _OWN_CHUNKS and question.dials:
        raise _refuse_dials(question)
    state = _Search(question, tell or (lambda words: None))
    state.run(own_methods(question))
    if not state.fitting:
        finer = replace(
            question, most_chunks=4 * question.most_chunks, most_cells=4 * question.most_cells
        )
        error = state.error
        state = _Search(finer, tell or (lambda words: None))
        state.run(own=[])  # methods with chunks of their own cut as finely as they can
        state.error = error
    if not state.fitting:
        state.try_least()
    return state.answer(started_s)


def _refuse_dials(question: Question) -> ConfigError:
    names = [f"chunks.{name}" for name in question.dials]
    return ConfigError(
        given=f"{', '.join(names)} with chunks.method = {question.method}",
        required=f"no dials: {question.method} makes chunks of its own",
        source="chunks",
        change=f"leave {' and '.join(names)} out, or chunks.method",
    )


def own_methods(question: Question) -> list[str]:
    """Methods that make their own chunks among those that a question leaves."""
    if question.method == "auto":
        return [] if question.dials else list(_OWN_CHUNKS)
    return [question.method] if question.method in _OWN_CHUNKS else []


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._question, self._limits, self._tell = question, question.limits, tell
        self._layouts = walkable(question)
        self._is_one = self._layouts == [ONE_DEVICE]
        self.fitting: list[Trial] = []
        self._refused: list[Trial] = []
        self._too_large: list[tuple[Layout, int]] = []
        self._slower: dict[Layout, float] = {}
        self._busiest: dict[Layout, float] = {}
        """Seconds of steps that were timed on their busiest replica alone, and are slower."""
        self._waiting: set[tuple[Layout, int]] = set()
        """Chunk sizes with which replicas wait for each other: no estimate knows, so others may be
        faster."""
        self._found: list[Candidate] = []
        self._num_actions = 0
        self.error: Exception | None = None
        """Why a method that fits its plans itself has none."""
        self._spaces: dict[Layout, tuple[Space, Dealt]] = {}

    def run(self, own: Sequence[str]) -> None:
        """Try the methods with chunks of their own, and all dials unless one of them is named."""
        bounded = []
        for layout in self._layouts:
            space = space_of(self._question, layout)
            self._spaces[layout] = space, deal_steps(space)
            state_bytes = self._question.state_bytes(layout)
            if not self._is_one and state_bytes > self._limits.limit_bytes:
                self._too_large.append((layout, state_bytes - self._limits.limit_bytes))
            else:
                bounded.append((0.0 if self._is_one else self._least_s(layout), layout))
        bounded.sort(key=lambda pair: pair[0])
        # places first, for they are often the fastest; planners that search last, to beat the best
        for method in (name for name in own if name != "infinipipe"):
            for bound_s, layout in bounded:
                self._walk(layout, bound_s, METHODS[method])
        if self._question.method not in _OWN_CHUNKS:
            for bound_s, layout in bounded:
                self._walk(layout, bound_s, METHODS.get(self._question.method, chunks))
        if "infinipipe" in own:
            for bound_s, layout in bounded:
                self._walk(layout, bound_s, infinipipe.candidates)
        self._find_dials()

    @property
    def _best_s(self) -> float:
        return min((trial.step_s for trial in self.fitting), default=inf)

    def _least_s(self, layout: Layout) -> float:
        """Seconds below which no step of the layout gets, on average."""
        space, dealt = self._spaces[layout]
        stages = space.stages or (space.model.shape.num_layers,)
        seconds = sum(
            least_s([space.seq_lens[i] for i in own[0]], stages, layout.sp, space.model)
            for own in dealt
        )
        return seconds * space.sequences_per_step / len(space.seq_lens)

    def _walk(self, layout: Layout, bound_s: float, method: Candidates) -> None:
        """Try the candidates of a method in a layout until no further one can be faster."""
        best_s = self._best_s
        if bound_s >= best_s:
            self._slower[layout] = bound_s
            return
        self._tell_found(bound_s)
        num_steps = len(self._spaces[layout][1])
        beat_s = best_s if num_steps == 1 else inf
        seconds: dict[int, set[float]] = defaultdict(set)
        """Estimates of the plans that fit, by chunk size: dials that do not act make the same plan
        again."""
        fitting: set[ChunkOptions] = set()
        """Their dials with all on the device: what is offloaded for no need gains nothing."""
        for candidate in method(replace(self._question, beat_s=beat_s), layout):
            self._found.append(candidate)
            self._tell_found(bound_s)
            on_device = replace(candidate.options, tier="device")
            if on_device in fitting or not self._may_fit(candidate):
                continue
            size = candidate.options.size
            known = [size] if (layout, size) in self._waiting else [
                other for other in seconds if (layout, other) not in self._waiting
            ]  # fmt: skip
            num_fitting = sum(len(seconds[other]) for other in known)
            if not self._is_done(candidate, num_fitting) and self._try(candidate):
                seconds[size].add(candidate.estimate_s)
                fitting.add(on_device)

    def _tell_found(self, bound_s: float) -> None:
        best = f"best {format_seconds(self._best_s)}" if self.fitting else "none fits so far"
        left = f"; what is left takes at least {format_seconds(bound_s)}" if bound_s else ""
        self._tell(f"{count_words(len(self._found), 'candidate')}, {best}{left}")

    def _is_done(self, candidate: Candidate, num_fitting: int) -> bool:
        estimate_s = candidate.estimate_s
        if not self._is_one:
            return estimate_s >= self._best_s or num_fitting >= _MOST_FITTING
        if self._num_actions > _MAX_ACTIONS * (1 if self.fitting else 2):
            return True
        if len(self.fitting) < 2 or "sample" in self._question.given:
            return False  # the estimates are of whole backwards
        return estimate_s > self._best_s * (1 + SLACK)

    def _try(self, candidate: Candidate) -> bool:
        """Whether a plan fits, and is timed unless it is slower."""
        if not candidate.longest:
            return self._try_planned(candidate)
        space, dealt = self._spaces[candidate.layout]
        plan = candidate.plan_of(candidate.longest)
        trial = self._walked(candidate, [plan], space.model)
        self._num_actions += sum(map(len, plan.actions))
        if not self._limits.hold(trial.needs):
            self._refused.append(trial)
            return False
        share = space.sequences_per_step / len(space.seq_lens)
        busy_s = inf
        if candidate.busiest_s is not None and (self._is_one or candidate.layout.dp > 1):
            busy_s = candidate.busiest_s() * share
            if not self._is_one and busy_s >= self._best_s:
                known_s = self._busiest.get(candidate.layout, inf)
                self._busiest[candidate.layout] = min(busy_s, known_s)
                return True
        if not self._is_one:
            plans = plans_of(space, dealt, candidate.plan_of)
            busiest_s, busy_s = busy_s, mean_step_s(space, dealt, plans)
            if busy_s > busiest_s * (1 + _WAITING):
                self._waiting.add((candidate.layout, candidate.options.size))
        self._num_actions += self._simulated(candidate)
        self.fitting.append(replace(trial, step_s=busy_s))
        return True

    def _try_planned(self, candidate: Candidate) -> bool:
        """Try a planner that fits its plans itself: first for the busiest replica, for no step
        takes less than one of its replicas."""
        space, dealt = self._spaces[candidate.layout]
        share = space.sequences_per_step / len(space.seq_lens)
        try:
            plans = plans_of(space, [step[:1] for step in dealt], candidate.plan_of)
            if share * sum(step_s(space.model, own[0]) for own in plans) >= self._best_s:
                return False
            for step, own in zip(dealt, plans, strict=True):
                beside = candidate.plan_beside
                for seq_ids in step[1:]:
                    lens = [space.seq_lens[i] for i in seq_ids]
                    own.append(beside(lens, own[0]) if beside else candidate.plan_of(lens))
                    if share * step_s(space.model, own[-1]) >= self._best_s:
                        return False
        except (UserError, PlanError) as error:  # none of its plans fits, or none is faster
            self.error = error
            return False
        trial = self._walked(candidate, [own[0] for own in plans], space.model)
        self.fitting.append(replace(trial, step_s=mean_step_s(space, dealt, plans)))
        return True

    def _walked(self, candidate: Candidate, plans: Sequence[ChunkPlan], model: CostModel) -> Trial:
        memory = model.memory()
        curves = [memory.curve(p, rank) for p in plans for rank in range(len(p.actions))]
        curve = max(curves, key=lambda curve: self._limits.lacking(needs_of(curve)))
        needs = Needs(*map(max, zip(*map(needs_of, curves), strict=True)))
        return Trial(candidate, 0.0, needs, curve)

    def _simulated(self, candidate: Candidate) -> int:
        """Number of actions of a simulation on one device, about: layer-first those of four
        stages, of a draw of all."""
        options, space = candidate.options, self._spaces[candidate.layout][0]
        num_chunks = -(-sum(space.seq_lens) // options.size)
        if options.order == "chunk-first":
            return 3 * num_chunks
        num_stages = len(stages_of(space.model.shape.num_layers, options))
        return num_chunks * (14 if options.sampling is None else 4 * num_stages)

    def _find_dials(self) -> None:
        """Find dials that stand in for the chosen plan, which a run needs beside a method's own
        chunks. Where none fits, the plans of such methods in that layout are given up, unless the
        method is named and plans the longest sequence itself: then dials that lack least do."""
        while self.fitting:
            chosen = self._ranked()[0].candidate
            if any(trial.candidate.stands_in_for(chosen) for trial in self.fitting):
                return
            offered = [c for c in chunks(self._question, chosen.layout) if c.stands_in_for(chosen)]
            self._found += offered
            space, dealt = self._spaces[chosen.layout]
            for candidate in filter(self._may_fit, offered):
                trial = self._walked(candidate, [candidate.plan_of(candidate.longest)], space.model)
                if self._limits.hold(trial.needs):
                    plans = plans_of(space, dealt, candidate.plan_of)
                    step_s = mean_step_s(space, dealt, plans)
                    self.fitting.append(replace(trial, step_s=step_s))
                    return
            if offered and chosen.method == self._question.method and self._plans_longest(chosen):
                spare = min(offered, key=lambda c: self._limits.lacking(c.least or Needs(0)))
                trial = self._walked(spare, [spare.plan_of(spare.longest)], space.model)
                self.fitting.append(replace(trial, step_s=spare.estimate_s))
                return
            self.fitting = [
                trial for trial in self.fitting
                if trial.candidate.layout != chosen.layout or trial.candidate.longest
            ]  # fmt: skip

    def _plans_longest(self, candidate: Candidate) -> bool:
        """Whether a planner that fits its plans itself has one of the longest sequence."""
        try:
            candidate.plan_of([self._question.longest])
        except (UserError, PlanError) as error:
            self.error = error
            return False
        return True

    def _may_fit(self, candidate: Candidate) -> bool:
        return candidate.least is None or self._limits.hold(candidate.least)

    def try_least(self) -> None:
        """Find what lacks least, for the message that no plan fits."""
        lacking = self._limits.lacking
        known = {(trial.candidate.layout, trial.candidate.options) for trial in self._refused}
        most = self._num_actions + 2 * _MAX_ACTIONS
        bounded = [(c.least, c) for c in self._found if c.least is not None]
        for least, candidate in sorted(
            bounded, key=lambda pair: (lacking(pair[0]), sum(pair[0]), pair[1].estimate_s)
        ):
            nearest = min((lacking(t.needs) for t in self._refused), default=inf)
            short = lacking(least)
            near = _NEAR * sum(least) if short else 0  # what may fit is tried
            if self.fitting or nearest <= short + near:
                break
            if nearest < inf and self._num_actions > most:
                break
            if (candidate.layout, candidate.options) not in known:
                self._try(candidate)

    def _ranked(self) -> list[Trial]:
        """The plans that fit, the chosen one first, then by their seconds."""
        if not self.fitting:
            return []
        alike = self._alike()
        if self._is_one:
            best = min(alike, key=lambda trial: (trial.needs, trial.step_s))
        else:
            best = min(alike, key=_simplest)
        return [best, *sorted((t for t in self.fitting if t is not best), key=_seconds)]

    def _alike(self) -> list[Trial]:
        """The plans within the slack of the fastest one; on one device those of its order, its
        stages and its tiers."""
        method = self._question.method
        wanted = [t for t in self.fitting if t.candidate.method == method] or self.fitting
        fastest = min(wanted, key=lambda t: (t.step_s, num_lowered(t.candidate.options.tiers)))
        slack = SLACK if self._is_one else LAYOUT_SLACK
        near = [t for t in wanted if t.step_s <= fastest.step_s * (1 + slack)]
        return [t for t in near if not self._is_one or _walk_of(t) == _walk_of(fastest)]

    def answer(self, started_s: float) -> Answer:
        tried = self._ranked()
        opened = {trial.candidate.layout for trial in (*self.fitting, *self._refused)}
        too_large, slower = dict(self._too_large), dict(self._slower)
        for candidate in self._found:
            layout, least = candidate.layout, candidate.least
            if least is None or layout in opened:
                continue
            lacking = self._limits.lacking(least)
            too_large[layout] = min(lacking, too_large.get(layout, lacking))
            if not lacking:
                slower[layout] = min(candidate.estimate_s, slower.get(layout, inf))
        slower |= self._busiest
        return Answer(
            question=self._question,
            tried=tuple(tried),
            refused=tuple(
                sorted(self._refused, key=lambda t: self._limits.lacking(t.needs))
            ),
            too_large=tuple((layout, n) for layout, n in too_large.items() if n),
            slower=tuple(pair for pair in slower.items() if pair[0] not in opened),
            error=self.error if self._question.method != "auto" and not tried else None,
            alike=len(self._alike()) if tried else 0,
            num_pruned=len(self._found) - len(tried) - len(self._refused),
            seconds=time.monotonic() - started_s,
        )  # fmt: skip


def _seconds(trial: Trial) -> float:
    return trial.step_s


def _simplest(trial: Trial) -> tuple[int, int, float]:
    layout = trial.candidate.layout
    return layout.pp, layout.sp, trial.step_s


def _walk_of(trial: Trial) -> tuple[object, ...]:
    options = trial.candidate.options
    return options.order, options.stage_layers, options.tiers


def walkable(question: Question) -> list[Layout]:
    """The layouts that the given dials can have; of these those without an idle replica, if there
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


def plans_of(
    space: Space, dealt: Dealt, plan_of: Callable[[Sequence[int]], ChunkPlan]
) -> list[list[ChunkPlan]]:
    """For each step the plans of its replicas, that of the one with most work first."""
    return [[plan_of([space.seq_lens[i] for i in own]) for own in step] for step in dealt]


def mean_step_s(space: Space, dealt: Dealt, plans: Sequence[Sequence[ChunkPlan]]) -> float:
    """Seconds of a step on average, of the plans of all replicas as a run joins them, which meet in
    the last Backward of each stage, and of the optimizer. Where only a part of a step's sequences
    is there the time is that part's share."""
    model, total_s, first = whole_model(space.model), 0.0, 0
    for step, own in zip(dealt, plans, strict=True):
        seq_lens = space.seq_lens[first : first + sum(map(len, step))]
        own_ids = [[i - first for i in some] for some in step]
        plan = join_kept(own, own_ids, seq_lens, space.layout.dp)
        total_s += step_s(model, plan) + update_s(model, plan)
        first += len(seq_lens)
    return total_s * space.sequences_per_step / len(space.seq_lens)


def whole_model(model: CostModel) -> CostModel:
    """The model of plans that list all replicas."""
    return replace(model, training=replace(model.training, replicas=1))


@dataclass(frozen=True)
class BatchPlans:
    """The planners that a run asks for every batch, beside that of its dials."""

    question: Question
    """Its model, limits, given dials and method."""
    layout: Layout
    options: ChunkOptions
    """The dials that the run has begun with."""
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
        the dials `options`, which is `plan`, unless another one is faster by more than the slack
        with which layouts were compared. A method that is named is what runs: raises UserError
        where it has no plan."""
        model, question = self.question.model_of(self.layout), self.question
        if question.method in _OWN_CHUNKS:
            return question.method, self._plan_by_name(seq_lens, plan, options)
        # smaller chunks than at the start: what was predicted to fit did not
        is_free = options == self.options and not self.has_shrunk and not plan.frozen_stages
        own = own_methods(question) if is_free and options.tiers.kv == "device" else []
        if question.method != "auto":
            return question.method, plan
        plan_s = step_s(model, gathered_first(plan))  # as the plans of all replicas begin
        best, best_s = (CHUNKS, plan), plan_s * (1 - LAYOUT_SLACK)
        found = []
        if plan.sp_size > 1:
            local = plan_replica(
                seq_lens, options, num_layers=model.shape.num_layers,
                stages=plan.stages if self.layout.pp > 1 else (), sp_size=plan.sp_size,
                frozen_layers=frozen_layers, local_in=model.shape,
            )  # fmt: skip
            found.append((LOCAL, local))
        for method in own:
            try:
                found.append((method, self._plan_of(method, seq_lens, plan_s)))
            except (UserError, StopIteration):  # none of its plans fits, or none is faster
                continue
        for name, one in found:
            if self.layout.dp > 1 and one.stages != plan.stages:
                continue  # another replica may take the dials, and all of a step share its stages
            if (one_s := step_s(model, gathered_first(one))) < best_s:
                best, best_s = (name, one), one_s
        return best

    def _plan_by_name(
        self, seq_lens: Sequence[int], plan: ChunkPlan, options: ChunkOptions
    ) -> ChunkPlan:
        """The plan of the method that is named. Where a step did not fit, although it was predicted
        to, and the dials' chunks were halved, in a tenth less memory for each time."""
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
        """The plan of a method with its own chunks, with the tiers of the dials, for replicas have
        the same ones: nothing of it lies there."""
        question = replace(self.question, seq_lens=tuple(seq_lens), beat_s=beat_s)
        plan = next(iter(METHODS[method](question, self.layout))).plan_of(seq_lens)
        return replace(plan, tiers=self.options.tiers)


def best_plan(
    seq_lens: Sequence[int], answer: Answer, options: ChunkOptions | None = None
) -> tuple[str, ChunkPlan]:
    """The plan of a step over these sequences as a run makes it of an answer, and the names of the
    planners of its replicas. `options`: other dials than the answer's."""
    question, layout = answer.question, answer.best.candidate.layout
    options = answer.dials.candidate.options if options is None else options
    shape = question.model.shape
    work_s = question.model.sequence_seconds(seq_lens)
    dealt = by_cost(work_s, min(layout.dp, len(seq_lens)))
    asked = BatchPlans(question, layout, options)
    names, plans = [], []
    for own in dealt:
        lens = [seq_lens[i] for i in own]
        plan = plan_replica(
            lens, options, num_layers=shape.num_layers, stages=question.stages_of(layout),
            sp_size=layout.sp,
        )  # fmt: skip
        if layout == ONE_DEVICE:
            return CHUNKS if question.method == "auto" else question.method, plan
        name, plan = asked.best_plan(lens, plan, options)
        names.append(name)
        plans.append(plan)
    return ", ".join(dict.fromkeys(names)), join_kept(plans, dealt, seq_lens, layout.dp)
