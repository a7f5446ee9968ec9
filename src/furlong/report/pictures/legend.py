"""The legend of a picture: shades first, then the colours of sequences, flowing over lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from furlong.report.pictures.looks import (
    COLOURS,
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
from furlong.report.pictures.scene import PACKED, Owner, Scene
from furlong.report.words import lower_words
from furlong.units import format_count

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
    """The legend of scenes, which agree on owners, within `width` inches, from `left` on."""

    def __init__(self, scenes: Sequence[Scene], left: float, width: float) -> None:
        self._left = left
        self._lines = [*_flow(_shades(scenes), width), *_flow(_owners(scenes), width)]
        self.height = len(self._lines) * _LINE + 0.22
        """Inches, with the space below it."""

    def draw(self, figure: Figure, top: float) -> None:
        """Draw it below `top`, in inches from the bottom of the figure."""
        for number, line in enumerate(self._lines):
            x = self._left
            for entry in line:
                _draw_entry(figure, entry, x, top - (number + 0.5) * _LINE)
                x += entry.width


def with_shared_owners(scenes: Sequence[Scene]) -> list[Scene]:
    """The scenes with one colour and one name per sequence, longest first, whichever runs it."""
    tokens: dict[int, int] = {}
    for scene in scenes:
        for key, owner in scene.owners.items():
            # what a method pads is not what the sequence has
            tokens[key] = min(tokens.get(key, owner.num_tokens), owner.num_tokens)
    packed = Owner("packed sequences", PACKED_COLOUR, tokens.pop(PACKED, 0))
    longest_first = sorted(tokens, key=lambda key: (-tokens[key], key))
    owners = {
        key: Owner(
            f"sequence {key}, {format_count(tokens[key])} tokens",
            COLOURS[place % len(COLOURS)],
            tokens[key],
        )
        for place, key in enumerate(longest_first)
    }
    owners[PACKED] = packed
    return [
        replace(scene, owners={key: owners[key] for key in owners if key in scene.owners})
        for scene in scenes
    ]


def _shades(scenes: Sequence[Scene]) -> list[_Entry]:
    kinds = {kind for scene in scenes for kind in scene.legend_kinds}
    entries = [
        _Entry(words, fill(PACKED_COLOUR, kind), HATCHES.get(kind))
        for kind, words in KIND_WORDS.items()
        if kind in kinds
    ]
    entries.append(_Entry("idle", LANE))
    lower = {lower_words(scene.plan.tiers) for scene in scenes if scene.has_host_memory}
    if lower:
        words = lower.pop() if len(lower) == 1 else "host and disk"
        entries.append(_Entry(f"{words} memory" if words == "host" else words, dashes=HOST))
    limited = [rank for scene in scenes if scene.has_memory for rank in scene.ranks]
    if any(rank.limit_bytes for rank in limited):
        entries.append(_Entry("limit of device memory", dashes=LIMIT))
    return entries


def _owners(scenes: Sequence[Scene]) -> list[_Entry]:
    owners = {key: owner for scene in scenes for key, owner in scene.owners.items()}
    by_tokens = sorted(owners, key=lambda key: -owners[key].num_tokens)
    some = set(by_tokens[:_MAX_OWNERS])
    shown = [owner for key, owner in owners.items() if key in some]
    entries = [_Entry(owner.name, owner.colour) for owner in shown]
    if more := len(owners) - len(shown):
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
