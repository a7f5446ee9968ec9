"""Timelines as PNG or SVG: a row per rank, its memory under it, panels one below the other.

Every length is in inches and every font in points, so that a picture of two ranks and one of twenty
have the same type and the same bars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from furlong.report.pictures.legend import Legend, with_shared_owners
from furlong.report.pictures.looks import DEVICE, FAINT, HATCHES, HOST, INK, LANE, LIMIT, fill, tint
from furlong.report.pictures.scene import Bar, RankScene, Scene, bar_label
from furlong.report.words import lower_words
from furlong.units import format_bytes

MAX_RANKS = 32
"""Rows of one panel; its subtitle says how many ranks were left out."""

_LEFT, _RIGHT, _RIGHT_OF_MEMORY = 0.95, 0.25, 1.25
_AXIS, _GAP, _BETWEEN = 0.52, 0.15, 0.2
_TITLE, _NOTE = 0.27, 0.18
"""Heights of the title and of a line under it."""
_THIN = 0.1
"""Height of the track of messages and of that of copies."""
_WIDEST, _WIDEST_OF_SEVERAL = 18.0, 12.5
_DPI = 150


def save_picture(scenes: Sequence[Scene], path: Path) -> None:
    """Write the scenes, one below the other on one time scale, as `path` says: .png or .svg.

    A single scene has its legend below; several share one above them, and are drawn lower.
    """
    several = len(scenes) > 1
    scenes = with_shared_owners(scenes) if several else scenes
    width = _width(scenes)
    right = _RIGHT_OF_MEMORY if any(scene.has_memory for scene in scenes) else _RIGHT
    rows = [_Rows(scene, width - _LEFT - right, is_low=several) for scene in scenes]
    legend = Legend(scenes, _LEFT, width - _LEFT - 0.1)
    between = _BETWEEN * (len(scenes) - (0 if several else 1))
    height = 0.1 + between + sum(row.height for row in rows) + legend.height
    figure = Figure(figsize=(width, height), facecolor="white")
    longest = max(scene.duration for scene in scenes) or 1.0
    top = height - 0.1
    if several:
        legend.draw(figure, top)
        top -= legend.height + _BETWEEN
    for row in rows:
        row.draw(figure, top, longest)
        top -= row.height + _BETWEEN
    if not several:
        legend.draw(figure, top + _BETWEEN)
    figure.savefig(path, dpi=_DPI)


def _width(scenes: Sequence[Scene]) -> float:
    """Inches, enough that the bars of a long plan stay apart."""
    most = max(
        sum(bar.track == "compute" for bar in rank.bars)
        for scene in scenes
        for rank in scene.ranks[:MAX_RANKS]
    )
    widest = _WIDEST if len(scenes) == 1 else _WIDEST_OF_SEVERAL
    return min(widest, max(11.0, _LEFT + _RIGHT + most * 0.08))


class _Rows:
    """One panel: its title, the rows of its ranks, its time axis."""

    def __init__(self, scene: Scene, width: float, *, is_low: bool) -> None:
        self._scene = scene
        self._width = width
        self._ranks = scene.ranks[:MAX_RANKS]
        few = len(self._ranks) <= 8 and not is_low
        self._cells = 0.44 if few else 0.3
        self._memory = 0.5 if few else 0.32
        self._gap = 0.05 if is_low else _GAP
        thin = [("link", ("activation", "gradient", "collective")), ("copy", ("copy",))]
        self._thin = [track for track, kinds in thin if scene.timed_kinds.intersection(kinds)]
        self._lane = self._cells + len(self._thin) * _THIN
        self._per_rank = self._lane + self._gap
        self._per_rank += self._memory + 0.04 if scene.has_memory else 0.0
        more = len(scene.ranks) - len(self._ranks)
        batch = scene.batch + (f" ({more} of them are not shown)" if more else "")
        lines = [f"{batch}   ·   {scene.shares}"] if is_low else [batch, scene.shares]
        self._lines = list(filter(None, (scene.note, *lines)))
        self._title = _TITLE + len(self._lines) * _NOTE + 0.19 - self._gap
        self.height = self._title + len(self._ranks) * self._per_rank + _AXIS

    def draw(self, figure: Figure, top: float, longest: float) -> None:
        """Draw below `top`, in inches from the bottom; `longest` is the length of the time axis."""
        scene = self._scene
        total_width, total_height = figure.get_size_inches()
        left = _LEFT / total_width
        # names are shown as they are: no formula is made of what stands between dollars
        figure.text(
            left, top / total_height, scene.title,
            fontsize=13, color=INK, weight="bold", va="top", parse_math=False,
        )  # fmt: skip
        for number, text in enumerate(self._lines):
            y = (top - _TITLE - number * _NOTE) / total_height
            figure.text(left, y, text, fontsize=9, color=FAINT, va="top", parse_math=False)
        figures = scene.figures
        limits = [rank.limit_bytes or 0 for rank in self._ranks]
        highest = 1.1 * max([*figures.peak_device_bytes, *figures.peak_host_bytes, *limits, 1])
        top -= self._title

        def axes_of(bottom: float, height: float) -> Axes:
            bounds = left, bottom / total_height, self._width / total_width, height / total_height
            return _prepared(figure.add_axes(bounds), longest)

        for rank in self._ranks:
            bottom = top - self._lane
            axes = axes_of(bottom, self._lane)
            self._draw_lane(axes, rank, self._width / longest)
            if scene.has_memory:
                bottom -= self._memory + 0.04
                axes = axes_of(bottom, self._memory)
                _draw_memory(axes, rank, highest, scene)
            top -= self._per_rank
        _draw_time_axis(axes, longest, scene.time_unit)

    def _draw_lane(self, axes: Axes, rank: RankScene, inches_per_unit: float) -> None:
        """The cells on top, thin tracks under them; y is in inches."""
        scene = self._scene
        axes.set_ylim(0, self._lane)
        base = self._lane - self._cells
        axes.broken_barh([(0, scene.duration)], (base, self._cells), color=LANE, linewidth=0)
        axes.annotate(
            rank.name, (0, base + self._cells / 2), (-8, 0), textcoords="offset points",
            fontsize=9, color=INK, ha="right", va="center", linespacing=1.1,
        )  # fmt: skip
        cells = [bar for bar in rank.bars if bar.track == "compute"]
        _draw_cells(axes, cells, (base, self._cells), scene, inches_per_unit)
        for bar in cells:
            _write_label(axes, bar, base + self._cells / 2, inches_per_unit, scene)
        for number, track in enumerate(self._thin, start=1):
            bars = [bar for bar in rank.bars if bar.track == track and bar.stop > bar.start]
            y = base - number * _THIN
            axes.broken_barh(
                [(bar.start, bar.stop - bar.start) for bar in bars], (y, 0.7 * _THIN),
                color=[fill("", bar.kind) for bar in bars], linewidth=0.5,
            )  # fmt: skip


def _prepared(axes: Axes, longest: float) -> Axes:
    axes.set_xlim(0, longest)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.patch.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _draw_cells(
    axes: Axes, bars: Sequence[Bar], y: tuple[float, float], scene: Scene, inches_per_unit: float
) -> None:
    """One collection per look: thousands of bars are drawn at once."""
    looks: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        looks[scene.owners[bar.owner].colour, bar.kind].append((bar.start, bar.stop - bar.start))
    for (colour, kind), spans in looks.items():
        axes.broken_barh(
            spans, y, facecolor=fill(colour, kind), edgecolor=tint(colour, 0.25),
            hatch=HATCHES.get(kind), linewidth=0,
        )  # fmt: skip
    # a white edge parts neighbours of one colour, unless it would be all that is left of them
    for least, most, edge in ((0.12, float("inf"), 0.8), (0.03, 0.12, 0.3)):
        wide = [
            (bar.start, bar.stop - bar.start)
            for bar in bars
            if least < (bar.stop - bar.start) * inches_per_unit <= most
        ]
        axes.broken_barh(wide, y, facecolor="none", edgecolor="white", linewidth=edge)


def _write_label(axes: Axes, bar: Bar, y: float, inches_per_unit: float, scene: Scene) -> None:
    text = bar_label(bar, with_stage=scene.labels_stages)
    for size in (9, 7):
        if (bar.stop - bar.start) * inches_per_unit * 72 > size * 0.64 * len(text) + 3:
            break
    else:
        return
    hatched = bar.kind in HATCHES
    axes.text(
        (bar.start + bar.stop) / 2, y, text, fontsize=size,
        color="white" if bar.kind == "backward" else INK, ha="center", va="center_baseline",
        bbox={"facecolor": fill(scene.owners[bar.owner].colour, bar.kind), "linewidth": 0,
              "boxstyle": "round,pad=0.1"} if hatched else None,
    )  # fmt: skip


def _draw_memory(axes: Axes, rank: RankScene, highest: float, scene: Scene) -> None:
    axes.set_ylim(0, highest)
    axes.plot([0, scene.duration], [0, 0], color="#c3c9d3", linewidth=0.8)
    device, host = _peak(rank.device), _peak(rank.host)
    words = [(f"peak {format_bytes(device)}", DEVICE)]
    times, values = _steps(rank.device, scene.duration)
    axes.plot(times, values, drawstyle="steps-post", color=DEVICE, linewidth=1.0)
    axes.fill_between(times, values, step="post", color=DEVICE, alpha=0.25, linewidth=0)
    if scene.has_host_memory:
        curve = _steps(rank.host, scene.duration)
        axes.plot(*curve, drawstyle="steps-post", color=HOST, linewidth=1.2)
        words.append((f"{lower_words(scene.plan.tiers)} {format_bytes(host)}", HOST))
    if rank.limit_bytes:
        over = [max(used, rank.limit_bytes) for used in values]
        axes.fill_between(
            times, rank.limit_bytes, over, step="post", color=LIMIT, alpha=0.55, linewidth=0
        )
        limit = [rank.limit_bytes] * 2
        axes.plot([0, scene.duration], limit, color=LIMIT, linewidth=1.0, linestyle=(0, (5, 3)))
        words.append((f"limit {format_bytes(rank.limit_bytes)}", LIMIT))
    for number, (text, colour) in enumerate(words):
        axes.annotate(
            text, (1, 1), (8, -1 - 11 * number), xycoords="axes fraction",
            textcoords="offset points", fontsize=8, color=colour, va="top",
        )  # fmt: skip


def _steps(curve: Sequence[tuple[float, int]], duration: float) -> tuple[list[float], list[int]]:
    times = [time for time, _ in curve] + [duration]
    return times, [used for _, used in curve] + [curve[-1][1] if curve else 0]


def _peak(curve: Sequence[tuple[float, int]]) -> int:
    return max((used for _, used in curve), default=0)


def _draw_time_axis(axes: Axes, longest: float, time_unit: str) -> None:
    scale, unit = 1.0, time_unit
    if time_unit == "s":
        scale, unit = (1 / 60, "min") if longest >= 600 else (1.0, "s")
        scale, unit = (1e3, "ms") if longest < 1 else (scale, unit)
    axes.spines["bottom"].set_visible(True)
    axes.spines["bottom"].set_color(FAINT)
    axes.spines["bottom"].set_position(("outward", 5))
    ticks = MaxNLocator(nbins=14, steps=[1, 2, 2.5, 5, 10]).tick_values(0, longest * scale)
    axes.set_xticks([tick / scale for tick in ticks if 0 <= tick <= longest * scale * (1 + 1e-9)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.10g}"))
    axes.tick_params(axis="x", labelsize=9, colors=FAINT, length=3)
    axes.set_xlabel(f"time ({unit})", fontsize=9, color=FAINT, labelpad=1)
