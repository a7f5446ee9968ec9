"""Calibration: what was measured on a machine, as a value and as a JSON file.

`furlong calibrate` fits it on the executor; `apply` puts it in the place of a HardwareSpec's
assumptions. Every field may be missing: then the assumption stays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from furlong.cost.fitting import relative_line
from furlong.cost.hardware import Efficiency, HardwareSpec
from furlong.cost.links import Link, Links
from furlong.errors import ConfigError

VERSION = 1
_EFFICIENCIES = ("linear", "attention_forward", "attention_backward")
_LINKS = ("within_node", "between_nodes", "host", "disk")
_NUMBERS = ("peak_flops_per_s", "layer_launch_s", "activation_factor", "overhead_bytes")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured values; None: not measured."""

    hardware: str
    """The device that was measured, a name for `hardware`."""
    measured_on: str = ""
    """What ran: model, dtype, versions."""
    peak_flops_per_s: float | None = None
    linear: Efficiency | None = None
    attention_forward: Efficiency | None = None
    attention_backward: Efficiency | None = None
    layer_launch_s: float | None = None
    activation_factor: float | None = None
    """Measured over counted bytes of a chunk's graph."""
    overhead_bytes: int | None = None
    """In use beside everything that is counted."""
    links: dict[str, Link] = field(default_factory=dict)
    """By the fields of `Links`: within_node, between_nodes, host, disk."""

    def apply(self, spec: HardwareSpec) -> HardwareSpec:
        """`spec` with what was measured in the place of what was assumed."""
        names = ("peak_flops_per_s", "layer_launch_s", *_EFFICIENCIES)
        changed = {n: value for n in names if (value := getattr(self, n)) is not None}
        sources = dict.fromkeys((*changed, *self.links), f"measured: {self.measured_on}")
        links: Links = replace(spec.links, **dict[str, Any](self.links))
        return replace(spec, links=links, sources={**spec.sources, **sources}, **changed)

    def save(self, file: str | Path) -> None:
        values = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        text = json.dumps({"version": VERSION, **values}, indent=2)
        Path(file).write_text(text + "\n", encoding="utf-8")


def load_calibration(file: str | Path) -> Calibration:
    """The calibration of a file. Raises ConfigError for anything that `save` has not written."""
    source = f"the calibration file {file}"
    again = "run furlong calibrate again"
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            given=f"{file}: {error.strerror}", required="a file that can be read",
            source="the path of the calibration", change="check the path, or run furlong calibrate",
        ) from error  # fmt: skip
    except ValueError as error:
        raise ConfigError(given=str(error), required="JSON", source=source, change=again) from error
    version = values.pop("version", None) if isinstance(values, dict) else None
    if version != VERSION:
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
    known: dict[str, Any] = {name: str(values.pop(name)) for name in ("hardware", "measured_on")}
    for name in _NUMBERS:
        if name in values:
            known[name] = _positive(name, values.pop(name))
    for name in _EFFICIENCIES:
        if name in values:
            fields = values.pop(name)
            numbers = {key: _positive(f"{name}.{key}", value) for key, value in fields.items()}
            known[name] = Efficiency(**numbers)
    links = values.pop("links", {})
    if unknown := [*values, *(set(links) - set(_LINKS))]:
        raise ValueError(f"unknown: {', '.join(map(str, unknown))}")
    known["links"] = {
        name: Link(**{key: _positive(f"{name}.{key}", value) for key, value in fields.items()})
        for name, fields in links.items()
    }
    return Calibration(**known)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} = {value!r} is no number of at least 0")
    return value


def fit_efficiency(
    points: Sequence[tuple[float, float, float]], peak_flops_per_s: float
) -> Efficiency:
    """The saturating efficiency of measured calls: (tokens, FLOPs, seconds) each.

    seconds * peak / FLOPs = (1 + half_tokens / tokens) / best is a line in 1 / tokens. Needs calls
    of two different sizes.
    """
    xs = [1 / tokens for tokens, _, _ in points]
    ys = [seconds * peak_flops_per_s / num_flops for _, num_flops, seconds in points]
    slope, constant = relative_line(xs, ys)
    if constant == 0:
        sizes = f"{min(1 / x for x in xs):.0f} to {max(1 / x for x in xs):.0f} tokens"
        raise ValueError(f"calls of {sizes} only show a cost per call; measure larger ones")
    return Efficiency(best=1 / constant, half_tokens=slope / constant)
