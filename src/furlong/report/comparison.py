"""Several methods on one batch: a table, and the refusals below it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from furlong.report.plan_report import PlanReport
from furlong.report.words import BREAKDOWN_WORDS, align
from furlong.units import format_bytes, format_count, format_seconds

_FAR = 10
"""Most seconds of a row of the table, in those of the fastest."""
_WIDTH = 160
"""Most characters of a reason for having no plan; `--json` has all of it."""
_SHARES = {name: word for name, word in BREAKDOWN_WORDS.items() if name != "compute"}
"""Columns of the time in which nothing is computed, by the fields of Breakdown."""


@dataclass(frozen=True)
class Row:
    """A method and its best plan, or why it has none."""

    method: str
    layout: str = ""
    dials: str = ""
    report: PlanReport | None = None
    refusal: str = ""


def format_comparison(rows: Sequence[Row]) -> str:
    """The methods that have a plan, fastest first; in footnotes those that take many times as long,
    and those that have none, with the reason."""
    every = _by_time(rows)
    planned = [pair for pair in every if pair[1].step_s <= _FAR * every[0][1].step_s]
    table = [[
        "method", "dp x sp x pp", "runs here", "s/step", "vs best", "tokens/s", "bubble",
        "idle in pools", *_SHARES.values(), "peak", "dials",
    ]]  # fmt: skip
    for row, report in planned:
        shares = [getattr(report.breakdown, name) for name in _SHARES]
        table.append([
            row.method, row.layout, "no" if report.missing else "yes",
            format_seconds(report.step_s), f"{report.step_s / planned[0][1].step_s:.2f}x",
            format_count(report.tokens_per_s), f"{report.figures.bubble_ratio:.1%}",
            *(f"{share:.1%}" for share in (report.pool_idle_ratio, *shares)),
            format_bytes(report.peak_bytes), row.dials,
        ])  # fmt: skip
    # columns in which every row says nothing, or no share, are left out
    columns = [
        own for own in zip(*table, strict=True) if not {"", "0.0%", "-0.0%"}.issuperset(own[1:])
    ]
    lines = align(list(zip(*columns, strict=True)), left=("method", "dials"))
    lines += [
        f"{row.method}: {report.step_s / every[0][1].step_s:.0f}x the time of the fastest"
        for row, report in every[len(planned) :]
    ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.report is None:
            reasons.setdefault(row.refusal, []).append(row.method)
    for reason, methods in reasons.items():
        lines.append(textwrap.shorten(f"{', '.join(methods)}: no plan: {reason}", _WIDTH))
    return "\n".join(lines)


def comparison_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The methods as plain values, in the same order."""
    planned = _by_time(rows)
    values: list[dict[str, Any]] = [
        {"method": row.method, "layout": row.layout, "dials": row.dials}
        | {"relative": report.step_s / planned[0][1].step_s, **report.to_json()}
        for row, report in planned
    ]
    refused = [row for row in rows if row.report is None]
    return values + [{"method": row.method, "refusal": row.refusal} for row in refused]


def _by_time(rows: Sequence[Row]) -> list[tuple[Row, PlanReport]]:
    planned = [(row, row.report) for row in rows if row.report is not None]
    return sorted(planned, key=lambda pair: pair[1].step_s)
