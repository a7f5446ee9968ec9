"""The simulator against real processes, and what plans gain over others, simulated and real.

    python benchmarks/parallel.py --plot docs/pictures

Four parts, all over gloo, one thread per process:

    two         two processes that compute: a small model under every layout, after a calibration
                of this machine as by `torchrun --nproc-per-node 2 -m furlong calibrate`
    four        pipelines of four processes that sleep for the cost model's seconds (`sleeping.py`)
    eight       the same with two replicas; and pools of eight processes without a pipeline
    limited     pools of four that sleep, but exchange over links of a limited rate (`limited.py`);
                where no namespace for such links can be had, it says why and is left out

A rival is the fastest plan of its method, with every dial that its paper has, for one long-tailed
batch (`parallel_plans.py`). Promises: a simulated step is at most 20 % off the measured one where
processes compute or their links are real, 10 % where they sleep; plans that are simulated further
apart than that are ranked the same by what is measured. Exits 1 on a miss.

It needs a machine that does nothing else: two processes that wait for each other in each layer wait
for whatever else runs. Takes about nine minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness import Promise, console, machine, print_promises, write_json
from helpers.ranks import run_ranks
from limited import Asked, run_limited, why_not
from parallel_plans import (
    CONFIG,
    PIPELINES,
    Contender,
    cost_model,
    long_tailed,
    of_two_processes,
    pipelines,
    pools,
    slow_device,
)
from parallel_steps import Trial, calibrated, joined, run_trials
from rich.table import Table

from furlong.report.picture import save_picture
from furlong.report.scene import Panel
from furlong.simulate.clock import measure, simulate
from furlong.timeline import Timeline

_BOUNDS = {"two": 0.20, "four": 0.10, "eight": 0.10, "limited": 0.20}
"""Largest errors of a simulated step; plans that are simulated further apart are to be ranked the
same."""
_LIMIT_S = 300.0
_LONGEST_MEASURED_S = 15.0
"""Plans that sleep for longer are measured once."""
_SLOWNESS = {"four": 1, "eight": 2}
"""Devices are slower where more processes share the cores: gathering weights and reducing gradients
takes eight processes on two cores about 0.2 s of a step, which no modelled device would take."""
PARTS = ("two", "four", "eight", "limited")


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    lens_of_two: tuple[int, ...] = (3000, 300, 200, 900, 150, 500)
    chunk_tokens: int = 512
    num_sequences: int = 32
    longest_tokens: int = 3072
    pipelines: tuple[str, ...] = PIPELINES


TINY = Sizes((300, 40, 90), 64, 8, 256, PIPELINES[:1] + PIPELINES[-2:])


@dataclass(frozen=True)
class Row:
    """A plan, simulated and measured."""

    part: str
    contender: Contender
    simulated: Timeline
    measured: tuple[Timeline, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(timeline.duration_s for timeline in self.measured)

    @property
    def errors(self) -> tuple[float, ...]:
        """Simulated over measured seconds, less one; of each round."""
        return tuple(self.simulated.duration_s / one.duration_s - 1 for one in self.measured)

    def to_json(self) -> dict[str, Any]:
        own = self.contender
        return {
            "part": self.part, "family": own.family, "name": own.name, "layout": own.layout,
            "dials": own.dials, "num_chunks": len(own.plan.chunks),
            "simulated_s": self.simulated.duration_s,
            "measured_s": [timeline.duration_s for timeline in self.measured],
            "idle_simulated": measure(self.simulated, own.plan).idle_ratio,
            "idle_measured": [measure(one, own.plan).idle_ratio for one in self.measured],
        }  # fmt: skip


def main() -> int:
    given = _parse()
    sizes = TINY if given.tiny else Sizes()
    rows: list[Row] = []
    for part in given.only or PARTS:
        console.print(f"{part} processes", style="dim")
        rows += _part(part, sizes, given.rounds)
    console.print(table(rows))
    promises = promised(rows)
    print_promises(promises)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if given.plot:
        _draw(rows, Path(given.plot))
    if given.json:
        write_json(
            given.json, title="parallel", machine=machine(), rows=[row.to_json() for row in rows],
            promises=[{"name": p.name, "worst": p.median, "verdict": p.verdict} for p in promises],
        )  # fmt: skip
    return int(any(promise.verdict == "MISSED" for promise in promises))


def _part(part: str, sizes: Sizes, rounds: int) -> list[Row]:
    match part:
        case "two":
            return _two(sizes, rounds)
        case "limited":
            return _limited(sizes, rounds)
        case _:
            return _asleep(part, sizes, rounds)


def _limited(sizes: Sizes, rounds: int) -> list[Row]:
    """Four processes that sleep, and exchange over real links of a limited rate."""
    if (reason := why_not()) is not None:
        console.print(f"  left out: {reason}", style="dim")
        return []
    found = run_limited(Asked(sizes.num_sequences, sizes.longest_tokens, rounds))
    console.print(f"  {found.words}", style="dim")
    return _rows("limited", found.contenders, found.answers)


def _two(sizes: Sizes, rounds: int) -> list[Row]:
    """Two processes that compute."""
    config = CONFIG | {"num_hidden_layers": 4}
    values = {name: value for name, value in config.items() if name != "model_type"}
    first, _ = run_ranks(calibrated, values, str(Path.cwd()), num_ranks=2, limit_s=_LIMIT_S)
    console.print(f"calibrated: {first.measurements()}", style="dim")
    model = cost_model(first, config)
    own = of_two_processes(sizes.lens_of_two, model, sizes.chunk_tokens)
    trials = [Trial(one.name, one.plan, one.layout, values, rounds=rounds) for one in own]
    return _run("two", own, trials)


def _asleep(part: str, sizes: Sizes, rounds: int) -> list[Row]:
    """Four or eight processes that sleep."""
    lens = long_tailed(sizes.num_sequences, sizes.longest_tokens)
    spec, dp = slow_device(_SLOWNESS[part]), 1 if part == "four" else 2
    own = [*pipelines(lens, spec, dp, 4, sizes.pipelines)]
    own += pools(lens, spec, 8) if dp == 2 else ()
    values = {name: value for name, value in CONFIG.items() if name != "model_type"}
    trials = []
    for one in own:
        long = simulate(one.plan, one.model.costs(one.plan)).duration_s > _LONGEST_MEASURED_S
        trials.append(
            Trial(one.name, one.plan, one.layout, values, one.model, 1 if long else rounds)
        )
    return _run(part, own, trials)


def _run(part: str, contenders: Sequence[Contender], trials: list[Trial]) -> list[Row]:
    dp, sp, pp = trials[0].layout
    answers = run_ranks(run_trials, trials, num_ranks=dp * sp * pp, limit_s=_LIMIT_S)
    return _rows(part, contenders, answers)


def _rows(part: str, contenders: Sequence[Contender], answers: Sequence[Any]) -> list[Row]:
    """`answers`: by process, those of `run_trials`."""
    rows = []
    for index, own in enumerate(contenders):
        rounds = zip(*(answer[index] for answer in answers), strict=True)
        simulated = simulate(own.plan, own.model.costs(own.plan))
        rows.append(Row(part, own, simulated, tuple(joined(list(rans)) for rans in rounds)))
        _tell(rows[-1])
    return rows


def _tell(row: Row) -> None:
    seconds = ", ".join(f"{timeline.duration_s:.3f}" for timeline in row.measured)
    console.print(
        f"  {row.contender.family}, {row.contender.name}: simulated "
        f"{row.simulated.duration_s:.3f} s, measured {seconds} s", style="dim",
    )  # fmt: skip


def promised(rows: Sequence[Row]) -> list[Promise]:
    """Errors, and pairs that are ranked otherwise, part by part."""
    promises = []
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        for row in own:
            name = f"{part}: {row.contender.name}: error"
            promises.append(Promise(name, tuple(map(abs, row.errors)), "<=", _BOUNDS[part]))
        wrong = sum(ranked_otherwise(a, b, _BOUNDS[part]) for a, b in combinations(own, 2))
        promises.append(Promise(f"{part}: pairs ranked otherwise", (float(wrong),), "<=", 0.0))
    return promises


def ranked_otherwise(one: Row, other: Row, apart: float) -> bool:
    """Whether two plans that are simulated to differ by more than a share are measured to differ
    the other way."""
    simulated = one.simulated.duration_s / other.simulated.duration_s
    if max(simulated, 1 / simulated) <= 1 + apart:
        return False
    return (simulated > 1) != (one.measured_s > other.measured_s)


def table(rows: Sequence[Row]) -> Table:
    """One row per plan; times are relative to the first of its family."""
    columns = ("part", "plan", "dp, sp, pp", "chunks", "simulated", "real", "error")
    found = Table(*columns, "idle, sim.", "real", "of first, sim.", "real")
    first: dict[str, Row] = {}
    for row in rows:
        own = row.contender
        best = first.setdefault(own.family, row)
        idle = measure(row.simulated, own.plan), measure(row.measured[-1], own.plan)
        found.add_row(
            row.part, own.name, ", ".join(map(str, own.layout)), str(len(own.plan.chunks)),
            f"{row.simulated.duration_s:.2f} s", f"{row.measured_s:.2f} s",
            f"{row.simulated.duration_s / row.measured_s - 1:+.1%}",
            f"{idle[0].idle_ratio:.0%}", f"{idle[1].idle_ratio:.0%}",
            f"{row.simulated.duration_s / best.simulated.duration_s:.2f}",
            f"{row.measured_s / best.measured_s:.2f}",
        )  # fmt: skip
    return found


def _draw(rows: Sequence[Row], folder: Path) -> None:
    """Simulated and measured timelines of pipelines of two and of four processes."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("two", "four"):
        shown = [row for row in rows if row.part == part and row.contender.name in _DRAWN]
        if not shown:
            continue
        row = shown[0]
        panels = [
            Panel(timeline, row.contender.plan, f"{row.contender.name}, {part} processes, {kind}")
            for kind, timeline in (("simulated", row.simulated), ("measured", row.measured[-1]))
        ]
        path = folder / f"{part}-processes.png"
        save_picture(panels, path)
        console.print(f"written: {path}")


_DRAWN = ("state-aware 1F1B (ChunkFlow)",)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="parts (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often a step is measured")
    parser.add_argument("--tiny", action="store_true", help="a tiny batch, to try it out")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--plot", metavar="FOLDER", help="draw timelines there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
