"""One search over every planner: candidates pruned by lower bounds, ranked by simulation.

    found = search(Problem(seq_lens=lens, model=CostModel(shape, hardware), num_devices=64))
    found.best.plan, found.best.step_s, found.others[0].step_s

Best first, with two bounds. What the chunks of the busiest replica take on its slowest stage is a
bound for every way to schedule them; ladders are tried in the order of it, and left out once it
reaches the best step. The simulated time of that replica is a second bound: only candidates below
the best step are planned for the whole batch. `auto` means this search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from furlong.cost.model import CostModel
from furlong.errors import ConfigError, PlanError, UserError
from furlong.plan.values import Chunk, ChunkPlan, Place, Slice, Tier
from furlong.planners.budget import DoesNotFitError, advice, fit
from furlong.planners.chunks.balance import Balance, deal_sequences, sequence_work
from furlong.planners.layout import cut_layers, layouts, mean_attended_keys
from furlong.planners.orders.replicas import join_replicas
from furlong.planners.search.bounds import stage_bounds_s
from furlong.planners.search.candidates import Candidate, Ladder, Room
from furlong.planners.search.catalogue import Method
from furlong.simulate.clock import time_actions


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A batch, a model on devices, and the sizes that are given."""

    seq_lens: tuple[int, ...]
    model: CostModel
    num_devices: int = 1
    dp: int | None = None
    """None: searched; so are the next."""
    sp: int | None = None
    pp: int | None = None
    budget_bytes: int | None = None
    """Of one device; None: what the hardware has."""
    tiers: tuple[Tier, ...] = ("device",)
    slack: float = 0.0
    """Plans that take up to this share longer than the best are planned whole as well."""


@dataclass(frozen=True)
class Outcome:
    """A candidate's plan of the whole batch."""

    candidate: Candidate
    plan: ChunkPlan
    step_s: float
    peak_bytes: int
    """Of the rank that needs most."""


@dataclass(frozen=True)
class Trial:
    """A candidate, tried on the replica with the most work."""

    candidate: Candidate
    bound_s: float
    """No step of it is faster."""


@dataclass(frozen=True)
class Refusal:
    """Why a candidate has no plan."""

    candidate: Candidate
    error: UserError | PlanError


@dataclass(frozen=True)
class Found:
    """The fastest plan that fits, and what it was compared with."""

    best: Outcome
    others: tuple[Outcome, ...]
    """Also planned whole, by step time."""
    trials: tuple[Trial, ...]
    """All that fit on one replica, by their bounds."""
    refused: tuple[Refusal, ...]
    num_pruned: int
    """Candidates that were left out because of their bounds."""
    seconds: float


def search(
    problem: Problem, methods: Mapping[str, Method], *, tell: Callable[[str], None] | None = None
) -> Found:
    """The fastest plan of `problem` over all candidates of `methods`.

    `tell` is called with words for how far it is. Raises ConfigError where no candidate fits: by
    how much the nearest one fails, what to change.
    """
    state = _Search(problem, tell or (lambda words: None))
    state.run(methods)
    return state.found()


