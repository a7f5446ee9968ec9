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

from paper_memory import chunkflow_table_5, fpdt_strategies, seco_lengths, skrull_buckets
from paper_tables import Table, run_tables
from paper_times import chunkflow_table_4, chunkflow_table_6, infinipipe_table_3


def tables() -> dict[str, Callable[[], Table]]:
    """All of them, by name; made when called."""
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
    return run_tables(tables(), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
