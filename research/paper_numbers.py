"""Every number of the five papers that can be checked, beside ours: docs/research/paper_numbers.md.

    python research/paper_numbers.py                 all tables, and the document
    python research/paper_numbers.py skrull          those whose name has the word, no document

Ours come from the planners, the simulator and the cost model. What no paper prints is in unit tests
(docs/research/derivations.md). Takes about four minutes of CPU. Exits 1 for a miss without a cause,
and for a cause without a miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
Tables = Mapping[str, tuple[Callable[[], Table], str]]
"""By name, what makes a table, and whether a run can do what it tells."""

_YES = "yes"
_TP = "no: tensor parallelism"
_ZERO = "no: ZeRO-3 with pools or stages, bf16 gradients"
_ZERO_2 = "no: ZeRO-2, bf16 gradients"
_ARITHMETIC = "none needed: arithmetic"

INTRODUCTION = """\
Written by `python research/paper_numbers.py`. *Paper* is what a paper prints, *ours* what furlong's
planners, simulator and cost model give, *off* the difference as a share of the paper's. A
prediction is a row with a bound that nothing of its table was fitted to. Points on a line that was
fitted to other points of the same table count apart. Rows without a bound are shown only: the
papers do not print their settings. What we derived ourselves is in [derivations](derivations.md).

**Bounds differ**, from the printed digits to half as much again for aggregates whose settings a
paper tells in part. So the first table counts, whatever was promised, what lies within 10 % and
within 25 %.

**A number that is met is not a step that furlong can run.** The last column says which a run can
do. ChunkFlow's settings have tensor parallelism, InfiniPipe's and most of FPDT's ZeRO-3, Skrull's
ZeRO-2, all of them gradients in bfloat16: they are computed by code in `research/papers` with the
cost model, and `furlong train` has none of these ([what is missing](../many-devices.md)).

**The largest open contradiction is FlexSP against InfiniPipe.** The paper has InfiniPipe ahead in
12 of 12 settings, by 1.3 to 1.69 times; here FlexSP is the faster one in most of them, in groups
that may be larger than the heads allow, as the paper's own are. So no ranking of InfiniPipe against
plans on pools, in [the comparison](comparison.md) either, is confirmed by the paper.
"""

NOT_ATTEMPTED = """\
## Not attempted

| Paper | What it prints or draws |
| --- | --- |
| ChunkFlow | the bars of Figure 8; that chunks of its grid differ by less than 0.5 % |
| InfiniPipe | Figures 1a, 11 (ablations), 12 and 13; 5 s of solving |
| Skrull | Figures 1b and 4 (batch sizes) |
| SeCO | that chunks beyond 128 tokens gain little; Table 2; the baselines of ZeRO |
| SpaCO | Figures 6 and 7; a loss within 0.1 of SeCO's at 1/8 |
| FPDT | the table of bytes in Nd; spikes of memory; the bars of 2.7B to 13B; Llama 3.1's table |
"""


def sections() -> dict[str, Tables]:
    """Heading -> its tables, made when called."""
    return {
        "ChunkFlow": {
            "chunkflow-bubbles": (chunkflow.bubbles, _YES),
            "chunkflow-figure-1": (chunkflow.figure_1, _TP),
            "chunkflow-table-4": (chunkflow_times.table_4, _TP),
            "chunkflow-table-5": (chunkflow.table_5, _TP),
            "chunkflow-table-6": (chunkflow_times.table_6, _TP),
            "chunkflow-speedup": (chunkflow_speedups.over_megatron, _TP),
            "chunkflow-devices": (chunkflow_speedups.more_devices, _TP),
        },
        "InfiniPipe": {
            "infinipipe-table-2": (infinipipe.table_2, "packing yes, threshold capped"),
            "infinipipe-table-3": (infinipipe.table_3, _ZERO),
            "infinipipe-figure-8": (infinipipe_speedups.figure_8, _ZERO),
            "infinipipe-figure-9": (infinipipe_speedups.figure_9, _ZERO),
            "infinipipe-figure-10": (infinipipe_speedups.figure_10, _ZERO),
        },
        "Skrull": {
            "skrull-text": (skrull.text, _ARITHMETIC),
            "skrull-table-3": (skrull.table_3, "no: its cluster"),
            "skrull-local": (skrull.local_shares, _YES),
            "skrull-buckets": (skrull.buckets, _ZERO_2),
            "skrull-speedups": (skrull.speedups, _ZERO_2),
        },
        "SeCO and SpaCO": {
            "seco-times": (seco.times, _YES),
            "seco-lengths": (seco.lengths, "with K,V on the CPU: dK,dV are float32"),
        },
        "FPDT": {
            "fpdt-memory": (fpdt.memory, _ZERO),
            "fpdt-mfu": (fpdt.mfu, _ZERO),
            "fpdt-claims": (fpdt.claims, "chunks and streams yes, ZeRO-3 no"),
        },
    }


def main(words: Sequence[str]) -> int:
    document: list[str] = []
    found: list[Table] = []
    counted = ["| paper | predictions | within 10 % | within 25 % | in their own bounds |",
               "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for heading, tables in sections().items():
        document.append(f"## {heading}\n")
        first = len(found)
        for name, (make, run) in tables.items():
            if words and not any(word in name for word in words):
                continue
            table = replace(make(), run=run)
            print(table.text(), flush=True)
            document.append(table.markdown() + "\n")
            found.append(table)
        counts = map(str, counts_of(found[first:]))
        counted.append(f"| {heading} | {' | '.join(counts)} |")
    summary = summarised(found)
    print(f"\n{summary}")
    if not words:
        title = summary.partition(";")[0]
        counted.append(f"| all | {' | '.join(map(str, counts_of(found)))} |")
        front = f"# The papers' numbers: {title}\n\nCounted: {summary}.\n\n{INTRODUCTION}"
        pages = [front, *counted, "", *document, NOT_ATTEMPTED]
        DOCUMENT.write_text("\n".join(pages), encoding="utf-8")
    wrong = [f"{table.title}: {row.case}" for table in found for row in table.wrong]
    for case in wrong:
        print(f"not as promised: {case}")
    return 1 if wrong or not found else 0


def counts_of(tables: Sequence[Table]) -> tuple[int, int, int, int]:
    """Predictions; those within 10 % and within 25 % of the print; those in their own bounds."""
    rows = [row for table in tables for row in table.promised]
    near, about = (sum(row.is_within(share) for row in rows) for share in (0.1, 0.25))
    return len(rows), near, about, sum(not row.missed for row in rows)


def summarised(tables: Sequence[Table]) -> str:
    """The counts in words."""
    total, near, about, met = counts_of(tables)
    on_lines = [row for table in tables for row in table.rows if row.on_line]
    fitted = sum(row.fitted for table in tables for row in table.rows)
    off_lines = sum(row.missed for row in on_lines)
    words = f"{total} predictions, {near} within 10 %, {about} within 25 %, "
    words += f"{met} in their own bounds"
    lines = f"{len(on_lines)} points on lines fitted to their own tables"
    if off_lines:
        lines += f", {off_lines} of them off"
    shown = [f"{len(table.shown)} of {table.title}" for table in tables if table.shown]
    more = f"; without a bound: {', '.join(shown)}" if shown else ""
    return f"{words}; {lines}; {fitted} fitted{more}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
