"""`furlong plan` on lengths: the fastest plan that fits, and the words for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from furlong.cli.flag_types import refusal
from furlong.cli.planning import pairs
from furlong.cli.planning.files import draw, writing
from furlong.cli.planning.search import (
    decision_of,
    found_of,
    methods_named,
    search_with,
)
from furlong.cli.planning.subject import PlanSubject, subject_of
from furlong.config.sources import RunFlags
from furlong.plan.plan import ChunkPlan
from furlong.plan.text import save_plan
from furlong.planners.published.catalogue import SEARCHED, Method
from furlong.planners.published.dials import Dials
from furlong.planners.published.longest import Longest, longest_sequence
from furlong.planners.published.problem import Found
from furlong.planners.spaco import Sampling, num_drawn, sampling_in_words
from furlong.report.patience import Tell
from furlong.report.report import PlanReport, report_plan
from furlong.report.text import format_report, line, runs_words
from furlong.units import count_words, format_count, format_seconds

_SAME = 1 + 1e-6
"""Ratio of two times up to which they are equal."""


def run(flags: RunFlags, tell: Tell) -> None:
    """Search, print, save and draw what the command line asks for. Raises ConfigError."""
    name = flags.own.method
    methods = SEARCHED if name is None else methods_named(name)
    tell("reading what is to be planned")
    subject = subject_of(flags)
    tell("")
    if subject.config.train.loss == "dpo":
        pairs.run(flags, subject)
    else:
        _run(flags, subject, methods, tell)


def _run(flags: RunFlags, subject: PlanSubject, methods: Mapping[str, Method], tell: Tell) -> None:
    chosen = flags.own
    problem, sampling = subject.problem, subject.dials.get("sample")
    decision = decision_of(subject, chosen.method)
    if decision is not None and decision.searched is not None:
        found = found_of(decision, subject)
    else:
        found = search_with(subject, methods, strict=True, tell=tell)
    best = found.best
    tell("a plan is found, it is measured")
    report = report_plan(
        best.plan, best.model, problem.budget_bytes, sum(problem.seq_lens),
        num_processes=1 if decision is None else problem.num_devices,
    )  # fmt: skip
    if report.missing and chosen.runnable:
        given = f"a plan that needs {report.missing}, with --runnable"
        raise refusal(given, "a plan that this release runs", "name another method, or none")
    tell("looking for the longest sequence that would fit")
    positions, own = subject.num_positions, max(problem.seq_lens)
    longest = longest_sequence(
        best.dials, best.plan, best.model, budget_bytes=problem.limit_bytes, start=own,
        num_positions=None if positions is None or positions < own else positions,
    )  # fmt: skip
    auto = None if decision is None else decision.words
    parallel = "" if decision is None else decision.layout_words
    if chosen.json:
        more: dict[str, Any] = {} if auto is None else {"auto": auto}
        if parallel:
            more["parallel"] = parallel
        if sampling is not None:
            drawn = {"num_drawn": num_drawn(best.plan), "num_chunks": len(best.plan.chunks)}
            more["sample"] = asdict(sampling) | drawn
        print(json.dumps(_to_json(subject, found, report, longest) | more, indent=1))
    else:
        print(subject.words())
        print(line("plan", str(best.dials)))
        if sampling is not None:
            print(line("sample", _sample_words(best.plan, sampling)))
        print(format_report(report))
        if idle := problem.num_idle(best.dials.layout):
            print(line("idle", f"{count_words(idle, 'device')} of {problem.num_devices}"))
        print(line("longest", _longest_words(longest, subject)))
        device = "" if auto is None else problem.model.hardware.name
        print(line("runs here", runs_words(report, device)))
        print(line("next best", _next_words(found)) if auto is None else line("auto", auto))
        if parallel:
            print(line("parallel", parallel))
        print(line("search", _search_words(found)))
    note = ", ".join([best.dials.layout_words(), *best.dials.words()])
    if chosen.out is not None:
        with writing(chosen.out):
            made_for = subject.made_for(best.model) | {"title": best.dials.method, "note": note}
            text = save_plan(best.plan, made_for)
            chosen.out.write_text(text, encoding="utf-8")
        if not chosen.json:
            print(f"wrote {chosen.out}")
    tell("drawing it")
    draw([report.panel(best.dials.method, note)], chosen)


def _sample_words(plan: ChunkPlan, sampling: Sampling) -> str:
    """The words for the draw of the plan that is shown."""
    return (
        f"{sampling_in_words(sampling)}: {num_drawn(plan):,} of"
        f" {count_words(len(plan.chunks), 'chunk')} drawn in this step, another draw every step\n"
        "labels are not known here: all chunks are drawn as those without labels are\n"
        "step and memory are those of this draw; the dials fit with every chunk drawn"
    )


def _longest_words(longest: Longest, subject: PlanSubject) -> str:
    tokens, own = subject.batch.longest_tokens, max(subject.problem.seq_lens)
    fits = "fits" if _longest_fits(longest, subject) else "does not fit"
    where = "in the batch" if tokens == own else f"the batch has {own:,}"
    words = f"{count_words(tokens, 'token')} in the data ({where}): {fits}\nalone "
    if not longest.num_tokens:
        return f"{words}not even one token would, under the dials above"
    if longest.limit == "positions":
        most = f"{longest.num_tokens:,}"
        return f"{words}{most} would, under the dials above: the model's {most} positions"
    bound = "" if longest.limit == "memory" else "at least "
    words += f"{bound}{format_count(longest.num_tokens)} would, under the dials above"
    positions = subject.num_positions
    if positions is not None and positions < tokens:
        words += f"\nbut the model has {positions:,} positions: longer sequences need model.rope"
    return words


def _longest_fits(longest: Longest, subject: PlanSubject) -> bool:
    tokens = subject.batch.longest_tokens
    return tokens <= max(longest.num_tokens, *subject.problem.seq_lens)


def _rivals(found: Found) -> tuple[int, list[tuple[float, bool, Dials]]]:
    """How many are as fast as the best, and the slower ones, fastest first: seconds, whether they
    are of the whole batch, dials. Other seconds are of the busiest of several replicas: the step
    takes at least so long."""
    planned = [(o.step_s, True, o.dials) for o in found.others]
    seen = {dials for _, _, dials in planned} | {found.best.dials}
    tried = [
        (t.bound_s, t.dials.layout.dp == 1, t.dials) for t in found.trials if t.dials not in seen
    ]
    every = sorted([*planned, *tried], key=lambda rival: rival[0])
    slower = [rival for rival in every if rival[0] > found.best.step_s * _SAME]
    return len(every) - len(slower), slower


def _next_words(found: Found) -> str:
    ties, slower = _rivals(found)
    words = f"{count_words(ties, 'candidate')} within a millionth of its time; " if ties else ""
    if not slower:
        return f"{words}none of the others fits, or their bounds are above its time"
    seconds, is_whole, dials = slower[0]
    least = "" if is_whole else "at least "
    slower_by = seconds / found.best.step_s - 1
    share = f"{slower_by:.1%}" if slower_by >= 1e-3 else "less than 0.1%"
    return f"{words}{dials}: {least}{format_seconds(seconds)}, {share} slower"


def _search_words(found: Found) -> str:
    return (
        f"{count_words(len(found.trials), 'candidate')} fit on one replica,"
        f" {len(found.others) + 1} planned whole; {len(found.refused)} did not fit,"
        f" {found.num_pruned} were left out by their bounds"
        f" ({format_seconds(found.seconds)})"
    )


def _to_json(
    subject: PlanSubject, found: Found, report: PlanReport, longest: Longest
) -> dict[str, Any]:
    _, slower = _rivals(found)
    next_best = [
        _dials_json(dials) | {"step_s": seconds, "is_bound": not is_whole}
        for seconds, is_whole, dials in slower[:1]
    ]
    return {
        **subject.to_json(),
        **_dials_json(found.best.dials),
        **report.to_json(),
        "num_idle_devices": subject.problem.num_idle(found.best.dials.layout),
        "longest_of_data_fits": _longest_fits(longest, subject),
        "longest_sequence_tokens": longest.num_tokens,
        "longest_sequence_limit": longest.limit,
        "next_best": next_best[0] if next_best else None,
        "search": {
            "num_tried": len(found.trials),
            "num_planned": len(found.others) + 1,
            "num_refused": len(found.refused),
            "num_pruned": found.num_pruned,
            "seconds": found.seconds,
        },
    }


def _dials_json(dials: Dials) -> dict[str, Any]:
    layout = {"pool": dials.layout.num_devices} if dials.is_pool else asdict(dials.layout)
    return {"method": dials.method, "layout": layout, "dials": dials.values()}
