"""Timelines as files: pictures (PNG and SVG), and Chrome trace events for Perfetto.

Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) opens.

One process per rank; a thread per track, and one per peer for messages, since messages to two
neighbours overlap and a thread's slices may only nest. Arrows lead from a Send to its Recv.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError
from furlong.plan.plan import Recv, Send
from furlong.plan.text import format_chunk
from furlong.report.scene import KIND_WORDS, Bar, Panel, RankScene, Scene, choose_ranks, make_scenes

PICTURES = (".png", ".svg")


def save_timelines(panels: Sequence[Panel], path: str | Path, *, most_ranks: int = 16) -> str:
    """Draw one or several timelines into a file whose ending says how.

    `.png`, `.svg`: the panels one below the other on one time scale. `.json`: Chrome trace events
    of all ranks of the one panel. A picture has at most `most_ranks` ranks of each panel, unless
    that names some: returns the words for the choice in the first one, if any.
    Raises ConfigError for another ending.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json" and len(panels) == 1:
        save_trace(make_scenes(panels)[0], path)
        return ""
    if suffix not in PICTURES:
        raise ConfigError(
            given=f"{path.name} for {len(panels)} timelines",
            required=f"a name that ends in {', '.join(PICTURES)}; or one timeline and .json",
            source="the name of a picture or a trace",
            change="give the file another ending",
        )
    shown, notes = [], []
    for panel in panels:
        ranks, words = panel.ranks, ""
        if ranks is None:
            ranks, words = choose_ranks(panel.plan, panel.timeline, most_ranks)
        notes.append(words)
        note = "; ".join(filter(None, (panel.note, words)))
        shown.append(replace(panel, ranks=ranks, note=note))
    from furlong.report.picture import save_picture  # matplotlib loads slowly

    save_picture(make_scenes(shown), path)
    return notes[0]


_FIRST_PEER = 10
_PER_UNIT = 1e6
"""Trace events count microseconds."""


def save_trace(scene: Scene, path: Path) -> None:
    """Write one timeline; a unit of time that is no second is shown as one."""
    events = [event for rank in scene.ranks for event in _events(scene, rank)]
    other = {"title": scene.title, "lines": scene.lines, "time_unit": scene.panel.time_unit}
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def _events(scene: Scene, row: RankScene) -> Iterator[dict[str, Any]]:
    rank = {"pid": row.rank}
    yield _about("process_name", name=row.name.replace("\n", ", ")) | rank
    yield _about("process_sort_index", sort_index=row.rank) | rank
    threads: dict[int, str] = {}
    for bar in row.bars:
        thread, name = _thread(bar)
        threads[thread] = name
        at = rank | {"tid": thread, "ts": bar.record.start_s * _PER_UNIT}
        yield _slice(scene, bar) | at
        if bar.kind in ("activation", "gradient"):
            yield _arrow(bar, len(scene.panel.plan.chunks)) | at
    for thread, name in threads.items():
        yield _about("thread_name", name=name) | rank | {"tid": thread}
        yield _about("thread_sort_index", sort_index=thread) | rank | {"tid": thread}
    for where, steps in (("device", row.device), ("host", row.lower)):
        for time, used in zip(steps.times, steps.totals, strict=True):
            name = f"{where} memory (bytes)"
            yield {"ph": "C", "name": name, "ts": time * _PER_UNIT, "args": {"in use": used}} | rank


def _about(what: str, **args: str | int) -> dict[str, Any]:
    """A metadata event."""
    return {"ph": "M", "name": what, "args": args}


def _thread(bar: Bar) -> tuple[int, str]:
    action = bar.record.action
    if bar.track == "link" and isinstance(action, (Send, Recv)):
        receives = isinstance(action, Recv)
        way = "from" if receives else "to"
        return _FIRST_PEER + 2 * action.peer + receives, f"{way} rank {action.peer}"
    return {"compute": (0, "compute"), "copy": (1, "copy"), "link": (2, "collectives")}[bar.track]


def _slice(scene: Scene, bar: Bar) -> dict[str, Any]:
    record = bar.record
    args: dict[str, Any] = {"stage": record.action.stage}
    if bar.chunk >= 0:
        chunk = scene.panel.plan.chunks[bar.chunk]
        slices = format_chunk(chunk, scene.panel.plan.sp_size)
        args |= {"chunk": bar.chunk, "tokens": chunk.num_tokens, "slices": slices}
    args |= {"device_bytes": record.device_bytes, "host_bytes": record.host_bytes}
    what = {"ph": "X", "name": record.text, "cat": KIND_WORDS[bar.kind]}
    return what | {"dur": bar.seconds * _PER_UNIT, "args": args}


def _arrow(bar: Bar, num_chunks: int) -> dict[str, Any]:
    """One end of the arrow from a Send to its Recv; both lie in their slices."""
    end = "s" if isinstance(bar.record.action, Send) else "f"
    # a whole number: Perfetto reads a text as hexadecimal digits
    number = 2 * (bar.record.action.stage * num_chunks + bar.chunk) + (bar.kind == "gradient")
    return {"ph": end, "bp": "e", "id": number, "name": bar.kind, "cat": "message"}
