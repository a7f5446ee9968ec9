"""`furlong calibrate`: measures this machine, and writes what plans are predicted with."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.output import check_replaced, tell_loading
from furlong.config.sources import FlagParser, is_run_file, load_run
from furlong.errors import ConfigError
from furlong.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from furlong.calibrate.run import CalibrationOutcome
    from furlong.config.schema import RunConfig
    from furlong.cost.machine import Machine

_DTYPES = ("bfloat16", "float32", "float64")
_DEVICES = ("auto", "cpu", "cuda")
_WORDS = {
    "peak_flops_per_s": "peak of matrix products",
    "linear": "matrices",
    "attention_forward": "attention, forward",
    "attention_backward": "attention, backward",
    "pass_launch_s": "launches of a pass over a stage",
    "layer_launch_s": "launches of a layer",
    "slice_launch_s": "launches of a slice in a layer",
    "activation_bytes_per_s": "kernels that pass bytes",
    "optimizer_parameters_per_s": "optimizer",
    "activation_factor": "graphs, measured over counted",
    "heap_blocks": "freed blocks that the heap holds",
    "heap_share": "share of a freed graph that it holds",
}
_PASSES = {
    "to last kv": "forward to the last K,V",
    "values": "forward",
    "graph": "forward with its graph",
    "backward": "backward",
}


def run(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    config = _run_config(chosen.subject)
    dtype = chosen.dtype or (config.model.dtype if config else "float32")
    disk_dir = _disk_dir(chosen, config)
    if chosen.out is not None:
        check_place(chosen.out, "--out")
    # torch and transformers are loaded when the command line has been found sound.
    tell_loading()
    from rich.console import Console

    from furlong.calibrate.measure import processes
    from furlong.calibrate.run import calibrate, device_of, spec_of

    device = device_of(chosen.device)
    out = chosen.out or spec_of(device).calibration_file(dtype)
    check_place(out, "the user's cache folder")
    _check_disk_dir(disk_dir, "--disk-dir" if chosen.disk_dir else "memory.disk_dir")
    console = Console()
    with processes(device) as is_first:
        outcome = calibrate(
            _model_config(chosen.subject, config), dtype=dtype, device=device, disk_dir=disk_dir,
            tell=lambda words: console.print(words, style="dim") if is_first else None,
        )  # fmt: skip
    if not is_first:
        return 0
    for table in tables(outcome):
        console.print(table)
    outcome.machine.save(out, dtype)
    print(f"calibration written to {out}")
    if chosen.out is None:
        print("furlong train and furlong plan use it from now on")
    return 0


def check_place(file: Path, source: str) -> None:
    """Make the folder of a calibration's file. Raises ConfigError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            given=f"{file}: {error.strerror}",
            required="a file that can be written",
            source=source,
            change="give another place: --out FILE.json, or make the folder writable",
        ) from error


def tables(outcome: CalibrationOutcome) -> list[Table]:
    """All that a calibration has to show: rates, residuals, predictions beside measurements."""
    rates = [
        (_WORDS.get(name, f"link: {name}"), _shown(name, value, outcome.machine))
        for name, value in outcome.machine.measurements().items()
        if not name.endswith("_error")
    ]
    passes = [
        (_PASSES.get(name, name), str(len(errors)), f"{statistics.median(map(abs, errors)):.1%}",
         f"{max(map(abs, errors)):.1%}")
        for name, errors in outcome.residuals.items()
    ]  # fmt: skip
    plans: dict[bool, list[Sequence[str]]] = {False: [], True: []}
    for result in outcome.results:
        measured = result.measured
        plans[result.trial.held_out].append((
            str(result.trial), format_seconds(measured.step_s), format_seconds(result.predicted_s),
            f"{result.time_error:+.1%}", format_bytes(measured.peak_bytes),
            format_bytes(result.predicted_bytes), f"{result.memory_error:+.1%}",
        ))  # fmt: skip
    heads = ("plan", "step", "predicted", "error", "peak", "predicted", "error")
    return [
        _table("fitted", ("term", "measured"), rates),
        _table("residuals", ("pass", "actions", "median", "worst"), passes),
        _table("plans that were fitted", heads, plans[False]),
        _table("plans that the fit has not seen", heads, plans[True]),
    ]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _shown(name: str, value: Any, machine: Machine) -> str:
    """A measured figure with its unit."""
    if name in ("linear", "attention_forward", "attention_backward"):
        rate = format_count(value.best * machine.peak_flops_per_s)
        half = f", half of it at {value.half_tokens:.0f} tokens" if value.half_tokens else ""
        return f"{value.best:.0%} of the peak ({rate}FLOP/s){half}"
    if name not in _WORDS:
        return f"{format_seconds(value.latency_s)} and {format_bytes(value.bytes_per_s)}/s"
    if name.endswith("flops_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("per_s"):
        return f"{format_count(value)} parameters/s"
    return format_seconds(value) if name.endswith("_s") else f"{value:.2f}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(
        "calibrate",
        takes="furlong calibrate [RUN.yaml|CONFIG.json|MODEL] [FLAGS]",
        description="Measure this machine with small models of a run's widths, in under two"
        " minutes; furlong train and furlong plan predict with what was found.",
    )
    parser.add_argument(
        "subject", nargs="?", metavar="RUN.yaml|CONFIG.json|MODEL",
        help="whose widths are measured (default: those of Qwen2.5-0.5B)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of the compute (default: the run's, or float32)"
    )
    parser.add_argument(
        "--device", choices=_DEVICES, default="auto", help="auto: CUDA where there is one"
    )
    parser.add_argument(
        "--disk-dir", metavar="FOLDER", type=Path,
        help="whose drive is measured for the tier disk (default: the run's memory.disk_dir,"
        " or the current folder)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", type=Path,
        help="where to write, .json (default: in the user's cache folder, where it is found again)",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.out is not None and chosen.out.suffix.lower() != ".json":
        raise ConfigError(
            given=f"--out {chosen.out}",
            required="a name that ends in .json",
            source="the command line",
            change="give the file another ending",
        )
    if chosen.out is not None:
        check_replaced(chosen.out, "--out", "hardware", "version")
    return chosen


def _run_config(subject: str | None) -> RunConfig | None:
    return load_run(subject) if subject is not None and is_run_file(subject) else None


def _disk_dir(chosen: argparse.Namespace, config: RunConfig | None) -> Path:
    """The folder of the flag, of the run, or the current one: that for temporary files is often
    in RAM."""
    named = chosen.disk_dir or (config.memory.disk_dir if config else None)
    return Path(named or ".").expanduser()


def _check_disk_dir(folder: Path, source: str) -> None:
    """Raises ConfigError, before anything is measured, where the disk tier could have no file."""
    from furlong.kv.disk import NamelessFile

    try:
        NamelessFile(folder).close()
    except ConfigError as error:
        raise ConfigError(
            given=error.given,
            required="a folder on a disk, which can be written to",
            source=source if folder != Path(".") else "the current folder",
            change="name a folder on the drive that runs will use: --disk-dir FOLDER",
        ) from error


def _model_config(subject: str | None, config: RunConfig | None) -> Any:
    from furlong.calibrate.run import config_of, default_config

    if subject is None:
        return default_config()
    return config_of(config.model.name if config else subject)
