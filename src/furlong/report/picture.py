"""Scenes as PNG or SVG: a row per rank, its memory under it, scenes one below the other.

A picture is a column of axes whose heights are inches and whose fonts are points, so that a picture
of two ranks and one of twenty have the same type and bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log2
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from furlong.report.scene import (
    DARKEST,
    FAINT,
    GREY,
    HATCHES,
    INK,
    KIND_WORDS,
    LANE,
    LIMIT,
    LINE,
    PACKED_COLOURS,
    PART_COLOURS,
    PART_WORDS,
    Bar,
    Kind,
    RankScene,
    Scene,
    fill,
    hue,
    ink_on,
    is_alone,
    tint,
)
from furlong.units import format_bytes, format_count, plural

_LEFT, _RIGHT, _RIGHT_OF_MEMORY = 0.95, 0.25, 1.25
_EDGE, _TITLE, _NOTE, _AXIS, _GAP, _SPACE, _THIN = 0.12, 0.28, 0.18, 0.5, 0.14, 0.04, 0.1
"""Heights in inches: the picture's edge, a title, a line under it, a time axis, the gaps between
ranks and within one, a track of messages or copies."""
_DASHES = (0, (5, 3))
_DPI = 150
_MOST_LETTERS = 128
"""Letters of a line under a title that the narrowest picture has room for."""
MOST_SEQUENCES = 8
"""Cut sequences that a legend names."""
_MEMORY_WORDS = PART_WORDS | {
    "in use": "device memory: only predictions know its parts",
    "host": "host memory",
}

_Row = tuple[float, Callable[[Axes], None] | None]
"""A height in inches, and the way to draw it; None for what stays empty."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes that all rows of a picture share, in inches but for two."""

    width: float
    longest: float
    """The end of the time axis."""
    cells: float
    memory: tuple[float, float]
    """The heights of a device's memory and of that below it."""
    most_bytes: tuple[int, int]
    """The bytes of these heights."""


def save_picture(scenes: Sequence[Scene], path: Path) -> None:
    """Write the scenes, on one scale of time and one of memory, as `path` says: .png or .svg."""
    sizes = _sizes(scenes)
    figure = Figure(facecolor="white", dpi=_DPI)
    groups = [entries for entries in legend(scenes) if entries]
    legends = [_fitting_legend(figure, entries, sizes.width + _RIGHT) for entries in groups]
    heights = [one.get_window_extent().height / _DPI + 0.08 for one in legends]
    rows = [row for scene in scenes for row in _rows(scene, sizes)]
    # who looks at the first of many wants the legend there
    margins = [_EDGE, _EDGE + sum(heights) + 0.08]
    above, below = margins if len(scenes) == 1 else margins[::-1]
    inches = [above, *(height for height, _ in rows), below]
    right = _RIGHT_OF_MEMORY if sizes.most_bytes[0] else _RIGHT
    width, height = _LEFT + sizes.width + right, sum(inches)
    figure.set_size_inches(width, height)
    grid = figure.add_gridspec(
        len(inches), 1, height_ratios=inches, hspace=0, bottom=0, top=1,
        left=_LEFT / width, right=1 - right / width,
    )  # fmt: skip
    for number, (_, draw) in enumerate(rows, start=1):
        if draw is not None:
            draw(figure.add_subplot(grid[number], xlim=(0, sizes.longest), frame_on=False))
    top = below if len(scenes) == 1 else height - _EDGE
    for one, own in zip(legends, heights, strict=True):
        one.set_bbox_to_anchor((_LEFT / width, top / height))
        top -= own
    figure.savefig(path)


