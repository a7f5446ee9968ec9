"""A timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) opens.

A trace has one process per rank; a thread per track, and one per peer for messages, since messages
to two neighbours overlap and a thread's slices may only nest. Arrows lead from a Send to its Recv.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.plan.plan import Recv, Send
from furlong.plan.text import format_chunk
from furlong.report.scene import KINDS, Bar, Panel, RankScene, Scene, make_scenes

_FIRST_PEER = 10
_PER_UNIT = 1e6
"""Trace events count microseconds."""


def save_trace(panel: Panel, path: Path) -> None:
    """Write the timeline with all its ranks."""
    (scene,) = make_scenes([panel])
    events = [event for rank in scene.ranks for event in _events(scene, rank)]
    other = {"title": scene.title, "lines": scene.lines}
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
        for time, used in zip(steps.times, steps.totals, strict=True) if steps.parts else ():
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
    what = {"ph": "X", "name": record.text, "cat": KINDS[bar.kind].words}
    return what | {"dur": bar.span[1] * _PER_UNIT, "args": args}


def _arrow(bar: Bar, num_chunks: int) -> dict[str, Any]:
    """One end of the arrow from a Send to its Recv; both lie in their slices."""
    end = "s" if isinstance(bar.record.action, Send) else "f"
    # a whole number: Perfetto reads a text as hexadecimal digits
    number = 2 * (bar.record.action.stage * num_chunks + bar.chunk) + (bar.kind == "gradient")
    return {"ph": end, "bp": "e", "id": number, "name": bar.kind, "cat": "message"}
