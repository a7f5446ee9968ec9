"""Timelines as one HTML file that needs nothing else: zoom, pan, a tooltip per action."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from furlong.plan.text import format_chunk
from furlong.plan.values import ChunkPlan
from furlong.report.pictures.looks import KIND_WORDS, NOBODY_COLOUR
from furlong.report.pictures.scene import NOBODY, Bar, RankScene, Scene

_MAX_OWNERS = 16
_TRACKS = {"link": ("activation", "gradient", "collective"), "copy": ("copy",)}


def save_page(scenes: Sequence[Scene], path: Path) -> None:
    """Write the scenes to one file, a tab for each if there are several."""
    parts = files("furlong.report") / "assets"
    data = json.dumps([_panel(scene) for scene in scenes], separators=(",", ":"))
    texts = {
        "title": html.escape(scenes[0].title),
        "style": (parts / "page.css").read_text("utf-8"),
        "script": "".join((parts / name).read_text("utf-8") for name in ("page.js", "control.js")),
        # HTML looks for tags and comments within a script too; in JSON "<" stands in strings alone
        "data": data.replace("<", "\\u003c"),
    }
    frame = (parts / "page.html").read_text("utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], frame)
    path.write_text(page, encoding="utf-8")


def _panel(scene: Scene) -> dict[str, Any]:
    shown = scene.longest_owners(_MAX_OWNERS)
    more = len(scene.owners) - len(shown)
    figures = scene.figures
    highest = max([*figures.peak_device_bytes, *figures.peak_host_bytes], default=0)
    limits = [rank.limit_bytes or 0 for rank in scene.ranks]
    owners = {key: {"name": o.name, "colour": o.colour} for key, o in scene.owners.items()}
    return {
        "name": scene.name,
        "title": scene.title,
        "batch": scene.batch + (f"; {scene.note}" if scene.note else ""),
        "shares": scene.shares,
        "unit": scene.time_unit,
        "duration": scene.duration,
        "numStages": len(scene.plan.stages),
        "labelsStages": scene.labels_stages,
        "highest": 1.1 * max([highest, *limits]) if scene.has_memory else 0,
        "hasHost": scene.has_host_memory,
        "tracks": ["compute", *(t for t, own in _TRACKS.items() if scene.timed_kinds & set(own))],
        "kinds": [(kind, KIND_WORDS[kind]) for kind in scene.legend_kinds],
        "owners": owners | {NOBODY: {"name": "", "colour": NOBODY_COLOUR}},
        "shownOwners": shown,
        "moreOwners": f"and {more} shorter ones, in the same colours again" if more else "",
        "chunks": [_chunk_words(scene.plan, chunk) for chunk in range(len(scene.plan.chunks))],
        "ranks": [
            _rank(rank, figures.peak_device_bytes[rank.rank], figures.peak_host_bytes[rank.rank])
            for rank in scene.ranks
        ],
    }


def _rank(rank: RankScene, peak: int, host_peak: int) -> dict[str, Any]:
    tracks: dict[str, list[Any]] = {}
    for bar in rank.bars:
        tracks.setdefault(bar.track, []).append(_bar(bar))
    return {
        "name": rank.name,
        "limit": rank.limit_bytes,
        "peak": peak,
        "hostPeak": host_peak,
        "device": rank.device,
        "host": rank.host,
        "tracks": tracks,
    }


def _bar(bar: Bar) -> tuple[Any, ...]:
    record = bar.record
    cell = bar.kind, bar.chunk, bar.stage, bar.owner
    return bar.start, bar.stop, *cell, record.text, record.device_bytes, record.host_bytes


def _chunk_words(plan: ChunkPlan, chunk: int) -> str:
    text = format_chunk(plan.chunks[chunk], plan.sp_size)
    shown = text if len(text) <= 120 else text[:120].rsplit(" ", 1)[0] + " ..."
    return f"{plan.kind(chunk)}, {plan.chunks[chunk].num_tokens:,} tokens: {shown}"
