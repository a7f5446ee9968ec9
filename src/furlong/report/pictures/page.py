"""Scenes as one HTML file that needs nothing else: zoom, pan, a tooltip for each action."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from furlong.plan.text import format_chunk
from furlong.plan.values import ChunkPlan
from furlong.report.pictures.colours import PART_COLOURS
from furlong.report.pictures.legend import MEMORY_WORDS, legend
from furlong.report.pictures.memory import Steps
from furlong.report.pictures.scene import Bar, RankScene, Scene
from furlong.units import count_words


def save_page(scenes: Sequence[Scene], path: Path) -> None:
    """Write the scenes to one file, a tab for each if there are several."""
    assets = files("furlong.report") / "assets"
    data = json.dumps([_panel(scene) for scene in scenes], separators=(",", ":"))
    texts = {
        "title": html.escape(scenes[0].title),
        "style": (assets / "page.css").read_text("utf-8"),
        "script": "".join((assets / name).read_text("utf-8") for name in ("page.js", "control.js")),
        # HTML looks for tags and comments within a script too; in JSON "<" stands in strings alone
        "data": data.replace("<", "\\u003c"),
    }
    frame = (assets / "page.html").read_text("utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], frame)
    path.write_text(page, encoding="utf-8")


def _panel(scene: Scene) -> dict[str, Any]:
    plan = scene.panel.plan
    return {
        "name": scene.panel.title or "timeline",
        "title": scene.title,
        "lines": scene.lines,
        "unit": scene.panel.time_unit,
        "duration": scene.duration,
        "numStages": len(plan.stages),
        "highest": scene.highest_bytes,
        "tracks": ["compute", *scene.thin_tracks],
        "legend": [[asdict(entry) for entry in entries] for entries in legend([scene])],
        "parts": {
            part: (MEMORY_WORDS.get(part, part), PART_COLOURS[part]) for part in PART_COLOURS
        },
        "chunks": [
            {
                "words": _chunk_words(scene.panel.plan, chunk),
                "colour": look.colour,
                "of": look.sequence,
            }
            for chunk, look in enumerate(scene.chunks)
        ],
        "ranks": [_rank(rank, ["compute", *scene.thin_tracks]) for rank in scene.ranks],
    }


def _rank(rank: RankScene, tracks: Sequence[str]) -> dict[str, Any]:
    bars = {track: [_bar(bar) for bar in rank.bars if bar.track == track] for track in tracks}
    memory = {"device": _steps(rank.device), "lower": _steps(rank.lower)}
    return {"name": rank.name, "limit": rank.limit_bytes, "tracks": bars} | memory


def _steps(steps: Steps) -> dict[str, Any]:
    return {"times": steps.times, "parts": steps.parts, "peak": steps.peak}


def _bar(bar: Bar) -> tuple[Any, ...]:
    record = bar.record
    cell = bar.kind, bar.chunk, record.action.stage, bar.label
    return record.start_s, record.stop_s, *cell, record.text, record.device_bytes, record.host_bytes


def _chunk_words(plan: ChunkPlan, chunk: int) -> str:
    text = format_chunk(plan.chunks[chunk], plan.sp_size)
    shown = text if len(text) <= 120 else text[:120].rsplit(" ", 1)[0] + " ..."
    return f"{plan.kind(chunk)}, {count_words(plan.chunks[chunk].num_tokens, 'token')}: {shown}"
