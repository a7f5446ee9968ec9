"""Calibration: figures that were measured on a machine, as a value and as a JSON file.

`furlong calibrate` fits it on the executor; `apply` puts it in the place of a HardwareSpec's
assumptions. Every field may be missing: then the assumption stays.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from furlong.cost.devices.hardware import MEASURED, Efficiency, HardwareSpec
from furlong.cost.devices.links import Collective, Link
from furlong.cost.files import read_object
from furlong.cost.memory.heap import Heap
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
