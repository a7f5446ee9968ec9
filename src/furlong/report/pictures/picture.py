"""Scenes as PNG or SVG: a row per rank, its memory under it, scenes one below the other.

Everything is drawn on one pair of axes: x is time, y is inches from the top downwards, and every
font is in points, so that a picture of two ranks and one of twenty have the same type and bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from furlong.report.pictures.legend import Entry, legend
from furlong.report.pictures.looks import (
    FAINT,
    GREY,
    HATCHES,
    INK,
    LANE,
    LIMIT,
    LINE,
    PART_COLOURS,
    Kind,
    fill,
    ink_on,
    tint,
)
from furlong.report.pictures.memory import Steps
from furlong.report.pictures.scene import Bar, RankScene, Scene
from furlong.units import format_bytes

_LEFT, _RIGHT, _RIGHT_OF_MEMORY = 0.95, 0.25, 1.25
_EDGE, _TITLE, _NOTE, _AXIS, _GAP, _THIN, _ENTRY = 0.12, 0.28, 0.18, 0.55, 0.14, 0.1, 0.21
"""Heights in inches: the picture's edge, a title, a line under it, a time axis, what parts ranks, a
track of messages or copies, a line of the legend."""
_DASHES = (0, (5, 3))
_DPI = 150


@dataclass(frozen=True, slots=True)
class _Scale:
    """The sizes that all rows of a picture share, in inches but for two."""

    width: float
    longest: float
    """The end of the time axis."""
    cells: float
    memory: tuple[float, float]
    """The heights of a device's memory and of that below it; 0 where nothing is known of it."""
    most_bytes: tuple[int, int]
    """The bytes of these heights."""


