"""The searches behind `furlong plan`: those of `furlong train` on one device, those of methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from furlong.cli.flag_types import refusal
from furlong.cli.planning.question import PlanSubject
from furlong.cost.inputs import look_up
from furlong.errors import ConfigError
from furlong.plan.lengths import count_lengths
from furlong.plan.plan import ON_DEVICE, ONE_DEVICE, Layout, Tiers
from furlong.plan.text import tiers_in_words
from furlong.planners.budget import MARGIN
from furlong.planners.decide import FREE_RAM, Decision, chunk_trials, decide
from furlong.planners.options import ChunkOptions
from furlong.planners.predict import one_draw, predict
from furlong.planners.published.build import build
from furlong.planners.published.catalogue import ABLATIONS, PUBLISHED, Method, combined
from furlong.planners.published.dials import Dials
from furlong.planners.published.pools import pool_dials
from furlong.planners.published.problem import (
    Found,
    NothingOfferedError,
    Problem,
    Refusal,
    TriedDials,
)
from furlong.planners.published.replicas import Outcome, ReplicaPlans
from furlong.planners.published.room import rooms_of
from furlong.planners.published.search import search
from furlong.planners.question import Answer, Limits, Trial
from furlong.report.patience import Tell
from furlong.units import count_words

OURS = "furlong"
METHODS: Mapping[str, Method] = {**PUBLISHED, **ABLATIONS, OURS: combined}


def methods_named(name: str | None) -> Mapping[str, Method]:
    """All methods, or the one of that name. Raises ConfigError that names the nearest."""
    if name is None:
        return METHODS
    known = look_up(name, {n: n for n in METHODS}, kind="method", source="--method")
    return {known: METHODS[known]}


def search_with(
    subject: PlanSubject, methods: Mapping[str, Method], *, strict: bool, tell: Tell | None = None
) -> Found:
    """The search with the dials that are given. `strict`: only candidates that have each of them;
    else those too that do not know it. Raises ConfigError."""
    problem = replace(subject.problem, given=_given(subject), strict=strict)
    try:
        return search(problem, methods, tell=tell)
    except NothingOfferedError:
        raise _nothing_offered(subject, problem, methods) from None


def has_given(subject: PlanSubject, dials: Dials) -> bool:
    """Whether dials have every value that is given."""
    return dials.agree(_given(subject), strict=True)


def _given(subject: PlanSubject) -> dict[str, Any]:
    """The given dials by the values of candidates: a tier is the one of K,V, or a word of no
    candidate where other kinds of memory are named as well."""
    given = dict(subject.dials)
    tier = given.get("tier")
    if isinstance(tier, Tiers):
        only_kv = replace(tier, kv="device") == ON_DEVICE
        given["tier"] = str(tier.kv) if only_kv else tiers_in_words(tier)
    return given


def _nothing_offered(
    subject: PlanSubject, problem: Problem, methods: Mapping[str, Method]
) -> ConfigError:
    """The error where no method has the given sizes and dials, with those to leave out."""
    names = ", ".join(methods) if len(methods) < 4 else f"{len(methods)} methods"
    words = [f"{name} {size}" for name, size in subject.given_sizes.items()]
    words += [
        tiers_in_words(value) if isinstance(value, Tiers) else f"{name} {value}"
        for name, value in subject.dials.items()
    ]
    in_the_way = []
    for name in subject.given_sizes:
        free: dict[str, Any] = {name: None}
        if _offers(replace(problem, **free), methods):
            in_the_way.append(f"parallel.{name}")
    for name in problem.given:
        others = {key: value for key, value in problem.given.items() if key != name}
        if _offers(replace(problem, given=others), methods):
            in_the_way.append(f"chunks.{name}")
    change = "give fewer sizes and dials, or other methods"
    if in_the_way:
        change = f"leave out {' or '.join(in_the_way)}"
    elif not _offers(replace(problem, dp=None, sp=None, pp=None, given={}), methods):
        several = [] if subject.num_idle else ["give several --devices"]
        change = " and ".join(["leave --runnable out"] * subject.is_runnable + several)
        change += f", or name another --method: {names} has no plans of one device"
    only = ", the one of --runnable" if subject.is_runnable else ""
    return refusal(
        f"{names} on {count_words(problem.num_devices, 'device')}{only}"
        + (f" with {', '.join(words)}" if words else ""),
        "a layout and dials that the method has", change, "the search for a plan",
    )  # fmt: skip


def _offers(problem: Problem, methods: Mapping[str, Method]) -> bool:
    """Whether a method has dials for a problem in any layout, whether they fit or not."""
    try:
        rooms = list(rooms_of(problem, least=1024))
    except ConfigError:
        return False
    dials = (
        one for room in rooms for method in methods.values() for rungs in method(room)
        for one in rungs
    )  # fmt: skip
    return any(one.agree(problem.given, strict=problem.strict) for one in dials) or any(
        True for _ in pool_dials(problem, methods.values())
    )


def decision_of(subject: PlanSubject, method: str | None) -> Decision | None:
    """The decision of `furlong train` on one device, with --runnable on several; None for others,
    and for one method's plans.

    Raises ConfigError where no plan is predicted to fit.
    """
    problem, batch = subject.problem, subject.batch
    dp, sp, pp = problem.dp, problem.sp, problem.pp
    is_one = problem.num_devices == 1 and all(size in (None, 1) for size in (dp, sp, pp))
    if method is not None or not (is_one or subject.is_runnable):
        return None
    model, words = problem.model, "memory.device"
    if subject.config.memory.device == "auto":
        words = f"of one {model.hardware.name}"
        if subject.runs_here:
            count = problem.num_devices
            words = FREE_RAM if count == 1 else f"{FREE_RAM} over {count} processes"
    budget = problem.budget_bytes
    return decide(
        batch.lengths or count_lengths(problem.seq_lens),
        sequences_per_step=len(batch.seq_lens),
        seed=batch.seed,
        model=model,
        limits=Limits(
            model.hardware.budget_bytes if budget is None else budget,
            subject.host_bytes, subject.disk_bytes, subject.figures.margin(MARGIN),
        ),
        budget_words=words,
        num_devices=problem.num_devices,
        must_fit=True,
        alone=subject.is_run,
        given=dict(subject.dials) | {
            name: size
            for name, size in (("dp", dp), ("sp", sp), ("pp", pp))
            if size is not None
        },
        method=subject.config.chunks.method,
    )  # fmt: skip


def found_of(decision: Decision, subject: PlanSubject) -> Found:
    """The outcome of a run's search, with the plan of the subject's batch as its best, and all
    times in the seconds of its model."""
    answer = decision.answer
    assert answer is not None
    best = _dials(decision.options, decision.layout, decision.stages)
    outcome = _outcome(best, decision, subject)
    dials = chunk_trials(answer, decision.layout)
    ratio = outcome.step_s / dials[0].step_s
    others = [trial for trial in answer.tried if trial is not dials[0]]
    trials = [
        TriedDials(best, outcome.step_s),
        *(TriedDials(_dials_of(trial, answer), trial.step_s * ratio) for trial in others),
    ]
    refused = [
        Refusal(_dials_of(t, answer), refusal(f"{t.needs.device_bytes} bytes", "less", ""))
        for t in answer.refused
    ]
    return Found(
        best=outcome,
        others=(),
        trials=tuple(sorted(trials, key=lambda trial: trial.bound_s)),
        refused=tuple(refused),
        num_pruned=answer.num_pruned,
        seconds=answer.seconds,
    )


def _dials_of(trial: Trial, answer: Answer) -> Dials:
    candidate = trial.candidate
    return _dials(candidate.options, candidate.layout, answer.question.stages_of(candidate.layout))


def _outcome(best: Dials, decision: Decision, subject: PlanSubject) -> Outcome:
    """The plan of the subject's batch with the dials of a decision."""
    problem, model = subject.problem, decision.model
    assert model is not None
    if best.layout != ONE_DEVICE:
        return ReplicaPlans(problem.seq_lens, model, problem.limit_bytes).plan_whole(best)
    plan = one_draw(build(best, problem.seq_lens, model), decision.options)
    predicted = predict(model, plan)
    return Outcome(best, plan, model, predicted.step_s, predicted.device_bytes)


def _dials(options: ChunkOptions, layout: Layout, stages: tuple[int, ...]) -> Dials:
    return Dials(
        method=OURS, options=options, layout=layout, stages=stages, balance="flops",
        zero=1 if layout.dp * layout.sp > 1 else 0,
    )  # fmt: skip
