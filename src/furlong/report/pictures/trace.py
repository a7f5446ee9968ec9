"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) opens.

One process per rank; a thread per track, and one per peer for messages, since messages to two
neighbours overlap and a thread's slices may only nest. Arrows lead from a Send to its Recv.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.plan.text import format_chunk
from furlong.plan.values import Recv, Send
from furlong.report.pictures.looks import KIND_WORDS
from furlong.report.pictures.scene import Bar, Panel, Scene, make_scene

_THREADS = {"compute": 0, "copy": 1, "collective": 2}
_FIRST_PEER = 10
_PER_UNIT = 1e6
"""Trace events count microseconds."""


def save_trace(panel: Panel, path: Path) -> None:
    """Write one timeline; a unit of time that is no second is shown as one."""
    scene = make_scene(panel)
    events = [event for rank in range(len(scene.ranks)) for event in _events(scene, rank)]
    other = {"title": scene.title, "batch": scene.batch, "time_unit": scene.time_unit}
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def _events(scene: Scene, rank: int) -> Iterator[dict[str, Any]]:
    row = scene.ranks[rank]
    yield _named("process_name", rank, 0, row.name.replace("\n", ", "))
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    threads: dict[int, str] = {}
    for bar in row.bars:
        thread, name = _thread(bar)
        threads[thread] = name
        yield _slice(scene, bar, rank, thread)
        if bar.kind in ("activation", "gradient"):
            yield _arrow(bar, rank, thread, len(scene.plan.chunks))
    for thread, name in threads.items():
        yield _named("thread_name", rank, thread, name)
        sort = {"sort_index": thread}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": sort}
    for curve, name, shown in (
        (row.device, "device memory (bytes)", scene.has_memory),
        (row.host, "host memory (bytes)", scene.has_host_memory),
    ):
        for time, used in curve if shown else ():
            args = {"in use": used}
            yield {"ph": "C", "name": name, "pid": rank, "ts": time * _PER_UNIT, "args": args}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _thread(bar: Bar) -> tuple[int, str]:
    if bar.track != "link":
        return _THREADS[bar.track], bar.track
    if bar.kind == "collective":
        return _THREADS["collective"], "collectives"
    action = bar.record.action
    assert isinstance(action, (Send, Recv))
    receives = isinstance(action, Recv)
    way = "from" if receives else "to"
    return _FIRST_PEER + 2 * action.peer + receives, f"{way} rank {action.peer}"


def _slice(scene: Scene, bar: Bar, rank: int, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": bar.stage}
    if bar.chunk >= 0:
        chunk = scene.plan.chunks[bar.chunk]
        slices = format_chunk(chunk, scene.plan.sp_size)
        args |= {"chunk": bar.chunk, "tokens": chunk.num_tokens, "slices": slices}
    args |= {"device_bytes": bar.record.device_bytes, "host_bytes": bar.record.host_bytes}
    return {
        "ph": "X",
        "name": bar.record.text,
        "cat": KIND_WORDS[bar.kind],
        "pid": rank,
        "tid": thread,
        "ts": bar.start * _PER_UNIT,
        "dur": (bar.stop - bar.start) * _PER_UNIT,
        "args": args,
    }


def _arrow(bar: Bar, rank: int, thread: int, num_chunks: int) -> dict[str, Any]:
    """One end of the arrow from a Send to its Recv; both lie in their slices."""
    sends = isinstance(bar.record.action, Send)
    return {
        "ph": "s" if sends else "f",
        "bp": "e",
        # a whole number: Perfetto reads a text as hexadecimal digits
        "id": 2 * (bar.stage * num_chunks + bar.chunk) + (bar.kind == "gradient"),
        "name": bar.kind,
        "cat": "message",
        "pid": rank,
        "tid": thread,
        "ts": bar.start * _PER_UNIT,
    }
