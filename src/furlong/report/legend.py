"""The legend of a picture: shades first, then the colours of sequences, flowing over lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from furlong.report.looks import (
    FAINT,
    HATCHES,
    HOST,
    INK,
    KIND_WORDS,
    LANE,
    LIMIT,
    PACKED_COLOUR,
    fill,
    tint,
)
from furlong.report.scene import Scene

_MAX_OWNERS = 12
_SIZE = 8.5
_LINE, _SWATCH = 0.21, 0.24
_PER_LETTER = 0.064
"""Inches; a little more than DejaVu Sans takes on average."""


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    face: str = "none"
    hatch: str | None = None
    dashes: str = ""
    """The colour of a dashed line in the place of a filled swatch."""

    @property
    def width(self) -> float:
        return _SWATCH + 0.3 + len(self.text) * _PER_LETTER


class Legend:
    """The legend of one scene within `width` inches, from `left` on."""

    def __init__(self, scene: Scene, left: float, width: float) -> None:
        self._left = left
        self._lines = [*_flow(_shades(scene), width), *_flow(_owners(scene), width)]
        self.height = len(self._lines) * _LINE + 0.22
        """Inches, with the space below it."""

    def draw(self, figure: Figure, top: float) -> None:
        """Draw it below `top`, in inches from the bottom of the figure."""
        for number, line in enumerate(self._lines):
            x = self._left
            for entry in line:
                _draw_entry(figure, entry, x, top - (number + 0.5) * _LINE)
                x += entry.width


def _shades(scene: Scene) -> list[_Entry]:
    entries = [
        _Entry(KIND_WORDS[kind], fill(PACKED_COLOUR, kind), HATCHES.get(kind))
        for kind in scene.legend_kinds
    ]
    entries.append(_Entry("idle", LANE))
    if scene.has_host_memory:
        entries.append(_Entry("host memory", dashes=HOST))
    if scene.has_memory and any(rank.limit_bytes for rank in scene.ranks):
        entries.append(_Entry("limit of device memory", dashes=LIMIT))
    return entries


def _owners(scene: Scene) -> list[_Entry]:
    shown = scene.longest_owners(_MAX_OWNERS)
    entries = [_Entry(scene.owners[owner].name, scene.owners[owner].colour) for owner in shown]
    if more := len(scene.owners) - len(shown):
        entries.append(_Entry(f"and {more} shorter ones, in the same colours again"))
    return entries


def _flow(entries: Iterable[_Entry], width: float) -> list[list[_Entry]]:
    lines: list[list[_Entry]] = [[]]
    used = 0.0
    for entry in entries:
        if used + entry.width > width and lines[-1]:
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += entry.width
    return lines


def _draw_entry(figure: Figure, entry: _Entry, x: float, y: float) -> None:
    width, height = figure.get_size_inches()
    start = x if entry.face != "none" or entry.dashes else x - _SWATCH
    if entry.dashes:
        figure.add_artist(
            Line2D(
                [x / width, (x + _SWATCH) / width], [y / height] * 2, color=entry.dashes,
                linewidth=1.2, linestyle=(0, (5, 3)) if entry.dashes == LIMIT else "-",
            )
        )  # fmt: skip
    elif entry.face != "none":
        figure.add_artist(
            Rectangle(
                (x / width, (y - 0.065) / height), _SWATCH / width, 0.13 / height,
                facecolor=entry.face, edgecolor=tint(PACKED_COLOUR, 0.25), hatch=entry.hatch,
                linewidth=0.0 if not entry.hatch else 0.3,
            )
        )  # fmt: skip
    figure.text(
        (start + _SWATCH + 0.07) / width, y / height, entry.text, fontsize=_SIZE,
        color=INK if entry.face != "none" or entry.dashes else FAINT, va="center_baseline",
    )  # fmt: skip
