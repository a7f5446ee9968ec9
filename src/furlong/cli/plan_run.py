"""What `auto` decides in a run on one device, told by `furlong plan RUN.yaml`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from furlong.cli.plan_subject import Subject
from furlong.cost.hardware import THIS_CPU, free_ram_budget_bytes, this_cpu
from furlong.planners.auto import FREE_RAM, Decision, decide
from furlong.planners.search import Found
from furlong.simulate.clock import time_actions


def with_run_budget(subject: Subject) -> Subject:
    """A run on this machine's CPU may use what `furlong train` would take of the free RAM."""
    problem = subject.problem
    of_run = subject.config is not None and problem.num_devices == 1
    if not of_run or problem.budget_bytes is not None or not _on_this_cpu(subject):
        return subject
    return replace(subject, problem=replace(problem, budget_bytes=free_ram_budget_bytes()))


def decision_of(subject: Subject, chosen: argparse.Namespace) -> Decision | None:
    """The decision of `furlong train` for a run file on one device; None for any other question.

    Raises ConfigError where no plan is predicted to fit.
    """
    problem, batch, config = subject.problem, subject.batch, subject.config
    if config is None or chosen.method is not None or problem.num_devices != 1:
        return None
    if batch.lengths is None or subject.dials.get("tier", "device") != "device":
        return None
    model, words = problem.model, "memory.device"
    if chosen.memory is None and config.memory.device == "auto":
        words = FREE_RAM if _on_this_cpu(subject) else f"of a {model.hardware.name}"
    if _on_this_cpu(subject):
        model = replace(model, hardware=this_cpu(measured=False))
    budget = problem.budget_bytes
    decision = decide(
        batch.lengths,
        sequences_per_step=len(batch.seq_lens),
        seed=batch.seed,
        model=model,
        budget_bytes=model.hardware.budget_bytes if budget is None else budget,
        budget_words=words,
        must_fit=True,
        dials=subject.dials,
    )
    found = decision.found
    return decision if found is None else replace(decision, found=_of_one_step(found, subject))


def _of_one_step(found: Found, subject: Subject) -> Found:
    """The same with the plan of the subject's batch, and all times in the seconds of its model."""
    problem, best = subject.problem, found.best
    plan = best.candidate.build(problem.seq_lens, problem.model)
    step_s = time_actions(plan, problem.model.costs(plan)).duration_s
    ratio = step_s / best.step_s
    return replace(
        found,
        best=replace(best, plan=plan, step_s=step_s),
        others=tuple(replace(o, step_s=o.step_s * ratio) for o in found.others),
        trials=tuple(replace(t, bound_s=t.bound_s * ratio) for t in found.trials),
    )


def _on_this_cpu(subject: Subject) -> bool:
    return subject.problem.model.hardware.name == THIS_CPU
