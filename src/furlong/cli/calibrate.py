"""`furlong calibrate`: measures this machine, and writes what plans are predicted with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.cli.flag_types import VerbParser, check_replaced
from furlong.cli.output import tell_loading
from furlong.errors import ConfigError

if TYPE_CHECKING:
    from furlong.config.schema import RunConfig

_DTYPES = ("bfloat16", "float32", "float64")
_DEVICES = ("auto", "cpu", "cuda")


def run(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    config = _run_config(chosen.subject)
    dtype = chosen.dtype or (config.model.dtype if config else "float32")
    disk_dir = _disk_dir(chosen, config)
    from furlong.cost.calibration import calibration_file, check_place

    if chosen.out is not None:
        check_place(chosen.out, "--out")
    # torch and transformers are loaded when the command line has been found sound.
    tell_loading()
    from rich.console import Console

    from furlong.calibrate.collectives import processes
    from furlong.calibrate.report import tables
    from furlong.calibrate.run import calibrate, device_of, spec_of

    device = device_of(chosen.device)
    out = chosen.out or calibration_file(spec_of(device).name, dtype)
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
    outcome.calibration.save(out)
    print(f"calibration written to {out}")
    if chosen.out is None:
        print("furlong train and furlong plan use it from now on")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = VerbParser(
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
    from furlong.config.sources import is_run_file

    if subject is None or not is_run_file(subject):
        return None
    from furlong.config.sources import load_run

    return load_run(subject)


def _disk_dir(chosen: argparse.Namespace, config: RunConfig | None) -> Path:
    """The folder of the flag, of the run, or the current one: that for temporary files is often
    in RAM."""
    named = chosen.disk_dir or (config.memory.disk_dir if config else None)
    return Path(named or ".").expanduser()


def _check_disk_dir(folder: Path, source: str) -> None:
    """Raises ConfigError, before anything is measured, where the disk tier could have no file."""
    from furlong.kv.pools.disk import NamelessFile

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
