"""Timelines as PNG or SVG: a row per rank, its memory under it, one panel below the other.

A picture is a column of axes whose heights are inches and whose fonts are points, so that a picture
of two ranks and one of twenty have the same type and bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, log2
from pathlib import Path
from textwrap import wrap
from typing import Any

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
    INK,
    KINDS,
    LANE,
    LIMIT,
    LINE,
    PACKED_COLOURS,
    PART_COLOURS,
    PART_WORDS,
    Bar,
    Kind,
    Panel,
    RankScene,
    Scene,
    fill,
    hue,
    ink_on,
    make_scenes,
    tint,
)
from furlong.units import format_bytes, format_count, format_seconds, plural

_LEFT, _RIGHT, _RIGHT_OF_MEMORY = 0.95, 0.25, 1.25
_EDGE, _TITLE, _NOTE, _AXIS, _GAP, _SPACE, _THIN = 0.12, 0.28, 0.18, 0.5, 0.14, 0.04, 0.1
"""Heights in inches: the picture's edge, a title, a line under it, a time axis, the gaps between
ranks and within one, a track of messages or copies."""
_DASHES = (0, (5, 3))
_DPI = 150
_LABEL = 8
"""Points of the letters on a bar."""
_MOST_LETTERS = 128
"""Letters of a line under a title that the narrowest picture has room for."""
MOST_SEQUENCES = 8
"""Cut sequences that a legend names."""
_MEMORY_WORDS = PART_WORDS | {
    "in use": "device memory: only predictions know its parts",
    "cpu": "CPU memory",
}

_Row = tuple[float, Callable[[Axes], None] | None]
"""A height in inches, and the way to draw it; None for what stays empty."""


class _Sizes:
    """The sizes that all rows of a picture share, in inches but for two."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        ranks = [rank for scene in scenes for rank in scene.ranks]
        most_cells = max((len(rank.on("compute")) for rank in ranks), default=0)
        self.width = min(16.5, max(9.8, most_cells * 0.08))
        self.longest = max(scene.duration for scene in scenes) or 1.0
        """The end of the time axis."""
        self.cells = 0.44 if len(ranks) <= 8 else 0.3
        # a few ranks share the height of a screen
        device = min(1.7, max(0.36, 3.6 / max(len(ranks), 1)))
        self.memory = device, max(0.24, 0.4 * device)
        """The heights of a device's memory and of that below it."""
        self.most_bytes = [max(scene.highest_bytes[i] for scene in scenes) for i in (0, 1)]
        """The bytes of these heights."""


def save_picture(panels: Sequence[Panel], path: Path, *, most_ranks: int = 16) -> str:
    """Draw timelines, on one scale of time and one of memory, as `path` says: .png or .svg.

    Of each panel at most `most_ranks` ranks are drawn; returns the words for the choice in the
    first one, if any.
    """
    scenes = make_scenes(panels, most_ranks)
    sizes = _Sizes(scenes)
    figure = Figure(facecolor="white", dpi=_DPI)
    groups = [entries for entries in legend(scenes) if entries]
    legends = [_fitting_legend(figure, entries, sizes.width + _RIGHT) for entries in groups]
    heights = [one.get_window_extent().height / _DPI + 0.08 for one in legends]
    rows = [row for scene in scenes for row in _rows(scene, sizes)]
    inches = [_EDGE + sum(heights) + 0.08, *(height for height, _ in rows), _EDGE]
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
    top = height - _EDGE
    for one, own in zip(legends, heights, strict=True):
        one.set_bbox_to_anchor((_LEFT / width, top / height))
        top -= own
    figure.savefig(path)
    return scenes[0].shown


def _rows(scene: Scene, sizes: _Sizes) -> Iterator[_Row]:
    lines = [part for text in scene.lines for part in wrap(text, _MOST_LETTERS)]
    yield _TITLE + len(lines) * _NOTE + 0.08, partial(_draw_title, scene.title, lines)
    for rank in scene.ranks:
        lane = sizes.cells + len(scene.thin_tracks) * _THIN
        yield lane, partial(_draw_lane, scene, rank, sizes)
        for place, height in enumerate(sizes.memory):
            if scene.highest_bytes[place]:
                yield _SPACE, None
                most = 1.04 * sizes.most_bytes[place]
                yield height, partial(_draw_memory, scene, rank, place, most, height >= 0.7)
        yield _GAP, None
    yield _SPACE, _draw_time_axis
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
        bars = [bar for bar in rank.on(track) if bar.span[1] > 0]
        y, colours = sizes.cells + (number + 0.3) * _THIN, [fill(GREY, bar.kind) for bar in bars]
        spans = [bar.span for bar in bars]
        axes.broken_barh(spans, (y, 0.7 * _THIN), color=colours, linewidth=0.5)


