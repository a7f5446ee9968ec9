"""Memory over time of several steps, one below the other on the same scales.

FPDT's figure of memory spikes is one: the same sequence in 2, 4, 8 and 16 chunks. What is there all
through (weights, gradients, optimizer) is left out, or it would hide what a plan changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from furlong.plan.values import Backward, Forward, RebuildKV, Recompute
from furlong.report.pictures.looks import (
    COLOURS,
    DEVICE,
    FAINT,
    HATCHES,
    HOST,
    INK,
    KIND_WORDS,
    fill,
    tint,
)
from furlong.timeline import Record, Timeline
from furlong.units import format_bytes, format_seconds

_WIDTH, _ROW, _TOP, _BOTTOM = 9.5, 1.45, 0.75, 0.85
"""Inches."""
_DPI = 150
_KINDS: dict[type, str] = {
    Forward: "forward",
    RebuildKV: "rebuild",
    Recompute: "recompute",
    Backward: "backward",
}


def save_memory_picture(
    timelines: Mapping[str, Timeline], path: str | Path, *, title: str = "", rank: int = 0
) -> None:
    """Write one row for each timeline, under its key, of one of its ranks; `path` ends in .png or
    .svg. Raises ValueError where a timeline says nothing of that rank's memory."""
    rows = {name: _cells(timeline, rank) for name, timeline in timelines.items()}
    for name, cells in rows.items():
        if not any(cell.device_bytes for cell in cells):
            raise ValueError(f"the timeline {name!r} has no memory of rank {rank}")
    everything = [cell for cells in rows.values() for cell in cells]
    floor = min(cell.device_bytes for cell in everything)
    has_lower = any(cell.host_bytes for cell in everything)
    highest = max(max(cell.device_bytes - floor, cell.host_bytes) for cell in everything)
    longest = max(cell.stop_s for cell in everything)
    height = _TOP + len(rows) * _ROW + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    grid = figure.add_gridspec(
        len(rows), 1, left=0.09, right=0.985, top=1 - _TOP / height, bottom=_BOTTOM / height,
        hspace=0.3,
    )  # fmt: skip
    for number, (name, cells) in enumerate(rows.items()):
        pair = grid[number].subgridspec(2, 1, height_ratios=[1, 0.09], hspace=0.08)
        memory, strip = figure.add_subplot(pair[0]), figure.add_subplot(pair[1])
        _draw_memory(memory, name, cells, floor, max(1.08 * highest, 1), has_lower=has_lower)
        _draw_strip(strip, cells)
        for axes in (memory, strip):
            axes.set_xlim(0, longest)
    _label_time(strip, longest)
    words = f"above the {format_bytes(floor)} that are there all through" if floor else ""
    figure.text(0.09, 1 - 0.13 / height, title or "Memory over time", fontsize=12, color=INK,
                weight="bold", va="top", parse_math=False)  # fmt: skip
    figure.text(0.09, 1 - 0.38 / height, words, fontsize=9, color=FAINT, va="top")
    kinds = {_KINDS[type(cell.action)] for cell in everything}
    figure.legend(
        handles=_entries(kinds, has_lower=has_lower), loc="lower left", ncols=7,
        bbox_to_anchor=(0.08, 0.0), frameon=False, fontsize=8.5, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=_DPI)


def _cells(timeline: Timeline, rank: int) -> list[Record]:
    """Those of a rank in the order in which they ran; messages and copies say nothing more."""
    own = [r for r in timeline.records if r.rank == rank and r.lane == "compute"]
    return sorted((r for r in own if type(r.action) in _KINDS), key=lambda r: r.start_s)


def _draw_memory(
    axes: Axes, name: str, cells: Sequence[Record], floor: int, highest: float, *, has_lower: bool
) -> None:
    times = [*(cell.start_s for cell in cells), cells[-1].stop_s]
    device = [cell.device_bytes - floor for cell in cells]
    peak = max(device)
    steps = [*device, device[-1]]
    axes.fill_between(times, steps, step="post", color=DEVICE, alpha=0.25, linewidth=0)
    axes.plot(times, steps, drawstyle="steps-post", color=DEVICE, linewidth=1.1)
    words = [name, f"peak {format_bytes(peak)}", format_seconds(cells[-1].stop_s)]
    if has_lower:
        lower = [cell.host_bytes for cell in cells]
        axes.plot(times, [*lower, lower[-1]], drawstyle="steps-post", color=HOST, linewidth=1.2)
        words.insert(2, f"host and disk {format_bytes(max(lower))}")
    axes.axhline(peak, color=DEVICE, linewidth=0.7, linestyle=(0, (2, 3)))
    axes.set_title("   ·   ".join(words), fontsize=9.5, color=INK, loc="left", pad=4,
                   parse_math=False)  # fmt: skip
    axes.set_ylim(0, highest)
    axes.yaxis.set_major_locator(MultipleLocator(_round_step(highest / 4)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.tick_params(axis="both", labelsize=8, colors=FAINT, length=2)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    _hide_spines(axes, but="bottom")


def _draw_strip(axes: Axes, cells: Sequence[Record]) -> None:
    """What was computed meanwhile."""
    for action, kind in _KINDS.items():
        spans = [(c.start_s, c.stop_s - c.start_s) for c in cells if type(c.action) is action]
        axes.broken_barh(
            spans, (0, 1), facecolor=fill(COLOURS[0], kind), linewidth=0,
            edgecolor=tint(COLOURS[0], 0.25), hatch=HATCHES.get(kind),
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, labelbottom=False)
    _hide_spines(axes)


def _label_time(axes: Axes, longest: float) -> None:
    scale, unit = (1e3, "ms") if longest < 1 else (1 / 60, "min") if longest >= 600 else (1.0, "s")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.10g}"))
    axes.tick_params(axis="x", labelsize=8.5, colors=FAINT, length=3, labelbottom=True)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color=FAINT, labelpad=1)


def _entries(kinds: set[str], *, has_lower: bool) -> list[Line2D | Patch]:
    entries: list[Line2D | Patch] = [Line2D([], [], color=DEVICE, label="device memory")]
    if has_lower:
        entries.append(Line2D([], [], color=HOST, label="host and disk"))
    return entries + [
        Patch(facecolor=fill(COLOURS[0], kind), edgecolor=tint(COLOURS[0], 0.25), linewidth=0.3,
              hatch=HATCHES.get(kind), label=KIND_WORDS[kind])
        for kind in _KINDS.values() if kind in kinds
    ]  # fmt: skip


def _hide_spines(axes: Axes, but: str = "") -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side == but)
        spine.set_color("#c3c9d3")


def _round_step(step: float) -> float:
    """The next power of two: bytes are told in binary units."""
    power = 1.0
    while power < step:
        power *= 2
    return power
