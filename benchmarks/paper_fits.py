"""Fits that predict what they were not fitted on: the papers' tables beside the cost model's.

    python benchmarks/paper_fits.py            all tables
    python benchmarks/paper_fits.py fpdt       those whose name contains the word

Every table says which rows were fitted; the others are predictions with the tolerance that is
printed. A row that misses is shown as a miss with its cause. Exits 1 for a miss without a cause,
and for a cause without a miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a paper beside ours."""

    case: str
    paper: float
    ours: float
    tolerance: float | None = None
    """Of ours over the paper's, as a share; None: shown, not promised."""
    promise: str = ""
    """The tolerance in words, where a share says little."""
    fitted: bool = False
    cause: str = ""
    """Why the row misses, known before it is printed."""

    @property
    def off(self) -> float:
        return self.ours / self.paper - 1

    @property
    def missed(self) -> bool:
        return not self.fitted and self.tolerance is not None and abs(self.off) > self.tolerance

    @property
    def verdict(self) -> str:
        if self.fitted:
            return "fitted"
        if self.tolerance is None:
            return ""
        promise = self.promise or f"{self.tolerance:.0%}"
        return f"{'MISSED' if self.missed else 'met'} ({promise})"


@dataclass(frozen=True)
class Table:
    title: str
    unit: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.missed]

    @property
    def wrong(self) -> list[Row]:
        """Misses without a cause, and causes without a miss."""
        return [row for row in self.rows if row.missed != bool(row.cause)]

    def text(self) -> str:
        width = max(len(row.case) for row in self.rows)
        lines = [f"\n{self.title}  [{self.unit}]"]
        for row in self.rows:
            figures = f"{row.paper:10.4g} {row.ours:10.4g} {row.off:+8.1%}"
            lines.append(f"  {row.case:{width}} {figures}  {row.verdict}".rstrip())
            if row.cause:
                lines.append(f"  {'':{width}} {row.cause}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def tables() -> dict[str, Callable[[], Table]]:
    """All of them, by name; made when called."""
    from paper_memory import chunkflow_table_5, fpdt_strategies, seco_lengths, skrull_buckets
    from paper_times import chunkflow_table_4, chunkflow_table_6, infinipipe_table_3

    return {
        "infinipipe-table-3": infinipipe_table_3,
        "chunkflow-table-4": chunkflow_table_4,
        "chunkflow-table-5": chunkflow_table_5,
        "chunkflow-table-6": chunkflow_table_6,
        "skrull-buckets": skrull_buckets,
        "seco-lengths": seco_lengths,
        "fpdt-strategies": fpdt_strategies,
    }


def main(words: Sequence[str]) -> int:
    chosen = {
        name: make
        for name, make in tables().items()
        if not words or any(word in name for word in words)
    }
    wrong = []
    for make in chosen.values():
        table = make()
        print(table.text(), flush=True)
        wrong += [f"{table.title}: {row.case}" for row in table.wrong]
    for case in wrong:
        print(f"\nnot as promised: {case}")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