def _draw_cells(axes: Axes, scene: Scene, bars: Sequence[Bar], sizes: _Sizes) -> None:
    """Draw one collection per look: thousands of bars at once."""
    looks: dict[tuple[str, Kind], list[tuple[float, float]]] = defaultdict(list)
    edges: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        colour, inches = scene.chunks[bar.chunk].colour, bar.span[1] * sizes.width / sizes.longest
        looks[colour, bar.kind].append(bar.span)
        # a white edge parts neighbours, unless it would be all that is left of them
        edges[0.8 if inches > 0.12 else 0.3 if inches > 0.03 else 0.0].append(bar.span)
        if 0.64 * _LABEL * len(bar.label) < inches * 72 - 3:
            face = fill(colour, bar.kind)
            ground = {"facecolor": face, "linewidth": 0, "boxstyle": "round,pad=0.1"}
            axes.text(
                (bar.record.start_s + bar.record.stop_s) / 2, sizes.cells / 2, bar.label,
                fontsize=_LABEL, color=ink_on(face), ha="center", va="center_baseline",
                bbox=ground if KINDS[bar.kind].hatch else None,
            )  # fmt: skip
    y = 0, sizes.cells
    for (colour, kind), spans in looks.items():
        axes.broken_barh(spans, y, facecolor=fill(colour, kind), edgecolor=tint(colour, 0.25),
                         hatch=KINDS[kind].hatch, linewidth=0)  # fmt: skip
    for width, spans in edges.items():
        edge = "white" if width else "none"
        axes.broken_barh(spans, y, facecolor="none", edgecolor=edge, linewidth=width)


def _draw_memory(
    scene: Scene, rank: RankScene, place: int, most: float, ticks: bool, axes: Axes
) -> None:
    """Draw the parts of the memory on the device (place 0) or off it (1) as a stack, and write the
    peaks beside it."""
    steps, limit = (rank.lower, 0) if place else (rank.device, scene.panel.limit_bytes)
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
    if place == 0:
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


def _draw_time_axis(axes: Axes) -> None:
    axes.set_frame_on(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines.bottom.set_color(FAINT)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=14, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_seconds(time_s)))
    axes.tick_params(labelsize=9, color=FAINT, labelcolor=FAINT, length=3)


def _write(
    axes: Axes, x: float, down: float, text: str, size: float, colour: str, **how: Any
) -> None:
    """Write a text as it is, some points below the top of the axes, at their left end or beside
    their right one: no formula is made of what stands between dollars."""
    axes.annotate(text, (x, 1), (8 * x, -down), xycoords="axes fraction", va="top", fontsize=size,
                  textcoords="offset points", color=colour, parse_math=False, **how)  # fmt: skip


_Handle = Line2D | tuple[Patch, ...]


def legend(scenes: Sequence[Scene]) -> list[list[tuple[str, _Handle]]]:
    """The words and looks of all that the scenes show: actions, chunks, memory."""
    ranks = [rank for scene in scenes for rank in scene.ranks]
    kinds = {bar.kind for rank in ranks for bar in rank.bars if bar.span[1] > 0}
    actions = [(look.words, _patches(GREY, kind=kind)) for kind, look in KINDS.items()
               if kind in kinds]  # fmt: skip
    parts = {part for rank in ranks for part in (*rank.device.parts, *rank.lower.parts)}
    memory: list[tuple[str, _Handle]] = [
        (_MEMORY_WORDS.get(part, part), _patches(colour))
        for part, colour in PART_COLOURS.items()
        if part in parts
    ]
    if any(scene.panel.limit_bytes and scene.highest_bytes[0] for scene in scenes):
        dashes = Line2D([], [], color=LIMIT, linewidth=1.2, linestyle=_DASHES)
        memory.append(("limit of device memory", dashes))
    return [[*actions, ("idle", _patches(LANE))], _chunk_entries(scenes), memory]


def _chunk_entries(scenes: Sequence[Scene]) -> list[tuple[str, _Handle]]:
    seen = {
        scene.chunks[bar.chunk].sequence
        for scene in scenes for rank in scene.ranks for bar in rank.on("compute")
    }  # fmt: skip
    entries: list[tuple[str, _Handle]] = []
    if None in seen:
        words = "whole sequences (four shades, to tell neighbouring chunks apart)"
        entries.append((words, _patches(*PACKED_COLOURS)))
    cut = scenes[0].cut  # all scenes of a picture agree on it
    shown = [(place, seq_id) for place, seq_id in enumerate(cut) if seq_id in seen]
    for place, seq_id in shown[:MOST_SEQUENCES]:
        shades = _patches(*(tint(hue(place), -DARKEST * left) for left in (1, 0.5, 0)))
        words = f"sequence {seq_id}, {format_count(cut[seq_id])} {plural(cut[seq_id], 'token')}"
        entries.append((words, shades))
    if shown:
        more = len(shown) - MOST_SEQUENCES
        again = f"; {more} shorter ones in the same colours again" if more > 0 else ""
        words = f"(cut, from dark to light along its chunks{again})"
        entries.append((words, Line2D([], [], color="none", linewidth=0)))
    return entries


def _patches(*colours: str, kind: Kind | None = None) -> tuple[Patch, ...]:
    """A field for each colour, side by side; `kind`: whose shade and hatch they have."""
    hatch, edge = KINDS[kind].hatch if kind else None, tint(GREY, 0.25)
    faces = [fill(colour, kind) if kind else colour for colour in colours]
    return tuple(Patch(facecolor=f, edgecolor=edge, hatch=hatch, linewidth=0.3) for f in faces)


def _fitting_legend(figure: Figure, entries: Sequence[tuple[str, _Handle]], width: float) -> Legend:
    """A legend in as many columns as fit into a width in inches."""
    words, handles = zip(*entries, strict=True)
    for num_columns in range(len(entries), 0, -1):
        one = figure.legend(
            handles, words, ncols=num_columns, loc="upper left",
            frameon=False, borderpad=0, borderaxespad=0, fontsize=8.5, labelcolor=INK,
            handlelength=1.8, columnspacing=1.4, labelspacing=0.75,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )  # fmt: skip
        if num_columns == 1 or one.get_window_extent().width <= width * _DPI:
            break
        one.remove()
    return one
