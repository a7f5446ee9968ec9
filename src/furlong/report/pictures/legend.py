"""The entries of a legend, for both ways of drawing one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from furlong.report.pictures.colours import (
    DARKEST,
    GREY,
    KIND_WORDS,
    LANE,
    LIMIT,
    PACKED_COLOURS,
    PART_COLOURS,
    Kind,
    hue,
    tint,
)
from furlong.report.pictures.scene import Scene
from furlong.report.words import PART_WORDS, is_alone
from furlong.units import format_count, plural

MOST_SEQUENCES = 8
MEMORY_WORDS = PART_WORDS | {
    "in use": "device memory: only predictions know its parts",
    "host": "host memory",
    "disk": "disk",
}
"""The parts of memory that are not called what they are in code."""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One thing that a picture shows, and its look."""

    text: str
    colours: tuple[str, ...] = ()
    """The colours that stand for it, side by side; none where the text stands alone."""
    kind: Kind | None = None
    """A kind of action, by whose shade and hatch the colours are changed."""
    dashed: bool = False
    chunks: tuple[int, ...] = ()
    """The chunks that have these colours, where there is one scene."""


def legend(scenes: Sequence[Scene]) -> list[list[LegendEntry]]:
    """The actions, the chunks and the memory of the scenes of one picture."""
    bars = (bar for scene in scenes for rank in scene.ranks for bar in rank.bars)
    kinds = {bar.kind for bar in bars if bar.seconds > 0}
    actions = [
        LegendEntry(words, (GREY,), kind) for kind, words in KIND_WORDS.items() if kind in kinds
    ]
    if all(is_alone(scene.panel.plan) for scene in scenes):
        actions = [replace(one, text="adding gradients up") if one.kind == "collective" else one
                   for one in actions]  # fmt: skip
    return [
        [*actions, LegendEntry("idle", (LANE,))],
        _chunk_entries(scenes),
        _memory_entries(scenes),
    ]


def _chunk_entries(scenes: Sequence[Scene]) -> list[LegendEntry]:
    chunks_of: dict[int | None, list[int]] = {}
    for scene in scenes:
        for chunk in sorted({bar.chunk for rank in scene.ranks for bar in rank.on("compute")}):
            chunks_of.setdefault(scene.chunks[chunk].sequence, []).append(chunk)
    entries: list[LegendEntry] = []
    if None in chunks_of:
        words = "whole sequences (two shades, to tell neighbouring chunks apart)"
        entries.append(LegendEntry(words, PACKED_COLOURS, chunks=tuple(chunks_of[None])))
    cut = scenes[0].cut  # all scenes of a picture agree on it
    shown = [(place, seq_id) for place, seq_id in enumerate(cut) if seq_id in chunks_of]
    for place, seq_id in shown[:MOST_SEQUENCES]:
        shades = tuple(tint(hue(place), -DARKEST * left) for left in (1, 0.5, 0))
        words = f"sequence {seq_id}, {format_count(cut[seq_id])} {plural(cut[seq_id], 'token')}"
        entries.append(LegendEntry(words, shades, chunks=tuple(chunks_of[seq_id])))
    if shown:
        more = len(shown) - MOST_SEQUENCES
        again = f"; {more} shorter ones in the same colours again" if more > 0 else ""
        entries.append(LegendEntry(f"(cut, from dark to light along its chunks{again})"))
    return entries


def _memory_entries(scenes: Sequence[Scene]) -> list[LegendEntry]:
    ranks = [rank for scene in scenes for rank in scene.ranks]
    parts = {part for rank in ranks for part in (*rank.device.parts, *rank.lower.parts)}
    entries = [
        LegendEntry(MEMORY_WORDS.get(part, part), (colour,))
        for part, colour in PART_COLOURS.items() if part in parts
    ]  # fmt: skip
    if any(rank.limit_bytes and rank.device.parts for rank in ranks):
        entries.append(LegendEntry("limit of device memory", (LIMIT,), dashed=True))
    return entries
