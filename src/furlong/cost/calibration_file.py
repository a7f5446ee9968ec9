"""Where calibrations lie, and the one that belongs to a cost model, if there is one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from furlong.cost.calibration import Calibration, load_calibration
from furlong.cost.hardware import THIS_CPU
from furlong.cost.model import CostModel
from furlong.errors import ConfigError

_CPU_NAME = "model name"


def calibration_file(hardware: str, dtype: str) -> Path:
    """The file that `furlong calibrate` writes unless told otherwise, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "furlong" / f"calibration-{hardware}-{dtype}.json"


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


def machine_of(hardware: str) -> str:
    """What a calibration of this hardware holds for only: a CPU, and how many threads compute."""
    if hardware != THIS_CPU:
        return ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{_cpu_name()}, {cores} cores, threads: {threads}"


def calibrated(
    model: CostModel, dtype: str, file: Path | None = None
) -> tuple[CostModel, Calibration | None, str]:
    """The model with what was measured of its hardware in this dtype, the calibration, and a word
    for both; the model as it is where there is none.

    Raises ConfigError for a file that `furlong calibrate` has not written.
    """
    name = model.hardware.name
    file = file or calibration_file(name, dtype)
    if not os.path.exists(file):
        return model, None, f"{name} in {dtype}: assumed figures; furlong calibrate measures them"
    found = load_calibration(file)
    own = machine_of(name)
    if (found.hardware, found.dtype, found.machine) != (name, dtype, own):
        words = f"{name} in {dtype}: assumed figures; {file} was measured on {found.hardware}"
        if found.machine != own:
            words += f" ({found.machine}; this is {own})"
        return model, None, f"{words}, in {found.dtype}"
    errors = [
        f"{what} within {error:.0%}"
        for what, error in (("times", found.time_error), ("peaks", found.memory_error))
        if error is not None
    ]
    return found.apply_to(model), found, f"calibrated by {file}: {', '.join(errors)}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(_CPU_NAME):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
