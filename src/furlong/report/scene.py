"""Scenes: timelines prepared for pictures and traces, as bars, memory over time, colours and words.

Each action becomes a bar on a track of its rank, in the colour of its chunk. Each sequence that is
cut into chunks has a hue. A chunk of whole sequences has a tone that differs from those of its
neighbours. The shade shows the kind of action. Colour-blind readers can tell the colours apart.

A trace (Chrome trace events, which Perfetto opens at ui.perfetto.dev) has one process per rank, and
in it one thread per track. Messages have a thread per peer and direction, because messages to two
neighbours may overlap, while slices of a thread may only nest. An arrow leads from a Send to its
Recv.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from furlong.cost.memory import PARTS, MemoryCurve
from furlong.plan.passes import computed_late
from furlong.plan.plan import (
    COMPUTING,
    MESSAGES,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Send,
)
from furlong.plan.text import format_chunk
from furlong.simulate.clock import SimulatedStep, measure
from furlong.timeline import Record, Timeline
from furlong.units import count_words, format_bytes, format_count, format_seconds, plural

_SHARE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "copies": "waiting for copies",
    "messages": "waiting for messages",
    "collectives": "gathering and reducing",
    "waiting": "idle",
}
"""Words for the keys of `SimulatedStep.shares()`."""
_USEFUL = ("forward", "backward")
"""Keys of the shares that are useful work."""
PART_WORDS = {"kv": "K,V", "kv_gradients": "dK,dV"}
"""Words for the parts of memory whose names in code do not read well."""


def is_alone(plan: ChunkPlan) -> bool:
    """Whether a plan is for one device."""
    return len(plan.actions) * plan.sp_size == 1


def figure_words(figures: SimulatedStep) -> str:
    """Return in words the shares of the ranks' time (forward, backward, idle and others)."""
    words = {_SHARE_WORDS[name]: share for name, share in figures.shares().items()}
    return share_words(words, "   ·   ")


def lost_shares(figures: SimulatedStep) -> dict[str, float]:
    """Return the shares of the ranks' time that are lost, since they are neither forwards nor
    backwards, by cause: {words: share}. They add up to the bubble ratio."""
    shares = figures.shares()
    return {_SHARE_WORDS[name]: shares[name] for name in shares if name not in _USEFUL}


def lost_words(figures: SimulatedStep) -> str:
    """Return the bubble ratio and its parts: `22.5%: recompute 20.8%, idle 1.7%`."""
    total = f"{figures.bubble_ratio:.1%}"
    return ": ".join(filter(None, (total, share_words(lost_shares(figures)))))


def share_words(shares: Mapping[str, float], between: str = ", ") -> str:
    """Return shares in words, without those that round to 0.0%."""
    return between.join(f"{word} {share:.1%}" for word, share in shares.items() if share >= 5e-4)