def _sizes(scenes: Sequence[Scene]) -> _Sizes:
    """Sizes that suit the number of ranks: a few share the height of a screen."""
    ranks = [rank for scene in scenes for rank in scene.ranks]
    device, lower = (max(scene.highest_bytes[i] for scene in scenes) for i in (0, 1))
    memory = min(1.7, max(0.36, 3.6 / max(len(ranks), 1)))
    most_cells = max((len(rank.on("compute")) for rank in ranks), default=0)
    return _Sizes(
        width=min(16.5, max(9.8, most_cells * 0.08)),
        longest=max(scene.duration for scene in scenes) or 1.0,
        cells=0.44 if len(ranks) <= 8 else 0.3,
        memory=(memory, max(0.24, 0.4 * memory)),
        most_bytes=(device, lower),
    )


def _rows(scene: Scene, sizes: _Sizes) -> Iterator[_Row]:
    lines = [part for text in scene.lines for part in wrap(text, _MOST_LETTERS)]
    yield _TITLE + len(lines) * _NOTE + 0.08, partial(_draw_title, scene.title, lines)
    for rank in scene.ranks:
        lane = sizes.cells + len(scene.thin_tracks) * _THIN
        yield lane, partial(_draw_lane, scene, rank, sizes)
        for tier, height in enumerate(sizes.memory):
            if scene.highest_bytes[tier]:
                yield _SPACE, None
                most = 1.04 * sizes.most_bytes[tier]
                yield height, partial(_draw_memory, scene, rank, tier, most, height >= 0.7)
        yield _GAP, None
    yield _SPACE, partial(_draw_time_axis, scene.panel.time_unit)
    yield _AXIS, None


def _draw_title(title: str, lines: Sequence[str], axes: Axes) -> None:
    axes.set_axis_off()
    _write(axes, 0, 0, title, 13, INK, weight="bold")
    for number, text in enumerate(lines):
        _write(axes, 0, 72 * (_TITLE + number * _NOTE), text, 9, FAINT)


def _draw_lane(scene: Scene, rank: RankScene, sizes: _Sizes, axes: Axes) -> None:
    """Draw the cells and the thin tracks under them; y is inches from the top downwards."""
    axes.set_axis_off()
    axes.set_ylim(sizes.cells + len(scene.thin_tracks) * _THIN, 0)
    axes.annotate(rank.name, (0, sizes.cells / 2), (-8, 0), textcoords="offset points", fontsize=9,
                  color=INK, ha="right", va="center", linespacing=1.1)  # fmt: skip
    axes.broken_barh([(0, scene.duration)], (0, sizes.cells), color=LANE, linewidth=0)
    _draw_cells(axes, scene, rank.on("compute"), sizes)
    for number, track in enumerate(scene.thin_tracks):
        bars = [bar for bar in rank.on(track) if bar.seconds > 0]
        spans = [(bar.record.start_s, bar.seconds) for bar in bars]
        y, colours = sizes.cells + (number + 0.3) * _THIN, [fill(GREY, bar.kind) for bar in bars]
        axes.broken_barh(spans, (y, 0.7 * _THIN), color=colours, linewidth=0.5)


def _draw_cells(axes: Axes, scene: Scene, bars: Sequence[Bar], sizes: _Sizes) -> None:
    """Draw one collection per look: thousands of bars at once."""
    looks: dict[tuple[str, Kind], list[tuple[float, float]]] = defaultdict(list)
    edges: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        colour, span = scene.chunks[bar.chunk].colour, (bar.record.start_s, bar.seconds)
        inches = bar.seconds * sizes.width / sizes.longest
        looks[colour, bar.kind].append(span)
        # a white edge parts neighbours, unless it would be all that is left of them
        edges[0.8 if inches > 0.12 else 0.3 if inches > 0.03 else 0.0].append(span)
        fitting = (size for size in (9, 7) if size * 0.64 * len(bar.label) < inches * 72 - 3)
        if size := next(fitting, 0):
            face = fill(colour, bar.kind)
            ground = {"facecolor": face, "linewidth": 0, "boxstyle": "round,pad=0.1"}
            axes.text(
                (bar.record.start_s + bar.record.stop_s) / 2, sizes.cells / 2, bar.label,
                fontsize=size, color=ink_on(face), ha="center", va="center_baseline",
                bbox=ground if bar.kind in HATCHES else None,
            )  # fmt: skip
    y = 0, sizes.cells
    for (colour, kind), spans in looks.items():
        axes.broken_barh(spans, y, facecolor=fill(colour, kind), edgecolor=tint(colour, 0.25),
                         hatch=HATCHES.get(kind), linewidth=0)  # fmt: skip
    for width, spans in edges.items():
        edge = "white" if width else "none"
        axes.broken_barh(spans, y, facecolor="none", edgecolor=edge, linewidth=width)


