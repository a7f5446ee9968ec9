"""`furlong plan --compare`: one batch under every method, each with its own best plan."""

from __future__ import annotations

import json

from furlong.cli.flag_types import refusal
from furlong.cli.planning.files import draw
from furlong.cli.planning.pairs import require_one_pair
from furlong.cli.planning.search import OURS, has_given, methods_named, search_with
from furlong.cli.planning.subject import subject_of
from furlong.config.sources import RunFlags
from furlong.errors import PlanError, UserError
from furlong.planners.published.problem import Found
from furlong.report.patience import Tell
from furlong.report.report import report_plan
from furlong.report.text import Row, comparison_json, format_comparison
from furlong.units import count_words

_SLOWEST = 2
"""Most seconds of a panel, in those of the fastest one: more would squeeze all others."""


def run(flags: RunFlags, tell: Tell) -> None:
    """Print the table and draw the panels. Raises ConfigError where no method has a plan."""
    chosen = flags.own
    methods = methods_named(chosen.method)
    subject = subject_of(flags)
    require_one_pair(flags, subject)
    found: dict[str, Found] = {}
    rows: list[Row] = []
    for name, method in methods.items():
        try:
            found[name] = search_with(
                subject, {name: method}, strict=name == OURS, tell=_telling(name, tell)
            )
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
        best, dials = one.best, one.best.dials
        report = report_plan(best.plan, best.model, problem.budget_bytes, sum(problem.seq_lens))
        layout = f"{dials.layout.dp} x {dials.layout.sp} x {dials.layout.pp}"
        layout = dials.layout_words() if dials.is_pool else layout
        if idle := problem.num_idle(dials.layout):
            layout += f" ({idle} idle)"
        words = ", ".join(dials.words())
        chosen_from = "" if dials.method == name else f"{dials.method}: "
        rows.append(Row(name, layout, chosen_from + words, report))
        if not chosen_from and report.step_s <= _SLOWEST * fastest_s:
            panels.append(report.panel(name, f"{dials.layout_words()}, {words}"))
    if chosen.json:
        print(json.dumps({**subject.to_json(), "methods": comparison_json(rows)}, indent=1))
    else:
        print(subject.words())
        print(format_comparison(rows))
    if not found:
        raise refusal(
            f"none of {count_words(len(rows), 'method')} has a plan that fits", "at least one",
            "do what one of them says", "the refusals above",
        )  # fmt: skip
    tell("drawing them")
    panels.sort(key=lambda panel: panel.timeline.duration_s)
    note = f": plans of at most {_SLOWEST} times the best one's time"
    draw(panels, chosen, most_ranks=2, note=note)


def _telling(method: str, tell: Tell) -> Tell:
    return lambda words: tell(f"{method}: {words}")


def _reason(error: UserError | PlanError) -> str:
    if isinstance(error, UserError):
        return f"{error.given}; required: {error.required}; to mend it: {error.change}"
    return str(error).splitlines()[0]