def choose_ranks(
    plan: ChunkPlan, timeline: Timeline, most: int = 16
) -> tuple[tuple[int, ...], str]:
    """Select at most `most` ranks to draw. If a replica has at most `most` ranks, take all ranks of
    the replicas whose computation ends last. If a replica has more ranks, take ranks evenly spread
    over the stages of the replica that ends last.

    Return the ranks, and a text that names the selection (empty if all ranks are shown).
    """
    num_ranks, size = len(plan.actions), ranks_per_replica(plan)
    if num_ranks <= most:
        return tuple(range(num_ranks)), ""
    ends_s = [0.0] * (num_ranks // size)
    for record in timeline.records:
        if record.lane == "compute":
            ends_s[record.rank // size] = max(ends_s[record.rank // size], record.stop_s)
    last = sorted(range(len(ends_s)), key=lambda replica: -ends_s[replica])[: max(1, most // size)]
    own = np.linspace(0, size - 1, min(size, most)).round().astype(int).tolist()
    shown = tuple(replica * size + rank for replica in sorted(last) for rank in own)
    words = f"shown: {len(shown)} of {num_ranks} ranks"
    if len(ends_s) > 1:
        words += f", of {len(last)} of {count_words(len(ends_s), 'replica')}: what ends last"
    return shown, words


def ranks_per_replica(plan: ChunkPlan) -> int:
    """Return the number of consecutive ranks that together hold the whole model."""
    again = (rank for rank, held in enumerate(plan.held) if rank and held == plan.held[0])
    return next(again, len(plan.held))


SEQUENCE_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a1fb3", "#5c3a1e",
)  # fmt: skip
"""Hues of cut sequences, the longest first, in a cycle (after Okabe and Ito)."""
PACKED_COLOURS = ("#2b4256", "#cfc08a", "#8780cc", "#86793f")
"""Tones of the chunks of whole sequences."""
DARKEST = 0.35
"""Share of black in the first chunk of a cut sequence; the last chunk has none."""
GREY = "#7b8798"
INK, FAINT, LINE, LIMIT = "#1d2530", "#667080", "#c3c9d3", "#c8372d"
LANE = "#eef0f4"
"""Background of a rank's row, visible where the rank is idle."""
PART_COLOURS = {
    "weights": "#55606f",
    "gradients": "#8d96a3",
    "optimizer": "#b9c0c9",
    "buffers": "#e3e6ea",
    "kv": "#101858",
    "kv_gradients": "#b8f0b0",
    "states": "#4a0505",
    "activations": "#f47a7a",
    "logits": "#f6ee5a",
    "in use": "#a8a0c8",
    "cpu": "#8a1f7a",
    "disk": "#d9a8d0",
    "cpu and disk": "#8a1f7a",
}
"""Colours of the parts of memory, from the bottom of a stack to its top; `in use` is the total, for
timelines that do not know the parts."""
_LOWER = ("cpu", "disk", "cpu and disk")

SpanKind = Literal[
    "forward", "recompute", "rebuild", "backward", "activation", "gradient", "collective", "copy"
]
SpanTrack = Literal["compute", "link", "copy"]


class KindLook(NamedTuple):
    """How a picture draws the bars of one kind of action."""

    words: str
    track: SpanTrack
    letter: str = ""
    colour: str = ""
    """Colour of the kind; empty: the colour of the chunk."""
    white: float = 0.0
    """Share of white mixed into the chunk's colour."""
    hatch: str | None = None


LOOKS: dict[SpanKind, KindLook] = {
    "forward": KindLook("forward", "compute", "F", white=0.5),
    "recompute": KindLook("recompute", "compute", "R", white=0.82, hatch="//////"),
    "rebuild": KindLook("rebuild K,V", "compute", "K", white=0.82, hatch="......"),
    "backward": KindLook("backward", "compute", "B"),
    "activation": KindLook("activation message", "link", colour="#2b3442"),
    "gradient": KindLook("gradient message", "link", colour="#9aa51a"),
    "collective": KindLook("gathering and reducing", "link", colour="#b0752b"),
    "copy": KindLook("copies of offloaded tensors", "copy", colour=PART_COLOURS["cpu"]),
}
"""The kinds in the order of a legend."""


def fill(colour: str, kind: SpanKind) -> str:
    """Return the colour of a bar: light for a forward, full for a backward, almost white for a
    recompute (which is also hatched); messages ignore `colour`."""
    return LOOKS[kind].colour or tint(colour, LOOKS[kind].white)


def tint(colour: str, share: float) -> str:
    """Mix `colour` (#rrggbb) with a share of white or, if `share` is negative, of black."""
    to = 255 if share > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * abs(share)):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """Return the colour of letters, white or dark, that is readable on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline with its plan, and the texts and limits of a picture of it."""

    timeline: Timeline
    plan: ChunkPlan
    title: str = ""
    note: str = ""
    """A line under the title."""
    limit_bytes: int = 0
    """Device budget of each rank; 0 if unknown."""
    memory: tuple[MemoryCurve, ...] = ()
    """Predicted bytes of each rank by part; empty: only the timeline's totals are known."""


class Bar(NamedTuple):
    """A bar of a picture: a record of the timeline with its kind, label and colour."""

    kind: SpanKind
    label: str
    """Letter of the kind and the cell; empty for kinds without a letter."""
    colour: str
    record: Record

    @property
    def span(self) -> tuple[float, float]:
        """Start and duration of the bar, in seconds."""
        return self.record.start_s, self.record.stop_s - self.record.start_s


@dataclass(frozen=True, slots=True)
class RankScene:
    """The picture of one rank: bars, and memory over time."""

    rank: int
    name: str
    bars: tuple[Bar, ...]
    """Bars in the order of their starts."""
    times: tuple[float, ...]
    device: dict[str, tuple[int, ...]]
    """Part -> bytes on the device from each of `times` to the next."""
    lower: dict[str, tuple[int, ...]]
    """Memory (CPU, disk) -> bytes from each of `times` to the next."""

    def on(self, track: SpanTrack) -> list[Bar]:
        """Return the bars of one track."""
        return [bar for bar in self.bars if LOOKS[bar.kind].track == track]


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything drawn for one panel. Its title and lines describe all ranks, also those not
    drawn."""

    panel: Panel
    title: str
    """Name of the plan, bubble ratio, step time and peak memory."""
    lines: tuple[str, ...]
    """Lines under the title: note, batch, shares of the ranks' time."""
    duration_s: float
    ranks: tuple[RankScene, ...]
    shown: str
    """Words for the selection of ranks; empty if all are shown."""


def make_scene(panel: Panel, most_ranks: int = sys.maxsize) -> Scene:
    """Return the scene of a panel, in which at most `most_ranks` ranks are drawn."""
    plan, figures = panel.plan, measure(panel.timeline, panel.plan)
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for record in sorted(panel.timeline.records, key=lambda record: record.start_s):
        by_rank[record.rank].append(record)
    ranks, shown = choose_ranks(plan, panel.timeline, most_ranks)
    peak = max(figures.peak_device_bytes, default=0)
    title = (
        panel.title,
        f"lost {lost_words(figures)}" if figures.bubble_ratio >= 5e-4 else "",
        f"step {format_seconds(figures.duration_s)}",
        f"peak {format_bytes(peak)}" if peak else "",
    )
    several = "a rank's memory is that of the device that needs most" if plan.sp_size > 1 else ""
    note = "; ".join(filter(None, (panel.note, shown)))
    lines = note, _batch_words(plan), figure_words(figures), several
    late, colours = computed_late(plan), chunk_colours(plan)
    return Scene(
        panel=panel,
        title="   ·   ".join(filter(None, title)),
        lines=tuple(filter(None, lines)),
        duration_s=figures.duration_s,
        ranks=tuple(_rank(panel, rank, by_rank[rank], late, colours) for rank in ranks),
        shown=shown,
    )


def _batch_words(plan: ChunkPlan) -> str:
    """Return in words how many sequences, tokens, chunks, stages and ranks a plan has."""
    dummies, num_tokens = sum(chunk.is_dummy for chunk in plan.chunks), sum(plan.seq_lens)
    more = f" and {count_words(dummies, 'dummy chunk')}" if dummies else ""
    ranks = "" if is_alone(plan) else f", {count_words(len(plan.actions), 'rank')}"
    return (
        f"{count_words(len(plan.seq_lens), 'sequence')},"
        f" {format_count(num_tokens)} {plural(num_tokens, 'token')},"
        f" {count_words(len(plan.chunks) - dummies, 'chunk')}{more},"
        f" {count_words(len(plan.stages), 'stage')}{ranks}"
    )


def _rank(
    panel: Panel,
    rank: int,
    records: Sequence[Record],
    late: Collection[tuple[int, int]],
    colours: Mapping[int, str],
) -> RankScene:
    """Return the bars and the memory of one rank. `late`: (chunk, stage) of each forward that
    computes nothing. Its recompute is the first computation, so the recompute is drawn as a
    forward."""
    plan = panel.plan
    stages = sorted({r.action.stage for r in records if not isinstance(r.action, MESSAGES)})
    names = ["device" if is_alone(plan) else f"rank {rank}"]
    if len(plan.stages) > 1 and stages:
        one = len(stages) == 1
        names.append(f"stage {stages[0]}" if one else f"stages {stages[0]}-{stages[-1]}")
    if plan.sp_size > 1:
        names.append(count_words(plan.sp_size, "device"))
    bars = []
    for record in records:
        kind, action = _kind(record), record.action
        if kind == "recompute" and (getattr(action, "chunk", -1), action.stage) in late:
            kind = "forward"
        label = LOOKS[kind].letter
        if isinstance(action, COMPUTING) and label:
            label += f"{action.chunk}.{action.stage}" if len(stages) > 1 else f"{action.chunk}"
        colour = colours.get(getattr(action, "chunk", -1), GREY)
        bars.append(Bar(kind, label, fill(colour, kind), record))
    curve = panel.memory[rank] if panel.memory else None
    memory = memory_steps(records, plan.actions[rank], curve)
    return RankScene(rank, "\n".join(names), tuple(bars), *memory)


def _kind(record: Record) -> SpanKind:
    if record.lane == "copy":
        return "copy"
    if isinstance(record.action, MESSAGES):
        return record.action.payload
    kinds: dict[type[Action], SpanKind] = {
        Forward: "forward", Recompute: "recompute", RebuildKV: "rebuild", Backward: "backward",
    }  # fmt: skip
    return kinds.get(type(record.action), "collective")


Steps = dict[str, tuple[int, ...]]


def memory_steps(
    records: Sequence[Record], actions: Sequence[Action], curve: MemoryCurve | None
) -> tuple[tuple[float, ...], Steps, Steps]:
    """Return (times, device memory, other memory) of one rank. Each memory is {part: bytes}, with
    the bytes from each time to the next. Other memory is CPU memory and disk.

    The bytes of an action last until the next action starts. `curve`: predicted bytes of these
    actions, by part; None: only the totals in the records are used.
    """
    # a Send, an Unshard or a copy overlaps later actions, so its record says nothing about memory
    settled = [
        r for r in records
        if r.lane == "compute"
        or (r.lane == "link" and isinstance(r.action, (Recv, Reduce)))
    ]  # fmt: skip
    if not settled:
        return (), {}, {}
    if curve is None:
        names: tuple[str, ...] = ("in use", "cpu and disk")
        used = np.array([(r.device_bytes, r.offloaded_bytes) for r in settled])
    else:
        names = (*PARTS, "cpu", "disk")
        counted = np.column_stack([curve.device, curve.cpu, curve.disk])
        places = {action: place for place, action in enumerate(actions)}
        used = counted[[places[r.action] for r in settled]]  # (records, parts and memories)
    rows = {0.0: used[0]}  # of several records with one start the last counts
    rows |= zip((r.start_s for r in settled), used, strict=True)
    columns = dict(zip(names, np.array([*rows.values()]).T.tolist(), strict=True))
    shown = {name: tuple(columns[name]) for name in PART_COLOURS if any(columns.get(name, ()))}
    lower = {name: shown.pop(name) for name in _LOWER if name in shown}
    return tuple(rows), shown, lower


def cut_sequences(plan: ChunkPlan) -> dict[int, str]:
    """Return {seq_id: colour} of the sequences that are cut into several chunks, the longest first.
    Colours are assigned to whole sequences, too, so a sequence has one colour in all plans of its
    batch."""
    ordered = sorted(range(len(plan.seq_lens)), key=lambda seq_id: (-plan.seq_lens[seq_id], seq_id))
    colours = zip(ordered, cycle(SEQUENCE_COLOURS), strict=False)
    return {seq_id: colour for seq_id, colour in colours if seq_id in plan.groups}


def chunk_colours(plan: ChunkPlan) -> dict[int, str]:
    """Return the colour of each chunk. The chunks of a cut sequence go from dark to light. Chunks
    of whole sequences take turns with four tones, in the order in which their rank runs them."""
    hues, colours = cut_sequences(plan), dict[int, str]()
    for chunk, links in enumerate(plan.links):
        if links:
            seq_id, position = links[0]
            left = 1 - position / (len(plan.groups[seq_id]) - 1)
            colours[chunk] = tint(hues[seq_id], -DARKEST * left)
    for actions in plan.actions:
        own = dict.fromkeys(action.chunk for action in actions if isinstance(action, Forward))
        whole = [chunk for chunk in own if chunk not in colours]
        colours |= zip(whole, cycle(PACKED_COLOURS), strict=False)
    return colours


_FIRST_PEER = 10
_PER_UNIT = 1e6
"""Microseconds per second: trace events use microseconds."""


def save_trace(panel: Panel, path: Path) -> None:
    """Write the timeline of all ranks as a Chrome trace."""
    scene = make_scene(panel)
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
    for where, parts in (("device", row.device), ("CPU", row.lower)):
        for time, *used in zip(row.times, *parts.values(), strict=True) if parts else ():
            event = {"ph": "C", "name": f"{where} memory (bytes)", "ts": time * _PER_UNIT}
            yield event | {"args": {"in use": sum(used)}} | rank


def _about(what: str, **args: str | int) -> dict[str, Any]:
    """Return a metadata event of a Chrome trace."""
    return {"ph": "M", "name": what, "args": args}


def _thread(bar: Bar) -> tuple[int, str]:
    action, track = bar.record.action, LOOKS[bar.kind].track
    if track == "link" and isinstance(action, (Send, Recv)):
        receives = isinstance(action, Recv)
        way = "from" if receives else "to"
        return _FIRST_PEER + 2 * action.peer + receives, f"{way} rank {action.peer}"
    return {"compute": (0, "compute"), "copy": (1, "copy"), "link": (2, "collectives")}[track]


def _slice(scene: Scene, bar: Bar) -> dict[str, Any]:
    record = bar.record
    args: dict[str, Any] = {"stage": record.action.stage}
    if (number := getattr(record.action, "chunk", None)) is not None:
        chunk = scene.panel.plan.chunks[number]
        slices = format_chunk(chunk, scene.panel.plan.sp_size)
        args |= {"chunk": number, "tokens": chunk.num_tokens, "slices": slices}
    args |= {"device_bytes": record.device_bytes, "offloaded_bytes": record.offloaded_bytes}
    what = {"ph": "X", "name": record.text, "cat": LOOKS[bar.kind].words}
    return what | {"dur": bar.span[1] * _PER_UNIT, "args": args}


def _arrow(bar: Bar, num_chunks: int) -> dict[str, Any]:
    """Return the trace event of one end of the arrow from a Send to its Recv. `bar`: the bar of the
    Send or the Recv."""
    action = bar.record.action
    assert isinstance(action, MESSAGES)
    end = "s" if isinstance(action, Send) else "f"
    # an integer, since Perfetto reads a string as hexadecimal digits
    number = 2 * (action.stage * num_chunks + action.chunk) + (bar.kind == "gradient")
    return {"ph": end, "bp": "e", "id": number, "name": bar.kind, "cat": "message"}
