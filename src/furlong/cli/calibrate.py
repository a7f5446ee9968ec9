"""`furlong calibrate`: measures this machine and writes the figures that predictions use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.output import check_output, tell_loading, writing
from furlong.config.sources import FlagParser, is_run_file, load_run
from furlong.cost.machine import Efficiency, Link, Machine
from furlong.report.text import align
from furlong.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from furlong.calibrate.run import TrialResult

_DTYPES = ("bfloat16", "float32", "float64")
_DEVICES = ("auto", "cpu", "cuda")


def run(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    subject: str | None = chosen.subject
    config = load_run(subject) if subject is not None and is_run_file(subject) else None
    dtype = chosen.dtype or (config.model.dtype if config else "float32")
    # not the folder for temporary files, which is often in RAM
    disk_dir = chosen.disk_dir or (config.memory.disk_dir if config else None) or "."
    if chosen.out is not None:
        check_place(chosen.out)
    # torch and transformers load slowly: the command line is checked first.
    tell_loading()
    from furlong.calibrate.measure import processes
    from furlong.calibrate.run import calibrate, config_of, default_config, named_device
    from furlong.kv.disk import NamelessFile
    from furlong.runtime.profile import machine_of

    device = named_device(chosen.device)
    out = chosen.out or machine_of(device).calibration_file(dtype)
    check_place(out)
    folder = Path(disk_dir).expanduser()
    NamelessFile(folder).close()  # raises ConfigError if no file can be written there
    model = config.model.name if config else subject
    with processes(device) as is_first:
        machine, results = calibrate(
            default_config() if model is None else config_of(model, "MODEL"),
            dtype=dtype, device=device,
            disk_dir=folder, tell=lambda words: print(words, flush=True) if is_first else None,
        )  # fmt: skip
    if not is_first:
        return 0
    print("\n\n".join(tables(machine, results)))
    machine.save(out, dtype)
    print(f"calibration written to {out}")
    if chosen.out is None:
        print("furlong train and furlong plan use it from now on")
    return 0


def check_place(file: Path) -> None:
    """Make the folder of a calibration file. Raise ConfigError if the file cannot be written."""
    with writing(file):
        existed = file.exists()
        file.open("a", encoding="utf-8").close()
        if not existed:
            file.unlink()


def tables(machine: Machine, results: Sequence[TrialResult]) -> list[str]:
    """Return two tables: the measured figures, and measured and predicted values of each plan."""
    figures = [
        [name.replace("_", " "), _shown(name, value, machine)]
        for name, value in machine.measurements.items()
        if not name.endswith("_error")
    ]
    plans = [
        [
            str(result.trial) + ", not fitted" * result.trial.held_out,
            format_seconds(result.measured.step_s),
            f"{format_seconds(result.predicted_s)} ({result.time_error:+.1%})",
            format_bytes(result.measured.peak_bytes),
            f"{format_bytes(result.predicted_bytes)} ({result.memory_error:+.1%})",
        ]
        for result in results
    ]
    heads = ["figure", "measured"], ["plan", "step", "predicted", "peak", "predicted"]
    return [
        "\n".join(align([head, *rows], left=head[:1]))
        for head, rows in zip(heads, (figures, plans), strict=True)
    ]


def _shown(name: str, value: Any, machine: Machine) -> str:
    """Return a measured figure with its unit."""
    if isinstance(value, Efficiency):
        rate = format_count(value.best * machine.peak_flops_per_s)
        half = f", half of it at {value.half_tokens:.0f} tokens" if value.half_tokens else ""
        if name.startswith("attention") and machine.device_type == "cuda":
            half += f"; causal squares {value.square:.0%} of it, packed ones {value.packed:.0%}"
        return f"{value.best:.0%} of the peak ({rate}FLOP/s){half}"
    if isinstance(value, Link):
        return f"{format_seconds(value.latency_s)} and {format_bytes(value.bytes_per_s)}/s"
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_per_s"):
        return f"{format_count(value)}/s"
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
        help="whose drive is measured for the disk (default: the run's memory.disk_dir,"
        " or the current folder)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", type=Path,
        help="where to write, .json (default: in the user's cache folder, where it is found again)",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.out is not None:
        check_output(chosen.out, "--out", (".json",), "hardware", "version")
    return chosen