def _draw_memory(
    scene: Scene, rank: RankScene, tier: int, most: float, ticks: bool, axes: Axes
) -> None:
    """Draw the parts of the memory on the device (tier 0) or below it (1) as a stack, and write the
    peaks beside it."""
    steps, limit = (rank.device, rank.limit_bytes) if tier == 0 else (rank.lower, None)
    axes.set_ylim(0, most)
    axes.axhline(0, color=LINE, linewidth=1.6)
    axes.set_xticks([])
    axes.set_yticks([])
    if ticks:
        # three to six multiples of a power of two
        axes.yaxis.set_major_locator(MultipleLocator(2 ** ceil(log2(most / 6))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda used, _: format_bytes(used)))
        axes.tick_params(labelsize=7.5, labelcolor=FAINT, length=0, pad=8)
        axes.grid(axis="y", color=LINE, linewidth=0.5)
        axes.set_axisbelow(True)
    times = [*steps.times, scene.duration]
    if steps.parts:
        stack = [[*own, own[-1]] for own in steps.parts.values()]
        colours = [PART_COLOURS[part] for part in steps.parts]
        axes.stackplot(times, *stack, step="post", colors=colours, linewidth=0)
    texts = [(f"{part} {format_bytes(max(own))}", INK) for part, own in steps.parts.items()]
    if tier == 0:
        texts = [(f"peak {format_bytes(steps.peak)}", INK)]
    if limit:
        texts.append((f"limit {format_bytes(limit)}", LIMIT))
        axes.axhline(limit, color=LIMIT, linewidth=1.0, linestyle=_DASHES, zorder=3)
        if steps.peak > limit:
            totals = np.array([*steps.totals, steps.totals[-1]])
            axes.fill_between(times, np.minimum(limit, totals), totals, step="post", color=LIMIT,
                              alpha=0.6, linewidth=0)  # fmt: skip
    for number, (text, colour) in enumerate(texts):
        _write(axes, 1, 1 + 11 * number, text, 8, colour)


def _draw_time_axis(time_unit: str, axes: Axes) -> None:
    longest = axes.get_xlim()[1]
    scale, unit = 1.0, time_unit
    if time_unit == "s" and not 1 <= longest < 600:
        scale, unit = (1e3, "ms") if longest < 1 else (1 / 60, "min")
    axes.set_frame_on(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines.bottom.set_color(FAINT)
    axes.set_yticks([])
    axes.set_xlim(0, longest * scale)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=14, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:,.10g}"))
    axes.tick_params(labelsize=9, color=FAINT, labelcolor=FAINT, length=3)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color=FAINT, labelpad=2)


def _write(
    axes: Axes, x: float, down: float, text: str, size: float, colour: str, **how: Any
) -> None:
    """Write a text as it is, some points below the top of the axes, at their left end or beside
    their right one: no formula is made of what stands between dollars."""
    axes.annotate(text, (x, 1), (8 * x, -down), xycoords="axes fraction", va="top", fontsize=size,
                  textcoords="offset points", color=colour, parse_math=False, **how)  # fmt: skip


