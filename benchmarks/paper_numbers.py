"""Every number of the five papers that can be checked, beside ours; writes docs/paper_numbers.md.

    python benchmarks/paper_numbers.py                 all tables, and the document
    python benchmarks/paper_numbers.py skrull          those whose name has the word, no document

Ours come from the planners, the simulator and the cost model. What no paper prints is in unit tests
(docs/derivations.md). Takes about two minutes. Exits 1 for a miss without a cause, and for a cause
without a miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from papers import (
    chunkflow,
    chunkflow_speedups,
    chunkflow_times,
    fpdt,
    infinipipe,
    infinipipe_speedups,
    seco,
    skrull,
)
from papers.tables import Table

DOCUMENT = Path(__file__).parents[1] / "docs" / "paper_numbers.md"
Tables = Mapping[str, Callable[[], Table]]

INTRODUCTION = """\
Written by `python benchmarks/paper_numbers.py`. *Paper* is what a paper prints; *ours* is what
furlong's planners, simulator and cost model give. A row says whether it was fitted, what bound it
promises, and where it misses with which cause. Rows without a bound are shown only: their settings
are not printed (Skrull's four speed-ups are among them). What we derived ourselves is in
[derivations](derivations.md).
"""


def sections() -> dict[str, Tables]:
    """Heading -> its tables, made when called."""
    return {
        "ChunkFlow": {
            "chunkflow-bubbles": chunkflow.bubbles,
            "chunkflow-figure-1": chunkflow.figure_1,
            "chunkflow-table-4": chunkflow_times.table_4,
            "chunkflow-table-5": chunkflow.table_5,
            "chunkflow-table-6": chunkflow_times.table_6,
            "chunkflow-speedup": chunkflow_speedups.over_megatron,
            "chunkflow-devices": chunkflow_speedups.more_devices,
        },
        "InfiniPipe": {
            "infinipipe-table-2": infinipipe.table_2,
            "infinipipe-table-3": infinipipe.table_3,
            "infinipipe-figure-8": infinipipe_speedups.figure_8,
            "infinipipe-figure-9": infinipipe_speedups.figure_9,
            "infinipipe-figure-10": infinipipe_speedups.figure_10,
        },
        "Skrull": {
            "skrull-text": skrull.text,
            "skrull-table-3": skrull.table_3,
            "skrull-buckets": skrull.buckets,
            "skrull-speedups": skrull.speedups,
        },
        "SeCO and SpaCO": {"seco-times": seco.times, "seco-lengths": seco.lengths},
        "FPDT": {"fpdt-memory": fpdt.memory, "fpdt-mfu": fpdt.mfu, "fpdt-claims": fpdt.claims},
    }


def main(words: Sequence[str]) -> int:
    document: list[str] = []
    found: list[Table] = []
    for heading, tables in sections().items():
        document.append(f"## {heading}\n")
        for name, make in tables.items():
            if words and not any(word in name for word in words):
                continue
            table = make()
            print(table.text(), flush=True)
            document.append(table.markdown() + "\n")
            found.append(table)
    summary, missed = summarised(found)
    print(f"\n{summary}")
    if not words:
        known = "".join(f"\n- missed: {case}" for case in missed)
        front = f"# The papers' numbers: {summary}\n\n{INTRODUCTION}{known}\n"
        DOCUMENT.write_text("\n".join([front, *document]), encoding="utf-8")
    wrong = [f"{table.title}: {row.case}" for table in found for row in table.wrong]
    for case in wrong:
        print(f"not as promised: {case}")
    return 1 if wrong or not found else 0


def summarised(tables: Sequence[Table]) -> tuple[str, list[str]]:
    """The counts in words, and the rows that are missed."""
    promised = sum(len(table.promised) for table in tables)
    missed = [f"{table.title}: {row.case}" for table in tables for row in table.missed]
    return f"{promised} promised, {promised - len(missed)} met, {len(missed)} missed", missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
