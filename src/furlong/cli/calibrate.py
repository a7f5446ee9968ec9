"""`furlong calibrate`: measures this machine, and writes what plans are predicted with."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.output import check_output, tell_loading, writing
from furlong.config.sources import FlagParser, is_run_file, load_run
from furlong.report.text import align
from furlong.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from furlong.calibrate.run import CalibrationOutcome
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
    subject: str | None = chosen.subject
    config = load_run(subject) if subject is not None and is_run_file(subject) else None
    dtype = chosen.dtype or (config.model.dtype if config else "float32")
    # that for temporary files is often in RAM
    disk_dir = chosen.disk_dir or (config.memory.disk_dir if config else None) or "."
    if chosen.out is not None:
        check_place(chosen.out)
    # torch and transformers are loaded when the command line has been found sound.
    tell_loading()
    from furlong.calibrate.measure import processes
    from furlong.calibrate.run import calibrate, config_of, default_config, device_of, spec_of
    from furlong.kv.disk import NamelessFile

    device = device_of(chosen.device)
    out = chosen.out or spec_of(device).calibration_file(dtype)
    check_place(out)
    folder = Path(disk_dir).expanduser()
    NamelessFile(folder).close()  # raises ConfigError where the disk could have no file
    model = config.model.name if config else subject
    with processes(device) as is_first:
        outcome = calibrate(
            default_config() if model is None else config_of(model), dtype=dtype, device=device,
            disk_dir=folder, tell=lambda words: print(words, flush=True) if is_first else None,
        )  # fmt: skip
    if not is_first:
        return 0
    print("\n\n".join(tables(outcome)))
    outcome.machine.save(out, dtype)
    print(f"calibration written to {out}")
    if chosen.out is None:
        print("furlong train and furlong plan use it from now on")
    return 0


def check_place(file: Path) -> None:
    """Make the folder of a calibration's file. Raises ConfigError where it cannot be written."""
    with writing(file):
        existed = file.exists()
        file.open("a", encoding="utf-8").close()
        if not existed:
            file.unlink()


def tables(outcome: CalibrationOutcome) -> list[str]:
    """All that a calibration has to show: rates, residuals, predictions beside measurements."""
    rates = [
        [_WORDS.get(name, f"link: {name}"), _shown(name, value, outcome.machine)]
        for name, value in outcome.machine.measurements().items()
        if not name.endswith("_error")
    ]
    passes = [
        [_PASSES.get(name, name), str(len(errors)), f"{statistics.median(map(abs, errors)):.1%}",
         f"{max(map(abs, errors)):.1%}"]
        for name, errors in outcome.residuals.items()
    ]  # fmt: skip
    plans: dict[bool, list[list[str]]] = {False: [], True: []}
    for result in outcome.results:
        measured = result.measured
        plans[result.trial.held_out].append([
            str(result.trial), format_seconds(measured.step_s), format_seconds(result.predicted_s),
            f"{result.time_error:+.1%}", format_bytes(measured.peak_bytes),
            format_bytes(result.predicted_bytes), f"{result.memory_error:+.1%}",
        ])  # fmt: skip
    heads = ["step", "predicted", "error", "peak", "predicted", "error"]
    return [
        "\n".join(align([head, *rows], left=head[:1]))
        for head, rows in (
            (["fitted", "measured"], rates),
            (["residuals", "actions", "median", "worst"], passes),
            (["plans that were fitted", *heads], plans[False]),
            (["plans that the fit has not seen", *heads], plans[True]),
        )
    ]


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