class LegendEntry(NamedTuple):
    """One thing that a picture shows, and its look."""

    text: str
    colours: tuple[str, ...] = ()
    """The colours that stand for it, side by side; none where the text stands alone."""
    kind: Kind | None = None
    """A kind of action, by whose shade and hatch the colours are changed."""
    dashed: bool = False


def legend(scenes: Sequence[Scene]) -> list[list[LegendEntry]]:
    """The actions, the chunks and the memory of the scenes of one picture."""
    ranks = [rank for scene in scenes for rank in scene.ranks]
    kinds = {bar.kind for rank in ranks for bar in rank.bars if bar.seconds > 0}
    alone = all(is_alone(scene.panel.plan) for scene in scenes)
    words = KIND_WORDS | ({"collective": "adding gradients up"} if alone else {})
    actions = [LegendEntry(words[kind], (GREY,), kind) for kind in words if kind in kinds]
    parts = {part for rank in ranks for part in (*rank.device.parts, *rank.lower.parts)}
    memory = [
        LegendEntry(_MEMORY_WORDS.get(part, part), (colour,))
        for part, colour in PART_COLOURS.items()
        if part in parts
    ]
    if any(rank.limit_bytes and rank.device.parts for rank in ranks):
        memory.append(LegendEntry("limit of device memory", (LIMIT,), dashed=True))
    return [[*actions, LegendEntry("idle", (LANE,))], _chunk_entries(scenes), memory]


def _chunk_entries(scenes: Sequence[Scene]) -> list[LegendEntry]:
    seen = {
        scene.chunks[bar.chunk].sequence
        for scene in scenes for rank in scene.ranks for bar in rank.on("compute")
    }  # fmt: skip
    entries: list[LegendEntry] = []
    if None in seen:
        words = "whole sequences (two shades, to tell neighbouring chunks apart)"
        entries.append(LegendEntry(words, PACKED_COLOURS))
    cut = scenes[0].cut  # all scenes of a picture agree on it
    shown = [(place, seq_id) for place, seq_id in enumerate(cut) if seq_id in seen]
    for place, seq_id in shown[:MOST_SEQUENCES]:
        shades = tuple(tint(hue(place), -DARKEST * left) for left in (1, 0.5, 0))
        words = f"sequence {seq_id}, {format_count(cut[seq_id])} {plural(cut[seq_id], 'token')}"
        entries.append(LegendEntry(words, shades))
    if shown:
        more = len(shown) - MOST_SEQUENCES
        again = f"; {more} shorter ones in the same colours again" if more > 0 else ""
        entries.append(LegendEntry(f"(cut, from dark to light along its chunks{again})"))
    return entries


def _fitting_legend(figure: Figure, entries: Sequence[LegendEntry], width: float) -> Legend:
    """A legend in as many columns as fit into a width in inches."""
    handles: list[Any] = [_handle(entry) for entry in entries]
    for num_columns in range(len(entries), 0, -1):
        one = figure.legend(
            handles, [entry.text for entry in entries], ncols=num_columns, loc="upper left",
            frameon=False, borderpad=0, borderaxespad=0, fontsize=8.5, labelcolor=INK,
            handlelength=1.8, columnspacing=1.4, labelspacing=0.75,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )  # fmt: skip
        if num_columns == 1 or one.get_window_extent().width <= width * _DPI:
            break
        one.remove()
    return one


def _handle(entry: LegendEntry) -> Line2D | tuple[Patch, ...]:
    if entry.dashed or not entry.colours:
        colour, width = (*entry.colours, "none")[0], 1.2 if entry.dashed else 0
        return Line2D([], [], color=colour, linewidth=width, linestyle=_DASHES)
    kind = entry.kind
    faces = [fill(colour, kind) if kind else colour for colour in entry.colours]
    hatch, edge = HATCHES.get(kind) if kind else None, tint(GREY, 0.25)
    return tuple(Patch(facecolor=f, edgecolor=edge, hatch=hatch, linewidth=0.3) for f in faces)
