"""`furlong plan --compare`: one batch under every method, each with its own best plan."""

from __future__ import annotations

import json
from functools import partial

from furlong.cli.plan_files import save, with_few_ranks
from furlong.cli.plan_search import OURS, has_given, methods_named, search_with
from furlong.cli.plan_subject import subject_of
from furlong.config.sources import RunFlags
from furlong.errors import ConfigError, PlanError, UserError
from furlong.planners.search.problem import Found
from furlong.report.comparison import Row, comparison_json, format_comparison
from furlong.report.patience import Tell, patience
from furlong.report.plan_report import report_plan
from furlong.report.words import count_words

_SLOWEST = 2
"""Of the panels of a picture, by the fastest one's time: more would squeeze all others."""


def run(flags: RunFlags) -> None:
    """Print the table and draw the panels. Raises ConfigError where no method has a plan."""
    with patience("comparing methods") as tell:
        _run(flags, tell)


def _run(flags: RunFlags, tell: Tell) -> None:
    chosen = flags.own
    methods = methods_named(chosen.method)
    subject = subject_of(flags)
    found: dict[str, Found] = {}
    rows: list[Row] = []
    for name, method in methods.items():
        try:
            own = partial(_tell_of, name, tell)
            found[name] = search_with(subject, {name: method}, strict=name == OURS, tell=own)
        except (UserError, PlanError) as error:
            rows.append(Row(name, refusal=_reason(error)))
    # our search is over the plans of all methods that have the given dials
    having = [one for one in reversed(found.values()) if has_given(subject, one.best.dials)]
    if having and OURS in methods:
        found[OURS] = min(having, key=lambda one: one.best.step_s)
        rows = [row for row in rows if row.method != OURS]
    problem, panels = subject.problem, []
    fastest_s = min((one.best.step_s for one in found.values()), default=0.0)
    for name, one in found.items():
        dials = one.best.dials
        report = report_plan(
            one.best.plan, one.best.model, problem.budget_bytes, sum(problem.seq_lens)
        )
        layout = f"{dials.layout.dp} x {dials.layout.sp} x {dials.layout.pp}"
        if idle := problem.num_idle(dials.layout):
            layout += f" ({idle} idle)"
        words = ", ".join(dials.words())
        chosen_from = "" if dials.method == name else f"{dials.method}: "
        rows.append(Row(name, layout, chosen_from + words, report))
        if not chosen_from and report.step_s <= _SLOWEST * fastest_s:
            panels.append(report.panel(name, ", ".join([str(dials.layout), words])))
    if chosen.json:
        print(json.dumps({**subject.to_json(), "methods": comparison_json(rows)}, indent=1))
    else:
        print(subject.words())
        print(format_comparison(rows))
    if not found:
        raise ConfigError(
            given=f"none of {count_words(len(rows), 'method')} has a plan that fits",
            required="at least one",
            source="the refusals above",
            change="do what one of them says",
        )
    if chosen.picture is not None:
        panels.sort(key=lambda panel: panel.timeline.duration_s)
        save([with_few_ranks(panel, most=2) for panel in panels], chosen.picture)
        if not chosen.json:
            print(f"wrote {chosen.picture}: plans of at most {_SLOWEST} times the best one's time")


def _tell_of(method: str, tell: Tell, words: str) -> None:
    tell(f"{method}: {words}")


def _reason(error: UserError | PlanError) -> str:
    if isinstance(error, UserError):
        return f"{error.given}; required: {error.required}; to mend it: {error.change}"
    return str(error).splitlines()[0]
