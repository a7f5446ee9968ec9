"""What `auto` decides on one device, told by `furlong plan`: for a run file as `furlong train`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from furlong.cli.plan_subject import Subject
from furlong.cost.devices.hardware import THIS_CPU, free_ram_budget_bytes
from furlong.errors import ConfigError
from furlong.plan.lengths import count_lengths
from furlong.planners.auto.decide import FREE_RAM, Decision, decide
from furlong.planners.auto.search import MARGIN, Searched, Tried
from furlong.planners.options import ChunkOptions
from furlong.planners.predict import one_draw, predict
from furlong.planners.search.build import build
from furlong.planners.search.dials import Dials
from furlong.planners.search.problem import Found, Refusal, Trial
from furlong.planners.search.replicas import Outcome


def with_run_budget(subject: Subject) -> Subject:
    """A run on this machine's CPU may use what `furlong train` would take of the free RAM."""
    problem = subject.problem
    of_run = subject.is_run and problem.num_devices == 1
    if not of_run or problem.budget_bytes is not None or not _on_this_cpu(subject):
        return subject
    return replace(subject, problem=replace(problem, budget_bytes=free_ram_budget_bytes()))


def decision_of(subject: Subject, chosen: argparse.Namespace) -> Decision | None:
    """The decision of `furlong train` on one device; None for several, or for one method's plans.

    Raises ConfigError where no plan is predicted to fit.
    """
    problem, batch = subject.problem, subject.batch
    if chosen.method is not None or problem.num_devices != 1:
        return None
    model, words = problem.model, "memory.device"
    if subject.config.memory.device == "auto":
        of_run = subject.is_run and _on_this_cpu(subject)
        words = FREE_RAM if of_run else f"of a {model.hardware.name}"
    budget = problem.budget_bytes
    return decide(
        batch.lengths or count_lengths(problem.seq_lens),
        sequences_per_step=len(batch.seq_lens),
        seed=batch.seed,
        model=model,
        budget_bytes=model.hardware.budget_bytes if budget is None else budget,
        budget_words=words,
        host_bytes=subject.host_bytes,
        disk_bytes=subject.disk_bytes,
        margin=subject.figures.margin(MARGIN),
        must_fit=True,
        alone=subject.is_run,
        dials=subject.dials,
    )


def found_of(searched: Searched, subject: Subject) -> Found:
    """The outcome of the search, with the plan of the subject's batch as its best, and all times in
    the seconds of its model."""
    problem = subject.problem
    best = _dials(searched.best.options)
    plan = one_draw(build(best, problem.seq_lens, problem.model), searched.best.options)
    predicted = predict(problem.model, plan)
    ratio = predicted.step_s / searched.best.step_s
    outcome = Outcome(best, plan, problem.model, predicted.step_s, predicted.device_bytes)
    trials = [Trial(best, outcome.step_s)]
    trials += [Trial(_dials(t.options), t.step_s * ratio) for t in searched.tried[1:]]
    return Found(
        best=outcome,
        others=(),
        trials=tuple(sorted(trials, key=lambda trial: trial.bound_s)),
        refused=tuple(_refusal(tried) for tried in searched.refused),
        num_pruned=searched.num_pruned,
        seconds=searched.seconds,
    )


def _dials(options: ChunkOptions) -> Dials:
    return Dials(method="furlong", options=options)


def _refusal(tried: Tried) -> Refusal:
    error = ConfigError(
        given=f"{tried.needs.device_bytes} bytes", required="less", source="", change=""
    )
    return Refusal(_dials(tried.options), error)


def _on_this_cpu(subject: Subject) -> bool:
    return subject.problem.model.hardware.name == THIS_CPU
