"""What a sampled backward learns, and what that takes, against exact gradients; on real text.

A model of 3 layers (hidden 128) learns windows of 4,096 tokens of the Python standard library, in
chunks of 64, one window per update: exact, and `unbiased`, `fixed` and SpaCO's published rule
(`paper`, without its cap) at rates 1/2, 1/4 and 1/8, three seeds each. Each of the ten takes the
best of three learning rates, found with one seed and a schedule of 0.3 times the updates. Two
processes with one thread each.

    python research/sampled_learning.py runs/learning

Every finished curve is a JSON file in the folder; run again, it is not computed again.

Equal updates favour exact gradients, equal seconds cheap ones. A run in the middle of its schedule
is not comparable with one at its end, so exact training is repeated with 0.3 and 0.6 times the
updates: against those ends, interpolated over the logarithm of seconds, stands what a sampled run
reaches in the same seconds. What is worse or better says so only where the ranges of the seeds do
not overlap.

Promises: the whole experiment takes at most 30 minutes of two cores of its own; every sampled
run lowers the held-out loss (from that of guessing) by at least 0.8 of what exact training does
with as many updates. Whether sampling pays is printed, not promised. Exits 1 on a miss.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import console, machine, print_promises
from learning_curve import (
    CHUNK_TOKENS,
    NUM_HELD_OUT,
    VOCAB_SIZE,
    WINDOW_TOKENS,
    Curve,
    Learned,
    learn,
)
from learning_runs import (
    EXACT,
    NUM_PROCESSES,
    SEEDS,
    Config,
    Row,
    best_lrs,
    candidates,
    finals,
    name_of,
    promises,
    remarks,
    summarize,
    update_seconds,
    verdict,
)
from library import windows
from rich.table import Table

from furlong.units import format_seconds

_NUM_UPDATES = 60
_LEAST_UPDATES = 10


def main() -> int:
    arguments = _parse()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_windows(folder)
    short = computed(candidates(arguments.updates), folder)
    lrs = best_lrs(short)
    runs = computed(finals(arguments.updates, lrs), folder)
    # a curve of the search may be one of the exact runs with fewer updates, too
    everything = list({learned.curve: learned for learned in [*short, *runs]}.values())
    seconds = update_seconds(everything)
    rows = summarize(runs, seconds, arguments.updates)
    console.print(_table(rows))
    for note in (*remarks(rows), _unchunked(arguments.updates, lrs[EXACT], seconds, folder)):
        console.print(note)
    found = promises(rows, everything)
    print_promises(found)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return int(any(promise.verdict == "MISSED" for promise in found))


def computed(curves: Sequence[Curve], folder: Path) -> list[Learned]:
    """The finished curves, of their files where they are there; the longest first."""
    missing = [curve for curve in curves if not (folder / curve.file_name).exists()]
    missing.sort(key=lambda curve: curve.num_updates * curve.rate, reverse=True)
    console.print(f"{len(curves)} curves, {len(missing)} of them to be computed", style="dim")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(_compute, curve, folder) for curve in missing]):
            console.print(f"  {ended.result()}", style="dim")
    return [Learned.read(folder / curve.file_name) for curve in curves]


def _compute(curve: Curve, folder: Path) -> str:
    import torch

    torch.set_num_threads(1)
    trained, held_out = (np.load(folder / name) for name in ("trained.npy", "held_out.npy"))
    learned = learn(curve, trained, held_out)
    learned.write(folder)
    return (
        f"{curve.file_name}: held-out loss {learned.loss:.3f}, {learned.update_s:.3g} s "
        f"per update, {format_seconds(learned.taken_s)} in all"
    )


def _unchunked(num_updates: int, lr: float, seconds: Mapping[Config, float], folder: Path) -> str:
    curve = Curve(*EXACT, lr, SEEDS[0], max(2, num_updates // 10), chunk_tokens=WINDOW_TOKENS)
    (learned,) = computed([curve], folder)
    ratio = learned.update_s / seconds[EXACT]
    return (
        f"The same exact update in one chunk of {WINDOW_TOKENS:,} takes {ratio:.2g}x the time of "
        f"that in chunks of {CHUNK_TOKENS}: at this length nothing needs cutting, and small "
        "chunks have their price. Sampling is for lengths at which a chunk is long, too."
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        "gradient", "learning rate", "update / exact", "final held-out loss", "range of seeds",
        "exact, equal seconds", "at equal updates", "at equal seconds",
    )  # fmt: skip
    for row in rows:
        median, timely = statistics.median(row.losses), statistics.median(row.timely_losses)
        is_exact = row.config == EXACT
        table.add_row(
            name_of(row.config), f"{row.lr:g}", f"{row.update_ratio:.2f}", f"{median:.3f}",
            f"{min(row.losses):.3f} .. {max(row.losses):.3f}", f"{timely:.3f}",
            "" if is_exact else verdict(row.losses, row.exact_losses),
            "" if is_exact else verdict(row.losses, row.timely_losses),
        )  # fmt: skip
    return table


def _write_windows(folder: Path) -> None:
    """Once: the curves that are there have learned these."""
    if (folder / "held_out.npy").exists():
        return
    trained, held_out = windows(WINDOW_TOKENS, vocab_size=VOCAB_SIZE)
    console.print(f"{len(trained)} windows to train on, {len(held_out)} held out", style="dim")
    apart = held_out[:: max(1, len(held_out) // NUM_HELD_OUT)]
    np.save(folder / "trained.npy", np.array(trained))
    np.save(folder / "held_out.npy", np.array(apart[:NUM_HELD_OUT]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the curves are and come to be")
    parser.add_argument("--updates", type=int, default=_NUM_UPDATES, help="of each run")
    arguments = parser.parse_args()
    if arguments.updates < _LEAST_UPDATES:
        parser.error(f"--updates {arguments.updates}: at least {_LEAST_UPDATES}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
