"""Calibration: figures that were measured on a machine, as a value and as a JSON file.

`furlong calibrate` fits it on the executor; `apply` puts it in the place of a HardwareSpec's
assumptions. Every field may be missing: then the assumption stays.

The files of calibrations, and the one that belongs to a cost model, if there is one.

Least squares of the relative error, so that small values count as much as large ones.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from furlong.cost.inputs import read_object
from furlong.cost.machine import MEASURED, THIS_CPU, Collective, Efficiency, HardwareSpec, Link
from furlong.cost.memory import Heap
from furlong.cost.model import CostModel
from furlong.errors import ConfigError

VERSION = 1
_EFFICIENCIES = ("linear", "attention_forward", "attention_backward")
_LINKS = ("within_node", "between_nodes", "host", "disk")
_BETWEEN = " between nodes"
_TEXTS = ("hardware", "machine", "dtype", "measured_on")
_RATES = (
    "peak_flops_per_s", "pass_launch_s", "layer_launch_s", "slice_launch_s",
    "activation_bytes_per_s", "optimizer_parameters_per_s",
)  # fmt: skip
_NUMBERS = (
    *_RATES, "activation_factor", "heap_blocks", "heap_share", "time_error", "memory_error",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured values; None: not measured."""

    hardware: str
    """The device that was measured, a name for `hardware`."""
    machine: str = ""
    """The one machine that was measured: a calibration of a CPU is of no use on another."""
    dtype: str = ""
    """Dtype of the computation."""
    measured_on: str = ""
    """Model, dtype and versions that ran."""
    peak_flops_per_s: float | None = None
    linear: Efficiency | None = None
    attention_forward: Efficiency | None = None
    attention_backward: Efficiency | None = None
    layer_launch_s: float | None = None
    pass_launch_s: float | None = None
    slice_launch_s: float | None = None
    activation_bytes_per_s: float | None = None
    optimizer_parameters_per_s: float | None = None
    activation_factor: float | None = None
    """Bytes of a chunk's graph, measured over counted."""
    heap_blocks: float | None = None
    """The `blocks` of `heap.Heap`."""
    heap_share: float | None = None
    """The `share` of `heap.Heap`."""
    time_error: float | None = None
    """Largest relative error of the predicted steps that the fit has not seen."""
    memory_error: float | None = None
    """Largest share of a measured peak that a prediction lacked."""
    links: dict[str, Link] = field(default_factory=dict)
    """Links by the fields of `ClusterLinks`: within_node, between_nodes, host, disk; and the
    collectives by name, such as `all_reduce` or `all_reduce between nodes`."""

    def apply(self, spec: HardwareSpec) -> HardwareSpec:
        """`spec` with what was measured in the place of what was assumed."""
        changed = {
            n: value for n in (*_RATES, *_EFFICIENCIES) if (value := getattr(self, n)) is not None
        }
        sources = dict.fromkeys((*changed, *self.links), MEASURED + self.measured_on)
        plain: dict[str, Any] = {n: link for n, link in self.links.items() if n in _LINKS}
        collectives = dict(spec.links.collectives or {})
        for name in self.links.keys() - plain.keys():
            collective: Any = name.removesuffix(_BETWEEN)
            collectives[collective, name.endswith(_BETWEEN)] = self.links[name]
        links = replace(spec.links, **plain, collectives=collectives or None)
        return replace(spec, links=links, sources={**spec.sources, **sources}, **changed)

    def apply_to(self, model: CostModel) -> CostModel:
        """A cost model with all that was measured in the place of what was assumed."""
        factor, heap = self.activation_factor, Heap(self.heap_blocks or 0.0, self.heap_share or 0.0)
        return replace(
            model, hardware=self.apply(model.hardware), heap=heap,
            activation_factor=model.activation_factor if factor is None else factor,
        )  # fmt: skip

    def save(self, file: str | Path) -> None:
        values = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        text = json.dumps({"version": VERSION, **values}, indent=2)
        Path(file).write_text(text + "\n", encoding="utf-8")


def load_calibration(file: str | Path) -> Calibration:
    """The calibration of a file. Raises ConfigError for anything that `save` has not written."""
    source, again = f"the calibration file {file}", "run furlong calibrate again"
    values = read_object(file, source=source, change=again)
    if (version := values.pop("version", None)) != VERSION:
        raise ConfigError(
            given=f"version {version}", required=f"version {VERSION}", source=source, change=again
        )
    try:
        return _from_json(values)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            given=str(error), required="what furlong calibrate writes", source=source, change=again
        ) from error


def _from_json(values: dict[str, Any]) -> Calibration:
    known: dict[str, Any] = {name: str(values.pop(name)) for name in _TEXTS}
    known |= {n: _positive(n, values.pop(n)) for n in _NUMBERS if n in values}
    known |= {n: Efficiency(**_numbers(n, values.pop(n))) for n in _EFFICIENCIES if n in values}
    links = values.pop("links", {})
    names = {*_LINKS, *(n + more for n in get_args(Collective) for more in ("", _BETWEEN))}
    if unknown := [*values, *(set(links) - names)]:
        raise ValueError(f"unknown: {', '.join(map(str, unknown))}")
    return Calibration(**known, links={n: Link(**_numbers(n, of)) for n, of in links.items()})


def _numbers(name: str, fields: dict[str, Any]) -> dict[str, float]:
    return {key: _positive(f"{name}.{key}", value) for key, value in fields.items()}


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} = {value!r} is no number of at least 0")
    return value


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


def relative_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(slope, constant) with the least sum of ((slope * x + constant) / y - 1)^2; y > 0.

    Needs two different xs.
    """
    slope, constant = relative_fit([xs, [1.0] * len(xs)], ys)
    return slope, constant


def relative_fit(columns: ArrayLike, ys: Sequence[float]) -> list[float]:
    """Non-negative coefficients c of sum(c_i * columns_i) ~ y, least relative error; y > 0."""
    targets = np.asarray(ys, dtype=float)
    matrix = np.asarray(columns, dtype=float).T / targets[:, None]
    return nonnegative(matrix, np.ones(len(targets)))


def nonnegative(matrix: NDArray[np.float64], targets: NDArray[np.float64]) -> list[float]:
    """Non-negative coefficients (n,) with the least squares of matrix (m, n) @ c - targets (m,)."""
    from scipy.optimize import nnls  # half a second to import, and few callers fit

    # columns of like size keep the solver's tolerance meaningful
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    solution, _ = nnls(matrix / scale, targets)
    coefficients: list[float] = (solution / scale).tolist()
    return coefficients
