"""Every number of the five papers that can be checked, beside ours; writes docs/paper_numbers.md.

    python benchmarks/paper_numbers.py                 all tables, and the document
    python benchmarks/paper_numbers.py skrull          those whose name has the word, no document

Ours come from the planners, the simulator and the cost model. Worked examples first, then the fits
of `paper_fits`, then the simulated speed-ups of `paper_speedups`. Takes about two minutes. Exits 1
for a miss without a cause, and for a cause without a miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import paper_fits
import paper_speedups
from paper_batches import (
    fpdt_slowdowns,
    fpdt_thresholds,
    seco_spaco_times,
    skrull_example,
    skrull_numbers,
    spaco_paths,
)
from paper_infinipipe import infinipipe_example
from paper_schedules import chunkflow_bubbles, chunkflow_makespans, chunkflow_stored_kv
from paper_tables import Table

DOCUMENT = Path(__file__).parents[1] / "docs" / "paper_numbers.md"
Tables = Mapping[str, Callable[[], Table]]

INTRODUCTION = """\
# The papers' numbers

Written by `python benchmarks/paper_numbers.py`. *Paper* is what a paper prints, or what follows
from its equations as corrected (the tables' notes say where it prints nothing); *ours* is what
furlong's planners, simulator and cost model give.
A row says whether it was fitted, what bound it promises, and where it misses with which cause.
Rows without a bound are shown only.
"""


def examples() -> Tables:
    """The worked examples, paper by paper; made when called."""
    return {
        "chunkflow-bubbles": chunkflow_bubbles,
        "chunkflow-schedules": chunkflow_makespans,
        "chunkflow-stored-kv": chunkflow_stored_kv,
        "infinipipe-example": infinipipe_example,
        "skrull-example": skrull_example,
        "skrull-numbers": skrull_numbers,
        "seco-spaco-times": seco_spaco_times,
        "spaco-paths": spaco_paths,
        "fpdt-thresholds": fpdt_thresholds,
        "fpdt-slowdowns": fpdt_slowdowns,
    }


def sections() -> dict[str, Tables]:
    """Heading -> its tables."""
    return {
        "Worked examples": examples(),
        "Fits that predict what they were not fitted on": paper_fits.tables(),
        "Simulated speed-ups at the papers' settings": paper_speedups.tables(),
    }


def main(words: Sequence[str]) -> int:
    document = [INTRODUCTION]
    wrong: list[str] = []
    missed: list[str] = []
    num_tables = num_promises = 0
    for heading, tables in sections().items():
        document.append(f"## {heading}\n")
        for name, make in tables.items():
            if words and not any(word in name for word in words):
                continue
            table = make()
            print(table.text(), flush=True)
            document.append(table.markdown() + "\n")
            wrong += [f"{table.title}: {row.case}" for row in table.wrong]
            missed += [f"{table.title}: {row.case}" for row in table.missed]
            num_tables += 1
            num_promises += sum(r.tolerance is not None and not r.fitted for r in table.rows)
    summary = f"{num_tables} tables, {num_promises} promised rows, {len(missed)} missed"
    print(f"\n{summary}")
    if not words:
        known = "".join(f"\n- missed: {case}" for case in missed)
        document.insert(1, f"{summary}.{known}\n")
        DOCUMENT.write_text("\n".join(document), encoding="utf-8")
    for case in wrong:
        print(f"not as promised: {case}")
    return 1 if wrong or not num_tables else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
