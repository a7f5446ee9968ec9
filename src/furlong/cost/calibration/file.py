"""The files of calibrations, and the one that belongs to a cost model, if there is one."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from furlong.cost.calibration.values import Calibration, load_calibration
from furlong.cost.devices.hardware import THIS_CPU
from furlong.cost.model import CostModel
from furlong.errors import ConfigError

_CPU_NAME = "model name"
_LEAST_MARGIN = 0.02
"""Least share of a budget that is left free: no prediction of memory is better."""


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


def machine_of(hardware: str, card: str = "") -> str:
    """The one machine that a calibration of this hardware holds for: its CPU and its threads; of a
    GPU its `HardwareSpec.card`."""
    if hardware != THIS_CPU:
        return card
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{_cpu_name()}, {cores} cores, threads: {threads}"


class Calibrated(NamedTuple):
    """A cost model, and the calibration that is in it, if there is one."""

    model: CostModel
    calibration: Calibration | None
    words: str
    """The origin of the model's figures, and how far they can be trusted."""

    def margin(self, otherwise: float) -> float:
        """Share of a device's budget that plans should leave free."""
        error = None if self.calibration is None else self.calibration.memory_error
        return otherwise if error is None else max(_LEAST_MARGIN, error)


def calibrated(model: CostModel, dtype: str) -> Calibrated:
    """The model with what was measured of its hardware in this dtype; as it is without a file.

    Raises ConfigError for a file that `furlong calibrate` has not written.
    """
    name = model.hardware.name
    file = calibration_file(name, dtype)
    if not os.path.exists(file):
        return uncalibrated(model, dtype)
    found, own = load_calibration(file), machine_of(name, model.hardware.card)
    if (found.hardware, found.dtype) != (name, dtype) or found.machine != own:
        other = found.machine or found.hardware
        words = f"assumed: {file} was measured on another machine ({other}; this is {own or name})"
        return uncalibrated(model, dtype)._replace(words=words)
    errors = [
        f"{what} within {error:.0%}"
        for what, error in (("times", found.time_error), ("peaks", found.memory_error))
        if error is not None
    ]
    words = ", ".join([f"measured by furlong calibrate ({file})", *errors])
    return Calibrated(found.apply_to(model), found, words)


def uncalibrated(model: CostModel, dtype: str) -> Calibrated:
    """The model with what is assumed of its hardware in this dtype. A calibration's rates are
    shares of the peak in 16 bits, in whatever dtype it measured them."""
    assumed = replace(model, hardware=model.hardware.computing_in(dtype))
    return Calibrated(assumed, None, "assumed; furlong calibrate measures them")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(_CPU_NAME):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
