"""Extra memory and time against the length of a sequence, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from measuring import Measurement

from furlong.units import format_bytes

# Okabe and Ito: told apart by everyone, and in grey by their lightness and by the markers
_COLOURS = {"HF": "#555555", "StreamBP": "#D55E00", "furlong": "#0072B2"}
_STYLES = (("-", "o"), ("--", "s"), (":", "^"))


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    system: str
    rounds: Mapping[int, Sequence[Measurement]]
    """By tokens."""


def plot_lengths(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write the two panels as `path` says: .png or .svg."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    used = dict.fromkeys(_COLOURS, 0)
    for curve in curves:
        style = _STYLES[used[curve.system] % len(_STYLES)]
        used[curve.system] += 1
        for axes, what in ((memory, "extra_bytes"), (seconds, "step_s")):
            _draw(axes, curve, what, style)
    lengths = sorted({n for curve in curves for n in curve.rounds})
    for axes, name in ((memory, "extra memory of a step"), (seconds, "seconds of a step")):
        _label(axes, lengths, name)
    memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
    seconds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.suptitle(f"One training step of one sequence: {title}", x=0.01, ha="left", fontsize=11)
    handles, names = memory.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, curve: Curve, what: str, style: tuple[str, str]) -> None:
    lengths = sorted(curve.rounds)
    values = [sorted(getattr(m, what) for m in curve.rounds[n]) for n in lengths]
    line, marker = style
    axes.plot(
        lengths, [median(v) for v in values], line, marker=marker, markersize=5, linewidth=1.8,
        color=_COLOURS[curve.system], label=curve.name,
    )  # fmt: skip
    axes.fill_between(
        lengths, [v[0] for v in values], [v[-1] for v in values],
        color=_COLOURS[curve.system], alpha=0.15, linewidth=0,
    )  # fmt: skip


def _label(axes: Axes, lengths: Sequence[int], name: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens")
    axes.set_title(name, loc="left", fontsize=10)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