def save_picture(scenes: Sequence[Scene], path: Path) -> None:
    """Write the scenes, on one scale of time and one of memory, as `path` says: .png or .svg."""
    scale = _scale(scenes)
    groups = [entries for entries in legend(scenes) if entries]
    columns = [_num_columns(entries, scale.width + _RIGHT) for entries in groups]
    lines = [-(-len(own) // num) for own, num in zip(groups, columns, strict=True)]
    legend_height = sum(lines) * _ENTRY + 0.1
    height = 2 * _EDGE + legend_height + sum(_height(scene, scale) for scene in scenes)
    width = _LEFT + scale.width + (_RIGHT_OF_MEMORY if scale.memory[0] else _RIGHT)
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((_LEFT / width, 0, scale.width / width, 1))
    axes.set_axis_off()
    axes.set_xlim(0, scale.longest)
    axes.set_ylim(height, 0)
    top, below = _EDGE, height - _EDGE - legend_height
    if len(scenes) > 1:  # who looks at the first of many wants the legend there
        top, below = _EDGE + legend_height, _EDGE
    for scene in scenes:
        _draw_scene(axes, scene, top, scale)
        top += _height(scene, scale)
    for entries, num, own in zip(groups, columns, lines, strict=True):
        _draw_legend(figure, entries, num, (_LEFT / width, 1 - below / height))
        below += own * _ENTRY
    figure.savefig(path, dpi=_DPI)


def _scale(scenes: Sequence[Scene]) -> _Scale:
    """Sizes that suit the number of ranks: a few share the height of a screen."""
    ranks = [rank for scene in scenes for rank in scene.ranks]
    device, lower = (max(scene.highest_bytes[i] for scene in scenes) for i in (0, 1))
    memory = min(1.7, max(0.36, 3.6 / max(len(ranks), 1)))
    most_cells = max((len(rank.on("compute")) for rank in ranks), default=0)
    return _Scale(
        width=min(16.5, max(9.8, most_cells * 0.08)),
        longest=max(scene.duration for scene in scenes) or 1.0,
        cells=0.44 if len(ranks) <= 8 else 0.3,
        memory=(memory if device else 0.0, max(0.24, 0.4 * memory) if lower else 0.0),
        most_bytes=(device, lower),
    )


def _height(scene: Scene, scale: _Scale) -> float:
    title = _TITLE + len(scene.lines) * _NOTE + 0.08
    return title + len(scene.ranks) * _row_height(scene, scale) + _AXIS


def _row_height(scene: Scene, scale: _Scale) -> float:
    memory = sum(height + 0.04 for height in _memory_heights(scene, scale) if height)
    return scale.cells + len(scene.thin_tracks) * _THIN + memory + _GAP


def _memory_heights(scene: Scene, scale: _Scale) -> list[float]:
    both = zip(scale.memory, scene.highest_bytes, strict=True)
    return [height if own else 0.0 for height, own in both]


def _draw_scene(axes: Axes, scene: Scene, top: float, scale: _Scale) -> None:
    _write(axes, (0, top), scene.title, 13, INK, va="top", weight="bold")
    top += _TITLE
    for text in scene.lines:
        _write(axes, (0, top), text, 9, FAINT, va="top")
        top += _NOTE
    top += 0.08
    for rank in scene.ranks:
        below = _draw_lane(axes, scene, rank, top, scale)
        for tier, height in enumerate(_memory_heights(scene, scale)):
            if height:
                place, most = (below + 0.04, height), 1.04 * scale.most_bytes[tier]
                steps, limit = (
                    (rank.device, rank.limit_bytes or 0) if tier == 0 else (rank.lower, 0)
                )
                _draw_memory(axes, steps, place, most, scene.duration, limit)
                _write_peaks(axes, rank, tier, below + 0.06)
                below += 0.04 + height
        top += _row_height(scene, scale)
    _draw_time_axis(axes, top - 0.06, scale.longest, scene.time_unit)


def _draw_lane(axes: Axes, scene: Scene, rank: RankScene, top: float, scale: _Scale) -> float:
    """Draw the cells and the thin tracks under them; return where they end."""
    middle = top + scale.cells / 2
    _write(axes, (0, middle), rank.name, 9, INK, -8, ha="right", va="center", linespacing=1.1)
    axes.broken_barh([(0, scene.duration)], (top, scale.cells), color=LANE, linewidth=0)
    _draw_cells(axes, scene, rank.on("compute"), top, scale)
    below = top + scale.cells
    for track in scene.thin_tracks:
        bars = [bar for bar in rank.on(track) if bar.seconds > 0]
        spans = [(bar.record.start_s, bar.seconds) for bar in bars]
        colours = [fill(GREY, bar.kind) for bar in bars]
        axes.broken_barh(spans, (below + 0.3 * _THIN, 0.7 * _THIN), color=colours, linewidth=0.5)
        below += _THIN
    return below


def _draw_cells(axes: Axes, scene: Scene, bars: Sequence[Bar], top: float, scale: _Scale) -> None:
    """Draw one collection per look: thousands of bars at once."""
    looks: dict[tuple[str, Kind], list[tuple[float, float]]] = defaultdict(list)
    edges: dict[float, list[tuple[float, float]]] = defaultdict(list)
    y = top, scale.cells
    for bar in bars:
        colour, span = scene.chunks[bar.chunk].colour, (bar.record.start_s, bar.seconds)
        inches = bar.seconds * scale.width / scale.longest
        looks[colour, bar.kind].append(span)
        # a white edge parts neighbours, unless it would be all that is left of them
        edges[0.8 if inches > 0.12 else 0.3 if inches > 0.03 else 0.0].append(span)
        for size in (9, 7):
            if size * 0.64 * len(bar.label) < inches * 72 - 3:
                _write_label(axes, bar, fill(colour, bar.kind), top + scale.cells / 2, size)
                break
    for (colour, kind), spans in looks.items():
        axes.broken_barh(spans, y, facecolor=fill(colour, kind), edgecolor=tint(colour, 0.25),
                         hatch=HATCHES.get(kind), linewidth=0)  # fmt: skip
    for width, spans in edges.items():
        edge = "white" if width else "none"
        axes.broken_barh(spans, y, facecolor="none", edgecolor=edge, linewidth=width)


def _write_label(axes: Axes, bar: Bar, face: str, y: float, size: int) -> None:
    ground = {"facecolor": face, "linewidth": 0, "boxstyle": "round,pad=0.1"}
    place = (bar.record.start_s + bar.record.stop_s) / 2, y
    _write(axes, place, bar.label, size, ink_on(face), ha="center", va="center_baseline",
           bbox=ground if bar.kind in HATCHES else None)  # fmt: skip


def _draw_memory(
    axes: Axes, steps: Steps, place: tuple[float, float], most: float, until: float, limit: int
) -> None:
    """Draw the parts of a memory as a stack, and a limit in bytes unless it is 0. `place`: its top
    and height, the height of `most` bytes."""
    top, height = place
    bottom, right = top + height, axes.get_xlim()[1]
    axes.plot([0, right], [bottom] * 2, color=LINE, linewidth=0.8)
    if height >= 0.7:
        _draw_byte_ticks(axes, place, most)
    times = [*steps.times, until]
    lower = np.full(len(times), bottom)
    for part, values in steps.parts.items():
        upper = lower - height * np.array([*values, values[-1]]) / most
        axes.fill_between(times, lower, upper, step="post", color=PART_COLOURS[part], linewidth=0)
        lower = upper
    if limit:
        y = bottom - height * limit / most
        axes.plot([0, right], [y, y], color=LIMIT, linewidth=1.0, linestyle=_DASHES)
        if steps.peak > limit:
            axes.fill_between(times, y, np.minimum(y, lower), step="post", color=LIMIT, alpha=0.6,
                              linewidth=0)  # fmt: skip


def _write_peaks(axes: Axes, rank: RankScene, tier: int, top: float) -> None:
    """Write the peak of the device (tier 0) and its limit, or those of the tiers below it (1)."""
    lower = [(f"{part} {format_bytes(max(own))}", INK) for part, own in rank.lower.parts.items()]
    device = [(f"peak {format_bytes(rank.device.peak)}", INK)]
    if rank.limit_bytes:
        device.append((f"limit {format_bytes(rank.limit_bytes)}", LIMIT))
    for number, (text, colour) in enumerate((device, lower)[tier]):
        place = axes.get_xlim()[1], top + 0.15 * number
        _write(axes, place, text, 8, colour, 8, va="top")


def _draw_byte_ticks(axes: Axes, place: tuple[float, float], most: float) -> None:
    """Mark three to six multiples of a power of two."""
    top, height = place
    step = 1
    while step < most / 6:
        step *= 2
    for used in range(step, int(most) + 1, step):
        y = top + height * (1 - used / most)
        axes.plot(axes.get_xlim(), [y, y], color=LINE, linewidth=0.5, zorder=0.5)
        _write(axes, (0, y), format_bytes(used), 7.5, FAINT, -8, ha="right", va="center")


def _draw_time_axis(axes: Axes, top: float, longest: float, time_unit: str) -> None:
    scale, unit = 1.0, time_unit
    if time_unit == "s" and not 1 <= longest < 600:
        scale, unit = (1e3, "ms") if longest < 1 else (1 / 60, "min")
    axes.plot([0, longest], [top, top], color=FAINT, linewidth=0.8)
    ticks = MaxNLocator(nbins=14, steps=[1, 2, 2.5, 5, 10]).tick_values(0, longest * scale)
    for tick in (tick for tick in ticks if tick <= longest * scale * (1 + 1e-9)):
        time = tick / scale
        axes.plot([time, time], [top, top + 0.04], color=FAINT, linewidth=0.8)
        _write(axes, (time, top + 0.07), f"{tick:,.10g}", 9, FAINT, ha="center", va="top")
    _write(axes, (longest / 2, top + 0.22), f"time ({unit})", 9, FAINT, ha="center", va="top")


def _write(
    axes: Axes, place: tuple[float, float], text: str, size: float, colour: str, right: float = 0,
    **how: Any,
) -> None:  # fmt: skip
    """Write a text as it is, `right` points beside a place: no formula is made of what stands
    between dollars."""
    axes.annotate(text, place, (right, 0), textcoords="offset points", fontsize=size, color=colour,
                  annotation_clip=False, parse_math=False, **how)  # fmt: skip


def _num_columns(entries: Sequence[Entry], width: float) -> int:
    """As many columns as fit: matplotlib fills one after the other, evenly."""
    widths = [0.48 + len(entry.text) * 0.065 for entry in entries]
    for num in range(len(entries), 1, -1):
        short, longer = divmod(len(entries), num)
        starts = [column * short + min(column, longer) for column in range(num + 1)]
        if sum(max(widths[a:b]) for a, b in pairwise(starts)) <= width:
            return num
    return 1


def _draw_legend(
    figure: Figure, entries: Sequence[Entry], num_columns: int, corner: tuple[float, float]
) -> None:
    handles: list[Any] = [_handle(entry) for entry in entries]
    figure.legend(
        handles, [entry.text for entry in entries], ncols=num_columns, loc="upper left",
        bbox_to_anchor=corner, frameon=False, borderpad=0, borderaxespad=0, fontsize=8.5,
        labelcolor=INK, handlelength=1.8, columnspacing=1.4, labelspacing=0.75,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def _handle(entry: Entry) -> Line2D | tuple[Patch, ...]:
    if entry.dashed or not entry.colours:
        colour, width = (*entry.colours, "none")[0], 1.2 if entry.dashed else 0
        return Line2D([], [], color=colour, linewidth=width, linestyle=_DASHES)
    kind = entry.kind
    faces = [fill(colour, kind) if kind else colour for colour in entry.colours]
    hatch, edge = HATCHES.get(kind) if kind else None, tint(GREY, 0.25)
    return tuple(Patch(facecolor=f, edgecolor=edge, hatch=hatch, linewidth=0.3) for f in faces)
