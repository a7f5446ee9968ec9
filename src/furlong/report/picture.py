"""Timelines as PNG or SVG: a panel per plan, with a row per rank and the rank's memory below it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from furlong.report.scene import (
    FAINT,
    GREY,
    INK,
    LANE,
    LIMIT,
    LINE,
    LOOKS,
    PACKED_COLOURS,
    PART_COLOURS,
    PART_WORDS,
    Bar,
    Panel,
    RankScene,
    Scene,
    SpanTrack,
    cut_sequences,
    fill,
    ink_on,
    make_scene,
    tint,
)
from furlong.units import count_words, format_bytes

_WIDTH, _LEFT, _RIGHT = 15.0, 1.0, 1.4
"""Width of a picture, and its margins left and right of the bars, in inches."""
_TITLE, _NOTE, _LANE, _THIN, _MEMORY, _AXIS, _LEGEND = 0.4, 0.19, 0.42, 0.12, 0.8, 0.45, 0.25
"""Heights in inches: a title, a line under it, a rank's cells, its messages or copies, its memory,
the time axis, a row of the legend."""
_DPI = 150
_LABEL = 8
"""Font size of the labels of bars, in points."""
_MOST_LETTERS = 128
"""Most letters of a line under a title."""
_COLUMNS = 6
"""Entries in a row of the legend."""
MOST_SEQUENCES = 8
"""Most cut sequences that a legend names."""
_UNITS = (7200, 3600, "h"), (120, 60, "min"), (0.5, 1, "s"), (0, 1e-3, "ms")
"""Units of a time axis: (shortest duration in seconds that uses it, its seconds, its name)."""
_MEMORY_WORDS = PART_WORDS | {"in use": "device memory: only predictions know its parts"}


def save_picture(panels: Sequence[Panel], path: Path, *, most_ranks: int = 16) -> str:
    """Draw timelines to a .png or .svg, with common scales of time and memory.

    At most `most_ranks` ranks of each panel are drawn. Return in words which ranks of the first
    panel are drawn; empty if all are.
    """
    scenes = [make_scene(panel, most_ranks) for panel in panels]
    longest_s = max(scene.duration_s for scene in scenes) or 1.0
    stacks = [_stack(rank.device) for scene in scenes for rank in scene.ranks]
    limits = [scene.panel.limit_bytes for scene in scenes]
    most_bytes = 1.04 * max(*limits, *(max(stack, default=0) for stack in stacks))
    entries = legend(scenes)
    rows: list[tuple[float, Any, tuple[Any, ...]]] = []
    for scene in scenes:
        lines = [part for text in scene.lines for part in wrap(text, _MOST_LETTERS)]
        rows.append((_TITLE + len(lines) * _NOTE, _draw_title, (scene.title, lines)))
        for rank in scene.ranks:
            rows.append((_LANE + 3 * _THIN, _draw_lane, (scene, rank, longest_s)))
            if rank.device:
                rows.append((_MEMORY, _draw_memory, (scene, rank, most_bytes)))
        rows.append((_AXIS, _draw_time_axis, ()))
    rows.append((_LEGEND * ceil(len(entries) / _COLUMNS) + 0.1, _draw_legend, (entries,)))
    height = sum(inches for inches, *_ in rows)
    figure = Figure(figsize=(_WIDTH, height), facecolor="white", dpi=_DPI)
    grid = figure.add_gridspec(
        len(rows), 1, height_ratios=[inches for inches, *_ in rows], hspace=0, bottom=0, top=1,
        left=_LEFT / _WIDTH, right=1 - _RIGHT / _WIDTH,
    )  # fmt: skip
    for number, (_, draw, given) in enumerate(rows):
        axes = figure.add_subplot(grid[number], xlim=(0, longest_s), frame_on=False)
        axes.set_xticks([])
        axes.set_yticks([])
        draw(axes, *given)
    figure.savefig(path)
    return scenes[0].shown


def _draw_title(axes: Axes, title: str, lines: Sequence[str]) -> None:
    _write(axes, 0, 6, title, 13, INK, weight="bold")
    for number, text in enumerate(lines):
        _write(axes, 0, 26 + 72 * number * _NOTE, text, 9, FAINT)


def _draw_lane(axes: Axes, scene: Scene, rank: RankScene, longest_s: float) -> None:
    """Draw the timeline of one rank: forwards and backwards as bars, and below them its messages
    and its copies as thinner bars. The y axis is in inches, downwards."""
    axes.set_ylim(_LANE + 3 * _THIN, 0)
    axes.annotate(rank.name, (0, _LANE / 2), (-8, 0), textcoords="offset points", fontsize=9,
                  color=INK, ha="right", va="center")  # fmt: skip
    axes.broken_barh([(0, scene.duration_s)], (0, _LANE), color=LANE, linewidth=0)
    inches = (_WIDTH - _LEFT - _RIGHT) / longest_s
    # one collection per style: there may be thousands of bars
    looks: dict[tuple[str, str | None, bool], list[tuple[float, float]]] = defaultdict(list)
    for bar in rank.on("compute"):
        width = bar.span[1] * inches
        # a white edge separates neighbours, but would cover narrow bars
        looks[bar.colour, LOOKS[bar.kind].hatch, width > 0.03].append(bar.span)
        if 0.64 * _LABEL * len(bar.label) < width * 72 - 3:
            axes.text(
                bar.span[0] + bar.span[1] / 2, _LANE / 2, bar.label, fontsize=_LABEL,
                color=ink_on(bar.colour), ha="center", va="center_baseline",
            )  # fmt: skip
    for (colour, hatch, has_edge), spans in looks.items():
        edge = "white" if has_edge else "none"
        axes.broken_barh(spans, (0, _LANE), facecolor=colour, edgecolor=tint(GREY, 0.25),
                         hatch=hatch, linewidth=0)  # fmt: skip
        axes.broken_barh(spans, (0, _LANE), facecolor="none", edgecolor=edge, linewidth=0.5)
    tracks: tuple[SpanTrack, ...] = ("link", "copy")
    for number, track in enumerate(tracks):
        bars = [bar for bar in rank.on(track) if bar.span[1] > 0]
        axes.broken_barh([bar.span for bar in bars], (_LANE + (number + 0.3) * _THIN, 0.7 * _THIN),
                         color=[bar.colour for bar in bars], linewidth=0.5)  # fmt: skip


def _stack(parts: Mapping[str, Sequence[int]]) -> list[int]:
    """Return, for each time, the sum of the bytes of all parts."""
    return [sum(row) for row in zip(*parts.values(), strict=True)]


def _draw_memory(axes: Axes, scene: Scene, rank: RankScene, most_bytes: float) -> None:
    """Draw a rank's device memory over time as a stack of its parts. Beside it, write the peaks of
    device memory, CPU memory and disk."""
    axes.set_ylim(-0.15 * most_bytes, most_bytes)
    axes.axhline(0, color=LINE, linewidth=1.6)
    times, colours = [*rank.times, scene.duration_s], [PART_COLOURS[part] for part in rank.device]
    stack = [[*own, own[-1]] for own in rank.device.values()]
    axes.stackplot(times, *stack, step="post", colors=colours, linewidth=0)
    texts = [(f"peak {format_bytes(max(_stack(rank.device)))}", INK)]
    if limit := scene.panel.limit_bytes:
        texts.append((f"limit {format_bytes(limit)}", LIMIT))
        axes.axhline(limit, color=LIMIT, linewidth=1.0, linestyle="--", zorder=3)
    texts += [(f"{memory} {format_bytes(max(own))}", INK) for memory, own in rank.lower.items()]
    for number, (text, colour) in enumerate(texts):
        _write(axes, 1, 1 + 11 * number, text, 8, colour)


def _draw_time_axis(axes: Axes) -> None:
    axes.set_frame_on(True)
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    axes.spines.top.set_color(FAINT)
    axes.xaxis.tick_top()
    stop_s = axes.get_xlim()[1]
    _, unit_s, unit = next(row for row in _UNITS if stop_s >= row[0])
    ticks = MaxNLocator(nbins=14, steps=[1, 2, 5, 10]).tick_values(0, stop_s / unit_s)
    axes.set_xticks([tick * unit_s for tick in ticks if tick * unit_s <= stop_s])
    axes.xaxis.set_major_formatter(lambda s, _: f"{s / unit_s:.10g} {unit}" if s else "0")
    axes.tick_params(labelsize=9, color=FAINT, labelcolor=FAINT, direction="in", pad=-16)


def _write(
    axes: Axes, x: float, down: float, text: str, size: float, colour: str, **how: Any
) -> None:
    """Write a text beside the axes. Its top is `down` points below the top of the axes. With x = 0
    it starts at their left edge, with x = 1 at the right, outside the axes. Dollar signs are
    literal, not mathtext."""
    axes.annotate(text, (x, 1), (8 * x, -down), xycoords="axes fraction", va="top", fontsize=size,
                  textcoords="offset points", color=colour, parse_math=False, **how)  # fmt: skip


def legend(scenes: Sequence[Scene]) -> list[tuple[str, Patch | Line2D]]:
    """Return the entries of the legend, as (words, handle): one for each kind of action, colour of
    chunks and part of memory in the scenes."""
    ranks = [rank for scene in scenes for rank in scene.ranks]
    bars: list[Bar] = [bar for rank in ranks for bar in rank.bars if bar.span[1] > 0]
    kinds, edge = {bar.kind for bar in bars}, tint(GREY, 0.25)
    entries: list[tuple[str, Patch | Line2D]] = [
        (look.words, Patch(facecolor=fill(GREY, kind), edgecolor=edge, hatch=look.hatch))
        for kind, look in LOOKS.items()
        if kind in kinds
    ]
    entries.append(("idle", Patch(facecolor=LANE, edgecolor=edge)))
    if any(not links for scene in scenes for links in scene.panel.plan.links):
        entries.append(("whole sequences, in four shades", Patch(facecolor=PACKED_COLOURS[0])))
    for plan in {id(scene.panel.plan): scene.panel.plan for scene in scenes}.values():
        for seq_id, colour in islice(cut_sequences(plan).items(), MOST_SEQUENCES):
            words = f"sequence {seq_id}, {count_words(plan.seq_lens[seq_id], 'token')}"
            entries.append((words, Patch(facecolor=colour)))
    parts = {part for rank in ranks for part in rank.device}
    entries += [
        (_MEMORY_WORDS.get(part, part), Patch(facecolor=colour))
        for part, colour in PART_COLOURS.items()
        if part in parts
    ]
    if any(scene.panel.limit_bytes for scene in scenes) and parts:
        dashes = Line2D([], [], color=LIMIT, linewidth=1.2, linestyle="--")
        entries.append(("limit of device memory", dashes))
    return list(dict(entries).items())


def _draw_legend(axes: Axes, entries: Sequence[tuple[str, Patch | Line2D]]) -> None:
    words, handles = zip(*entries, strict=True)
    axes.legend(handles, words, ncols=_COLUMNS, loc="center left", frameon=False, fontsize=8.5,
                labelcolor=INK, borderpad=0, borderaxespad=0)  # fmt: skip
