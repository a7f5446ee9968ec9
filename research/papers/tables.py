"""Tables that put a paper's numbers beside ours, for a terminal and for a document.

Every row says whether it was fitted, is promised within a tolerance, or is only shown. A point on a
line that was fitted to other points of its own table is no prediction, and counts apart. A row that
misses its promise needs a cause, and a cause needs a miss: both are visible in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from furlong.units import count_words

Value = float | str


class Bound(TypedDict):
    tolerance: float
    promise: str


class Printed(Bound):
    paper: float


def printed(text: str) -> Printed:
    """A number as the paper prints it: ours must round to the same digits."""
    decimals = len(text.partition(".")[2])
    paper = float(text)
    return {"paper": paper, "tolerance": 0.5 * 10**-decimals / paper, "promise": "as printed"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a paper beside ours; or a text, which is promised to be the same."""

    case: str
    paper: Value
    ours: Value
    tolerance: float | None = None
    """Of ours over the paper's, as a share; None: shown, not promised."""
    promise: str = ""
    """The tolerance in words, where a share says little."""
    at_most: bool = False
    """Ours may be smaller by any amount: it is then the better one."""
    fitted: bool = False
    on_line: bool = False
    """A point on a line that was fitted to others of its table: a check of the form alone."""
    cause: str = ""
    """Why the row misses, known before it is printed."""
    run: str = ""
    """Whether a run can do it; empty: what its table says."""

    @property
    def off(self) -> float:
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return 0.0 if self.paper == self.ours else math.inf
        return self.ours / self.paper - 1

    @property
    def missed(self) -> bool:
        if self.fitted or self.tolerance is None:
            return False
        beyond = self.off if self.at_most else abs(self.off)
        return beyond > self.tolerance + 1e-12

    def is_within(self, share: float) -> bool:
        """Whether ours is the paper's but for a share of it, whatever is promised."""
        off = max(0.0, self.off) if self.at_most else abs(self.off)
        return off <= share + 1e-12

    @property
    def verdict(self) -> str:
        if self.fitted:
            return "fitted"
        if self.tolerance is None:
            return ""
        if self.at_most and self.off < 0:
            return "better"
        same = "the same" if isinstance(self.paper, str) else "exact"
        promise = self.promise or (f"{self.tolerance:.0%}" if self.tolerance else same)
        met = "on the line" if self.on_line else "met"
        return f"{'MISSED' if self.missed else met} ({promise})"

    def cells(self) -> tuple[str, str, str, str, str]:
        """case, paper, ours, error, verdict."""
        figures = [_figure(x) for x in (self.paper, self.ours)]
        is_number = not isinstance(self.paper, str) and not isinstance(self.ours, str)
        error = f"{self.off:+.1%}" if is_number else ""
        return self.case, figures[0], figures[1], error, self.verdict


@dataclass(frozen=True)
class Table:
    title: str
    unit: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)
    run: str = ""
    """Whether `furlong train` can do what its rows tell, and what it lacks for it."""

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.missed]

    @property
    def wrong(self) -> list[Row]:
        """Misses without a cause, and causes without a miss."""
        return [row for row in self.rows if row.missed != bool(row.cause)]

    @property
    def promised(self) -> list[Row]:
        """Predictions: rows with a bound that nothing of their table was fitted to."""
        bounded = [row for row in self.rows if row.tolerance is not None and not row.fitted]
        return [row for row in bounded if not row.on_line]

    @property
    def shown(self) -> list[Row]:
        """Rows with a number of the paper and no bound."""
        return [row for row in self.rows if row.tolerance is None and row.paper != ""]

    def text(self) -> str:
        """For a terminal."""
        rows = [row.cells() for row in self.rows]
        widths = [max(len(cells[i]) for cells in rows) for i in range(4)]
        lines = [f"\n{self.title}  [{self.unit}]"]
        for row, (case, *figures, verdict) in zip(self.rows, rows, strict=True):
            numbers = "  ".join(f"{x:>{w}}" for x, w in zip(figures, widths[1:], strict=True))
            lines.append(f"  {case:{widths[0]}}  {numbers}  {verdict}".rstrip())
            if row.cause:
                lines.append(f"  {'':{widths[0]}}  {row.cause}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def markdown(self) -> str:
        """For a document: rows that were fitted, or lie on a line that was, are counted only."""
        lines = [f"### {self.title}", ""]
        fitted = [row for row in self.rows if (row.fitted or row.on_line) and not row.missed]
        others = [row for row in self.rows if row not in fitted and row.paper != ""]
        if others:
            lines += [
                f"| {self.unit} | paper | ours | off | within bound? | in a run |",
                "| --- | ---: | ---: | ---: | --- | --- |",
            ]
        for row in others:
            *figures, verdict = row.cells()
            verdict = f"**{verdict}**: {row.cause}" if row.cause else verdict
            lines.append(f"| {' | '.join([*figures, verdict, row.run or self.run])} |")
        notes = list(self.notes)
        if fitted:
            off = [abs(row.off) for row in fitted if row.on_line]
            told = f"; {len(off)} on their line, at most {max(off):.1%} off" if off else ""
            notes.insert(0, f"{count_words(len(fitted) - len(off), 'row')} fitted{told}")
        lines += [*([""] if others else []), *(f"- {note}" for note in notes)]
        return "\n".join(lines).rstrip()


def _figure(value: Value) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def within_factor(ours: float, paper: float, factor: float = 1.5) -> Bound:
    """The promise of an aggregate: the paper's, by at most so many times more or less."""
    tolerance = factor - 1 if ours > paper else 1 - 1 / factor
    return {"tolerance": tolerance, "promise": f"within {factor}x"}


def shown(case: str, ours: Value, paper: Value = "") -> Row:
    """A row without a promise."""
    return Row(case=case, paper=paper, ours=ours)


def aggregate(case: str, paper: float, ours: float, cause: str = "", factor: float = 1.5) -> Row:
    """A printed aggregate, promised within a factor; a cause is printed where it misses."""
    return Row(case=case, paper=paper, ours=ours, cause=cause, **within_factor(ours, paper, factor))


def speedup(case: str, paper: float, ours: float, cause: str = "", factor: float = 1.25) -> Row:
    """A printed speed-up, promised within a factor and to be none below 1."""
    promised = within_factor(ours, paper, factor)
    if ours < 1 < paper:
        promised["tolerance"] = min(promised["tolerance"], 1 - 1 / paper)
    return Row(case=case, paper=paper, ours=ours, cause=cause, **promised)


def count_faster(
    speedups: Sequence[float], case: str = "settings that are faster", cause: str = ""
) -> Row:
    """All settings are promised to have the paper's sign."""
    faster = sum(speedup > 1 for speedup in speedups)
    return Row(case=case, paper=len(speedups), ours=faster, tolerance=0, cause=cause)
