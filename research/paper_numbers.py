"""Every number of the five papers that can be checked, beside ours: docs/research/paper_numbers.md.

    python research/paper_numbers.py                 all tables, and the document
    python research/paper_numbers.py skrull          those whose name has the word, no document

Ours come from the planners, the simulator and the cost model. What no paper prints is in unit tests
(docs/research/derivations.md). Takes about two minutes. Exits 1 for a miss without a cause, and for
a cause without a miss.
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

DOCUMENT = Path(__file__).parents[1] / "docs" / "research" / "paper_numbers.md"
Tables = Mapping[str, Callable[[], Table]]

INTRODUCTION = """\
Written by `python research/paper_numbers.py`. *Paper* is what a paper prints, *ours* what furlong's
planners, simulator and cost model give. A prediction is a row with a bound that nothing of its
table was fitted to. Points on a line that was fitted to other points of the same table count apart.
Rows without a bound are shown only: the papers do not print their settings. What we derived
ourselves is in [derivations](derivations.md).

**The largest open contradiction is FlexSP against InfiniPipe.** The paper has InfiniPipe ahead in
12 of 12 settings, by 1.3 to 1.69 times; here FlexSP is the faster one in most of them, in groups
that may be larger than the heads allow, as the paper's own are. So no ranking of InfiniPipe against
plans on pools, in [the comparison](comparison.md) either, is confirmed by the paper.
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
    summary = summarised(found)
    print(f"\n{summary}")
    if not words:
        title = summary.partition(";")[0]
        front = f"# The papers' numbers: {title}\n\nCounted: {summary}.\n\n{INTRODUCTION}"
        DOCUMENT.write_text("\n".join([front, *document]), encoding="utf-8")
    wrong = [f"{table.title}: {row.case}" for table in found for row in table.wrong]
    for case in wrong:
        print(f"not as promised: {case}")
    return 1 if wrong or not found else 0


def summarised(tables: Sequence[Table]) -> str:
    """The counts in words."""
    promised = [row for table in tables for row in table.promised]
    on_lines = [row for table in tables for row in table.rows if row.on_line]
    fitted = sum(row.fitted for table in tables for row in table.rows)
    num_missed, off_lines = (sum(row.missed for row in rows) for rows in (promised, on_lines))
    words = f"{len(promised)} predictions, {len(promised) - num_missed} met, {num_missed} missed"
    lines = f"{len(on_lines)} points on lines fitted to their own tables"
    if off_lines:
        lines += f", {off_lines} of them off"
    shown = [f"{len(table.shown)} of {table.title}" for table in tables if table.shown]
    more = f"; without a bound: {', '.join(shown)}" if shown else ""
    return f"{words}; {lines}; {fitted} fitted{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
