"""`furlong plan` on lengths: the fastest plan that fits, and what is told of it."""

from __future__ import annotations

import json
from typing import Any

from furlong.cli.flag_types import refusal
from furlong.cli.plan_files import draw, write
from furlong.cli.plan_run import decision_of, found_of, with_run_budget
from furlong.cli.plan_sample import sample_json, sample_words
from furlong.cli.plan_search import methods_named, search_with
from furlong.cli.plan_subject import Subject, subject_of
from furlong.config.sources import RunFlags
from furlong.plan.saved import save_plan
from furlong.planners.search.catalogue import SEARCHED
from furlong.planners.search.dials import Dials
from furlong.planners.search.longest import Longest, longest_sequence
from furlong.planners.search.problem import Found
from furlong.report.patience import Tell, patience
from furlong.report.plan_report import PlanReport, report_plan
from furlong.report.plan_text import format_report, line, runs_words
from furlong.report.words import count_words
from furlong.units import format_count, format_seconds

_SAME = 1 + 1e-6
"""Times that are no further apart are equal."""


def run(flags: RunFlags) -> None:
    """Search, print, save and draw what the command line asks for. Raises ConfigError."""
    with patience("searching for a plan") as tell:
        _run(flags, tell)


def _run(flags: RunFlags, tell: Tell) -> None:
    chosen = flags.own
    methods = SEARCHED if chosen.method is None else methods_named(chosen.method)
    subject = with_run_budget(subject_of(flags))
    problem = subject.problem
    decision = decision_of(subject, chosen)
    if decision is not None and decision.searched is not None:
        found = found_of(decision.searched, subject)
    else:
        found = search_with(subject, methods, strict=True, tell=tell)
    best, sampling = found.best, subject.dials.get("sample")
    tell("a plan is found, it is measured")
    report = report_plan(best.plan, best.model, problem.budget_bytes, sum(problem.seq_lens))
    if report.missing and chosen.runnable:
        given = f"a plan that needs {report.missing}, with --runnable"
        raise refusal(given, "a plan that this release runs", "name another method, or none")
    tell("looking for the longest sequence that would fit")
    positions, own = subject.num_positions, max(problem.seq_lens)
    longest = longest_sequence(
        best.dials, best.plan, best.model, budget_bytes=problem.limit_bytes, start=own,
        num_positions=None if positions is None or positions < own else positions,
    )  # fmt: skip
    if chosen.json:
        more: dict[str, Any] = {} if decision is None else {"auto": decision.words}
        more |= {} if sampling is None else {"sample": sample_json(best.plan, sampling)}
        print(json.dumps(_to_json(subject, found, report, longest) | more, indent=1))
    else:
        print(subject.words())
        print(line("plan", str(best.dials)))
        if sampling is not None:
            print(line("sample", sample_words(best.plan, sampling)))
        print(format_report(report))
        if idle := problem.num_idle(best.dials.layout):
            print(line("idle", f"{count_words(idle, 'device')} of {problem.num_devices}"))
        print(line("longest", _longest_words(longest, subject)))
        device = "" if decision is None else problem.model.hardware.name
        print(line("runs here", runs_words(report, device)))
        if decision is None:
            print(line("next best", _next_words(found)))
        else:
            print(line("auto", decision.words))
        print(line("search", _search_words(found)))
    if chosen.out is not None:
        write(save_plan(best.plan, subject.made_for(best.model)), chosen.out)
        if not chosen.json:
            print(f"wrote {chosen.out}")
    note = ", ".join([str(best.dials.layout), *best.dials.words()])
    draw(report.panel(best.dials.method, note), chosen)


def _longest_words(longest: Longest, subject: Subject) -> str:
    tokens, own = subject.batch.longest_tokens, max(subject.problem.seq_lens)
    fits = "fits" if _longest_fits(longest, subject) else "does not fit"
    where = "in the batch" if tokens == own else f"the batch has {own:,}"
    words = f"{tokens:,} tokens in the data ({where}): {fits}\nalone "
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


def _longest_fits(longest: Longest, subject: Subject) -> bool:
    tokens = subject.batch.longest_tokens
    return tokens <= max(longest.num_tokens, *subject.problem.seq_lens)


def _rivals(found: Found) -> list[tuple[float, bool, Dials]]:
    """(seconds, whether they are of the whole batch, dials), fastest first, the best left out;
    other seconds are of the busiest of several replicas: the step takes at least so long."""
    planned = [(o.step_s, True, o.dials) for o in found.others]
    seen = {dials for _, _, dials in planned} | {found.best.dials}
    tried = [
        (t.bound_s, t.dials.layout.dp == 1, t.dials) for t in found.trials if t.dials not in seen
    ]
    return sorted([*planned, *tried], key=lambda rival: rival[0])


def _next_words(found: Found) -> str:
    best_s = found.best.step_s
    rivals = _rivals(found)
    slower = [rival for rival in rivals if rival[0] > best_s * _SAME]
    ties = len(rivals) - len(slower)
    words = f"{count_words(ties, 'candidate')} within a millionth of its time; " if ties else ""
    if not slower:
        return f"{words}none of the others fits, or their bounds are above its time"
    seconds, is_whole, dials = slower[0]
    least = "" if is_whole else "at least "
    slower_by = seconds / best_s - 1
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
    subject: Subject, found: Found, report: PlanReport, longest: Longest
) -> dict[str, Any]:
    rivals = [rival for rival in _rivals(found) if rival[0] > found.best.step_s * _SAME]
    return {
        **subject.to_json(),
        **_dials_json(found.best.dials),
        **report.to_json(),
        "num_idle_devices": subject.problem.num_idle(found.best.dials.layout),
        "longest_of_data_fits": _longest_fits(longest, subject),
        "longest_sequence_tokens": longest.num_tokens,
        "longest_sequence_is_bound": longest.limit != "trials",
        "longest_sequence_limit": longest.limit,
        "next_best": None
        if not rivals
        else _dials_json(rivals[0][2]) | {"step_s": rivals[0][0], "is_bound": not rivals[0][1]},
        "search": {
            "num_tried": len(found.trials),
            "num_planned": len(found.others) + 1,
            "num_refused": len(found.refused),
            "num_pruned": found.num_pruned,
            "seconds": found.seconds,
        },
    }


def _dials_json(dials: Dials) -> dict[str, Any]:
    layout = dials.layout
    sizes = {"dp": layout.dp, "sp": layout.sp, "pp": layout.pp}
    return {"method": dials.method, "layout": sizes, "dials": dials.values()}
