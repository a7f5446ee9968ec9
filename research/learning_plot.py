"""Held-out loss against updates and against seconds, side by side, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito: told apart by everyone, and in grey by their lightness and by the strokes
_COLOURS = {"exact": "#333333", "unbiased": "#D55E00", "fixed": "#0072B2"}
_STROKES = {1: "-", 1 / 2: "-", 1 / 4: "--", 1 / 8: ":"}


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    rule: str
    rate: float
    updates: Sequence[int]
    seconds: Sequence[float]
    losses: Sequence[Sequence[float]]
    """At every point, one per seed."""


def plot_learning(
    lines: Sequence[Line], shorter: Sequence[tuple[float, float]], title: str, path: Path
) -> None:
    """Write the two panels as `path` says: .png or .svg. `shorter`: seconds and final losses of
    exact training under schedules of fewer updates."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    by_updates, by_seconds = figure.subplots(1, 2, sharey=True)
    for line in lines:
        _draw(by_updates, line, line.updates)
        _draw(by_seconds, line, line.seconds)
    by_seconds.plot(
        *zip(*shorter, strict=True), "D", color=_COLOURS["exact"], markersize=5,
        label="exact, schedule of fewer updates",
    )  # fmt: skip
    _label(by_updates, "updates")
    _label(by_seconds, "seconds of training, one core")
    by_updates.set_ylabel("held-out loss, nats per token")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles, names = by_seconds.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, line: Line, along: Sequence[float]) -> None:
    colour = _COLOURS[line.rule]
    axes.plot(
        along, [median(seeds) for seeds in line.losses], _STROKES[line.rate], color=colour,
        linewidth=1.8, label=line.name,
    )  # fmt: skip
    axes.fill_between(
        along, [min(seeds) for seeds in line.losses], [max(seeds) for seeds in line.losses],
        color=colour, alpha=0.15, linewidth=0,
    )  # fmt: skip


def _label(axes: Axes, name: str) -> None:
    axes.set_xlim(left=0)
    axes.set_xlabel(name)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