class _Search:
    def __init__(self, problem: Problem, tell: Callable[[str], None]) -> None:
        self._problem = problem
        self._tell = tell
        self._started_s = time.monotonic()
        self._work = sequence_work(problem.seq_lens, problem.model.shape)
        self._dealt: dict[tuple[int, Balance], list[list[int]]] = {}
        self._bounds_s: dict[Hashable, float] = {}
        self._outcomes: list[Outcome] = []
        self._trials: list[Trial] = []
        self._refused: list[Refusal] = []
        self._num_pruned = 0

    def run(self, methods: Mapping[str, Method]) -> None:
        ladders: list[tuple[float, Ladder]] = []
        for room_s, room in self._rooms():
            for method in methods.values():
                for ladder in method(room):
                    self._tell(f"bounds of {len(ladders)} ways to cut chunks")
                    ladders.append((max(room_s, self._least_s(ladder, room)), ladder))
        for number, (bound_s, ladder) in enumerate(sorted(ladders, key=lambda pair: pair[0])):
            self._tell(f"{number} of {len(ladders)} ways to cut chunks tried")
            if bound_s >= self._limit_s:
                self._num_pruned += len(ladder.rungs)
                continue
            self._climb_down(ladder)

    def found(self) -> Found:
        if not self._outcomes:
            raise self._nothing_fits()
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

    @property
    def _limit_s(self) -> float:
        """What takes so long need not be planned whole."""
        return self._best_s * (1 + self._problem.slack)

    def _rooms(self) -> Iterator[tuple[float, Room]]:
        """Every layout with a bound: the work of the busiest replica at the hardware's best."""
        problem, model = self._problem, self._problem.model
        training, hardware = model.training, model.hardware
        mean_keys = mean_attended_keys(problem.seq_lens)
        cuts: dict[int, tuple[int, ...]] = {}
        best = max(e.best for e in (hardware.linear, hardware.attention_forward))
        for layout in layouts(
            problem.num_devices, model.shape,
            dp=problem.dp, sp=problem.sp, pp=problem.pp, tp_size=training.tp_size,
        ):  # fmt: skip
            if layout.dp > len(problem.seq_lens):
                continue
            if layout.pp not in cuts:
                cuts[layout.pp] = cut_layers(model.shape, layout.pp, mean_keys)
            busiest = max(max(self._work), sum(self._work) / layout.dp)
            passes = 2 if training.lora is not None else 3
            devices = layout.sp * layout.pp * training.tp_size
            bound_s = passes * busiest / (devices * hardware.peak_flops_per_s * best)
            yield (
                bound_s,
                Room(
                    layout,
                    cuts[layout.pp],
                    longest_tokens=max(problem.seq_lens),
                    tiers=problem.tiers,
                    budget_bytes=problem.budget_bytes,
                ),
            )

    def _least_s(self, ladder: Ladder, room: Room) -> float:
        """A bound of all its rungs: what the busiest replica computes on its slowest stage, with
        nothing recomputed and nothing waited for but the pipeline's fill and drain."""
        ids, model = self._busiest(ladder.rungs[0])
        lens = [self._problem.seq_lens[i] for i in ids]
        stages, sp_size = room.stages, room.layout.sp
        if ladder.groups is not None:
            key = (room.layout, ladder.rungs[0].balance, ladder.cut)
            if ladder.cut is None or key not in self._bounds_s:
                chunks = [c for group in ladder.groups(lens, model) for c in group]
                self._bounds_s[key] = max(stage_bounds_s(chunks, lens, stages, sp_size, model))
            return self._bounds_s[key]
        if ladder.rungs[0].deals_itself:
            return 0.0
        whole = Chunk(tuple(Slice(i, 0, n, Place(0, sp_size)) for i, n in enumerate(lens)))
        return max(stage_bounds_s([whole], lens, stages, sp_size, model, fills=False))

    def _climb_down(self, ladder: Ladder) -> None:
        """To the highest rung that fits on all replicas, or is known to be no better; with slack on
        to the first one beyond it."""
        for candidate in ladder.rungs:
            try:
                trial = self._try(candidate)
                if trial.bound_s < self._limit_s:
                    self._outcomes.append(self._plan_whole(candidate))
                if not self._problem.slack or trial.bound_s >= self._limit_s:
                    return
            except (UserError, PlanError) as error:
                self._refused.append(Refusal(candidate, error))

    def _try(self, candidate: Candidate) -> Trial:
        """Raises UserError where the busiest replica has no plan that fits."""
        ids, model = self._busiest(candidate)
        plan = self._build(candidate, ids, model)
        self._fit(plan, model)
        trial = Trial(candidate, time_actions(plan, model.costs(plan)).duration_s)
        self._trials.append(trial)
        return trial

    def _plan_whole(self, candidate: Candidate) -> Outcome:
        """The plan of the batch. Raises UserError where another replica has none that fits."""
        replicas, model = self._deal(candidate), self._problem.model
        replica_model = self._replica_model(candidate)
        plans = [self._build(candidate, ids, replica_model) for ids in replicas]
        plan = plans[0] if len(plans) == 1 else self._join(plans, replicas)
        peak = self._fit(plan, model)
        step_s = time_actions(plan, model.costs(plan)).duration_s
        return Outcome(candidate, plan, step_s, peak)

    def _busiest(self, candidate: Candidate) -> tuple[list[int], CostModel]:
        """The sequences of the replica with most work, and the cost model of its plan."""
        replicas = self._deal(candidate)
        ids = max(replicas, key=lambda ids: sum(self._work[i] for i in ids))
        return ids, self._replica_model(candidate)

    def _deal(self, candidate: Candidate) -> list[list[int]]:
        """The sequences of each replica, or of all together for a method that deals itself."""
        dp = 1 if candidate.deals_itself else candidate.layout.dp
        key = dp, "none" if dp == 1 else candidate.balance
        if key not in self._dealt:
            problem = self._problem
            self._dealt[key] = deal_sequences(problem.seq_lens, problem.model.shape, *key)
        return self._dealt[key]

    def _replica_model(self, candidate: Candidate) -> CostModel:
        """The cost model of what the candidate builds: one of so many replicas, or the whole."""
        model = self._problem.model
        replicas = 1 if candidate.deals_itself else candidate.layout.dp
        return replace(model, training=replace(model.training, replicas=replicas))

    def _build(self, candidate: Candidate, ids: Sequence[int], model: CostModel) -> ChunkPlan:
        return candidate.build([self._problem.seq_lens[i] for i in ids], model)

    def _join(self, plans: Sequence[ChunkPlan], replicas: Sequence[Sequence[int]]) -> ChunkPlan:
        planned = {
            seq_id: seq_len
            for plan, own in zip(plans, replicas, strict=True)
            for seq_id, seq_len in zip(own, plan.seq_lens, strict=True)  # padded in some
        }
        return join_replicas(plans, replicas, [planned[i] for i in range(len(planned))])

    def _fit(self, plan: ChunkPlan, model: CostModel) -> int:
        return fit(plan, model, self._problem.budget_bytes)

    def _nothing_fits(self) -> ConfigError:
        """The refusal that came nearest, in the words of the whole search."""
        errors = [(r.candidate, r.error) for r in self._refused]
        near = [(c, error) for c, error in errors if isinstance(error, DoesNotFitError)]
        if near:
            candidate, error = min(near, key=lambda pair: pair[1].lacking_bytes)
            sizes = (self._problem.dp, self._problem.sp, self._problem.pp)
            return ConfigError(
                given=f"of {len(errors)} candidates none fits; nearest is {candidate}, whose "
                f"{error.given}",
                required=error.required,
                source=f"the search over {len(errors)} candidates",
                change=advice(error.part, alone=sizes == (1, 1, 1)),
            )
        for _, other in errors:
            if isinstance(other, UserError):
                return ConfigError(
                    given=other.given, required=other.required, source=other.source,
                    change=other.change,
                )  # fmt: skip
        problem = self._problem
        return ConfigError(
            given=f"{len(problem.seq_lens)} sequences on {problem.num_devices} devices",
            required="a layout in which every replica has a sequence, and a method for it",
            source="the search for a plan",
            change="use fewer replicas (parallel.dp), or more sequences per step",
        )
