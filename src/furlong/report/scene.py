"""Timelines made ready to be drawn or traced: bars, memory over time, colours, words.

Every action becomes a bar on a track of its rank, with the colour of its chunk: a hue for every cut
sequence, a tone for every chunk of whole sequences that differs from its neighbours'. The shade
tells the kind of action. The colours of a group differ for the colour-blind too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from furlong.cost.memory import PARTS, MemoryCurve
from furlong.plan.passes import computed_late
from furlong.plan.plan import (
    COMPUTING,
    MESSAGES,
    ON_PARAMETERS,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
)
from furlong.simulate.clock import StepFigures, measure
from furlong.timeline import Record, Timeline
from furlong.units import count_words, format_bytes, format_count, format_seconds, plural

SHARE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "copies": "waiting for copies",
    "messages": "waiting for messages",
    "collectives": "waiting for collectives",
    "waiting": "idle",
}
"""Words for the names of StepFigures.shares()."""
ALONE_WORDS = SHARE_WORDS | {"collectives": "adding gradients up"}
"""Words for the same on one device."""
PART_WORDS = {"kv": "K,V", "kv_gradients": "dK,dV"}
"""The parts of memory that are not called what they are in code."""


def is_alone(plan: ChunkPlan) -> bool:
    """Whether a plan is of one device."""
    return len(plan.actions) * plan.sp_size == 1


def format_time(value: float, unit: str) -> str:
    """A time of a timeline in its unit."""
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.0f} {unit}" if value >= 10_000 else f"{value:.4g} {unit}"


def share_words(figures: StepFigures, *, alone: bool) -> str:
    """The shares of the ranks' time, in words."""
    words, shares = ALONE_WORDS if alone else SHARE_WORDS, figures.shares()
    return "   ·   ".join(f"{words[n]} {share:.1%}" for n, share in shares.items() if share >= 5e-4)


def title_words(panel: Panel, figures: StepFigures) -> str:
    """The name of a plan, its bubble ratio, time and peak memory. One device waits for no other."""
    peak = max(figures.peak_device_bytes, default=0)
    parts = (
        panel.title,
        "" if is_alone(panel.plan) else f"bubble {figures.bubble_ratio:.1%}",
        f"step {format_time(figures.duration_s, panel.time_unit)}",
        f"peak {format_bytes(peak)}" if peak else "",
    )
    return "   ·   ".join(filter(None, parts))


def batch_words(plan: ChunkPlan) -> str:
    """The size of a plan's batch and of its grid."""
    dummies, num_tokens = sum(chunk.is_dummy for chunk in plan.chunks), sum(plan.seq_lens)
    more = f" and {count_words(dummies, 'dummy chunk')}" if dummies else ""
    ranks = "" if is_alone(plan) else f", {count_words(len(plan.actions), 'rank')}"
    return (
        f"{count_words(len(plan.seq_lens), 'sequence')},"
        f" {format_count(num_tokens)} {plural(num_tokens, 'token')},"
        f" {count_words(len(plan.chunks) - dummies, 'chunk')}{more},"
        f" {count_words(len(plan.stages), 'stage')}{ranks}"
    )


def choose_ranks(
    plan: ChunkPlan, timeline: Timeline, most: int = 16
) -> tuple[tuple[int, ...], str]:
    """All ranks, or at most `most`: whole replicas, those whose cells end last; of one replica
    that is too long itself, ranks spread over its stages. And the words for the choice, empty where
    all ranks are shown."""
    num_ranks = len(plan.actions)
    if num_ranks <= most:
        return tuple(range(num_ranks)), ""
    size = ranks_per_replica(plan)
    ends = [0.0] * (num_ranks // size)
    for record in timeline.records:
        if record.lane == "compute":
            replica = record.rank // size
            ends[replica] = max(ends[replica], record.stop_s)
    slowest = sorted(range(len(ends)), key=lambda replica: -ends[replica])
    chosen = slowest[: max(1, most // size)]
    gap = max(1.0, (size - 1) / max(most - 1, 1))
    own = [round(i * gap) for i in range(min(size, most))]
    shown = tuple(replica * size + rank for replica in sorted(chosen) for rank in own)
    words = f"shown: {len(shown)} of {num_ranks} ranks"
    if len(ends) > 1:
        alone = f"replica {chosen[0]}, which of {len(ends)} ends last"
        several = f"the {len(chosen)} replicas of {len(ends)} that end last"
        words += f", of {alone if len(chosen) == 1 else several}"
    return shown, words


def ranks_per_replica(plan: ChunkPlan) -> int:
    """The number of consecutive ranks that hold the whole model."""
    stages = held_stages(plan)
    again = (rank for rank in range(1, len(stages)) if stages[rank] == stages[0])
    return next(again, len(stages))


def held_stages(plan: ChunkPlan) -> list[tuple[int, ...]]:
    """The stages of each rank, in their order."""
    return [
        tuple(sorted({action.stage for action in actions if isinstance(action, Forward)}))
        for actions in plan.actions
    ]


Kind = Literal[
    "forward", "recompute", "rebuild", "backward", "activation", "gradient", "collective", "copy"
]

SEQUENCE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Hues of cut sequences, the longest first; they repeat when there are more (after Okabe, Ito)."""
PACKED_COLOURS = ("#2b4256", "#cfc08a", "#8780cc", "#86793f")
"""Tones of the chunks that hold whole sequences."""
DARKEST = 0.35
"""How much black the first chunk of a cut sequence has; the last one has none."""
GREY = "#7b8798"

INK, FAINT, LINE, LIMIT = "#1d2530", "#667080", "#c3c9d3", "#c8372d"
LANE = "#eef0f4"
"""The ground on which a rank's actions stand: what stays free of them is idle."""

PART_COLOURS = {
    "weights": "#55606f",
    "gradients": "#8d96a3",
    "optimizer": "#b9c0c9",
    "buffers": "#e3e6ea",
    "kv": "#2f6fb0",
    "kv_gradients": "#9cc3e6",
    "states": "#882e10",
    "activations": "#e08a2e",
    "logits": "#f2d64b",
    "in use": "#9db6d3",
    "host": "#8a6fb0",
    "host and disk": "#8a6fb0",
    "disk": "#c9b6de",
}
"""Fills of the parts of memory, from the bottom of a stack to its top; `in use` is the total, where
nothing more is known."""

MESSAGE_COLOURS: dict[Kind, str] = {
    "activation": "#2b3442",
    "gradient": "#8a93a3",
    "collective": "#b0752b",
    "copy": PART_COLOURS["host"],
}
KIND_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "recompute": "recompute",
    "rebuild": "rebuild K,V",
    "backward": "backward",
    "activation": "activation message",
    "gradient": "gradient message",
    "collective": "collectives",
    "copy": "copies between tiers",
}
"""The kinds in the order of a legend."""
LIGHTER: dict[Kind, float] = {"forward": 0.5, "recompute": 0.82, "rebuild": 0.82}
HATCHES: dict[Kind, str] = {"recompute": "//////", "rebuild": "......"}


def fill(colour: str, kind: Kind) -> str:
    """The shade of a kind: a forward is light, a backward full, a second computation almost white
    (and hatched); messages have colours of their own."""
    return MESSAGE_COLOURS.get(kind) or tint(colour, LIGHTER.get(kind, 0.0))


def tint(colour: str, share: float) -> str:
    """`colour` (#rrggbb) mixed with that share of white; a negative share is one of black."""
    to = 255 if share > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * abs(share)):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """White or dark letters, whichever can be read on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK


class ChunkLook(NamedTuple):
    """The colour of a chunk, and the sequence that is cut, in this plan or in another of the
    picture, and that it holds a piece of; None where there is none."""

    colour: str
    sequence: int | None


def _cut_sequences(plans: Iterable[ChunkPlan]) -> dict[int, int]:
    """The tokens of each sequence that some plan cuts, the longest first."""
    tokens: dict[int, int] = {}
    for plan in plans:
        for seq_id in plan.groups:
            # a method's padding is not the sequence's
            tokens[seq_id] = min(tokens.get(seq_id, plan.seq_lens[seq_id]), plan.seq_lens[seq_id])
    return dict(sorted(tokens.items(), key=lambda item: (-item[1], item[0])))


def hue(place: int) -> str:
    """The colour of the cut sequence at a place of `Scene.cut`."""
    return SEQUENCE_COLOURS[place % len(SEQUENCE_COLOURS)]


def _colour_chunks(
    plan: ChunkPlan, timeline: Timeline, cut: Mapping[int, int]
) -> tuple[ChunkLook, ...]:
    hues = {seq_id: hue(place) for place, seq_id in enumerate(cut)}
    tones = _tones(timeline)
    looks: list[ChunkLook] = []
    for chunk, links in enumerate(plan.links):
        slices = plan.chunks[chunk].slices
        if links:
            seq_id, position = links[0]
            left = 1 - _done(plan, seq_id, position)
            looks.append(ChunkLook(tint(hues[seq_id], -DARKEST * left), seq_id))
        elif len(slices) == 1 and slices[0].seq_id in hues:
            looks.append(ChunkLook(hues[slices[0].seq_id], slices[0].seq_id))
        else:
            looks.append(ChunkLook(PACKED_COLOURS[tones.get(chunk, 0)], None))
    return tuple(looks)


def _done(plan: ChunkPlan, seq_id: int, position: int) -> float:
    """Share of a cut sequence's chunks before one, where it branches of those on its longest
    path: branches that are equally far from the start look alike."""
    tree = plan.trees.get(seq_id)
    if tree is None:
        return position / (len(plan.groups[seq_id]) - 1)
    return len(tree.path(position)) / max(len(tree.path(n)) for n in range(len(tree.parents)))


def _tones(timeline: Timeline) -> dict[int, int]:
    """A tone for each chunk, in turn, unless a neighbour has it already in the order in which a
    rank runs cells of one kind."""
    runs: dict[tuple[int, type], list[int]] = defaultdict(list)
    for record in sorted(timeline.records, key=lambda record: record.start_s):
        action = record.action
        if record.lane == "compute" and isinstance(action, COMPUTING):
            runs[record.rank, type(action)].append(action.chunk)
    near: dict[int, set[int]] = defaultdict(set)
    for run in runs.values():
        for one, other in pairwise(run):
            near[one].add(other)
            near[other].add(one)
    tones: dict[int, int] = {}
    for chunk in dict.fromkeys(chunk for run in runs.values() for chunk in run):
        taken = Counter(tones[other] for other in near[chunk] - {chunk} if other in tones)
        in_turn = [(len(tones) + i) % len(PACKED_COLOURS) for i in range(len(PACKED_COLOURS))]
        tones[chunk] = min(in_turn, key=taken.__getitem__)
    return tones


@dataclass(frozen=True, slots=True)
class Steps:
    """Bytes by part, from each of `times` to the next; both are empty where none are in use."""

    times: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]
    """The parts from the bottom of a stack to its top, each with a number for each time."""

    @property
    def totals(self) -> list[int]:
        return [sum(row) for row in zip(*self.parts.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.totals, default=0)


def memory_steps(
    records: Sequence[Record], actions: Sequence[Action], lower: str, curve: MemoryCurve | None
) -> tuple[Steps, Steps]:
    """The memory of one rank, on its device and below it, from the records of its `actions`.

    `curve`: what the cost model counts for these actions, by parts. Without it only the totals are
    known, and `lower` names the tiers below the device.
    """
    # what is still on its way when the rank goes on says nothing about the rank's memory
    settled = [r for r in records if r.lane == "compute" or _waits(r)]
    settled.sort(key=lambda record: record.start_s)
    times = [record.start_s for record in settled]
    if curve is None:
        device = {"in use": [record.device_bytes for record in settled]}
        return _steps(times, device), _steps(times, {lower: [r.host_bytes for r in settled]})
    places = _places(settled, actions)
    moments = [*zip(times, places, places, strict=True)]
    for (one, place), (other, behind) in pairwise(zip(settled, places, strict=True)):
        if one.stop_s < other.start_s:  # idle: what either had at work for itself is not there
            moments.append((one.stop_s, place, behind))
    moments.sort(key=lambda moment: moment[0])
    times = [time for time, _, _ in moments]
    before, after = [place for _, place, _ in moments], [place for _, _, place in moments]
    rows = np.minimum(curve.device[before], curve.device[after])
    device = {part: rows[:, i].tolist() for i, part in enumerate(PARTS)}
    below = {
        name: np.minimum(tier[before], tier[after]).tolist()
        for name, tier in (("host", curve.host), ("disk", curve.disk))
    }
    return _steps(times, device), _steps(times, below)


def _steps(times: Sequence[float], parts: Mapping[str, Sequence[int]]) -> Steps:
    """The steps from 0 on, without what changes nothing; of several at one time the last stands."""
    shown = {name: parts[name] for name in PART_COLOURS if any(parts.get(name, ()))}
    if not shown:
        return Steps((), {})
    last_at = {time: index for index, time in enumerate(times)}
    rows = {time: tuple(values[i] for values in shown.values()) for time, i in last_at.items()}
    kept: list[tuple[float, tuple[int, ...]]] = []
    for time, row in rows.items():
        if not kept or row != kept[-1][1]:
            kept.append((time if kept else 0.0, row))
    columns = zip(*(row for _, row in kept), strict=True)
    return Steps(tuple(time for time, _ in kept), dict(zip(shown, columns, strict=True)))


def _places(records: Sequence[Record], actions: Sequence[Action]) -> list[int]:
    """The place of each record's action in the list of its rank; equal ones run in their order."""
    places: dict[Action, deque[int]] = defaultdict(deque)
    for place, action in enumerate(actions):
        places[action].append(place)
    return [places[record.action].popleft() for record in records]


def _waits(record: Record) -> bool:
    """Whether the rank waits for an action that is no cell."""
    return record.lane != "copy" and isinstance(record.action, (Recv, Reshard, Reduce))


Track = Literal["compute", "link", "copy"]

_CELLS: dict[type[Action], tuple[Kind, str]] = {
    Forward: ("forward", "F"),
    Recompute: ("recompute", "R"),
    RebuildKV: ("rebuild", "K"),
    Backward: ("backward", "B"),
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline, the plan that it is of, and what a picture says about them."""

    timeline: Timeline
    plan: ChunkPlan
    title: str = ""
    limits_bytes: tuple[int, ...] | None = None
    """The bytes that each rank may use on its device."""
    time_unit: str = "s"
    """The unit of the timeline's times: "s", or another word if its costs had no hardware."""
    ranks: tuple[int, ...] | None = None
    """The ranks that a picture shows; None: all. Title and shares are of all."""
    note: str = ""
    """A line under the title: what else there is to say, such as which ranks are shown."""
    memory: tuple[MemoryCurve, ...] = ()
    """The bytes of each rank by parts, as a cost model counts them; empty: only totals are
    known, those of the timeline."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A record with its place in a picture."""

    track: Track
    kind: Kind
    chunk: int
    """The number of its chunk; -1 where it belongs to none."""
    label: str
    """The letter of the kind and the cell, where there is a letter."""
    record: Record

    @property
    def seconds(self) -> float:
        return self.record.stop_s - self.record.start_s


@dataclass(frozen=True, slots=True)
class RankScene:
    """The row of one rank."""

    rank: int
    name: str
    bars: tuple[Bar, ...]
    """The bars in the order of their starts."""
    device: Steps
    lower: Steps
    """The memory in host and disk."""
    limit_bytes: int | None

    def on(self, track: Track) -> list[Bar]:
        """The bars of one track."""
        return [bar for bar in self.bars if bar.track == track]


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is drawn of one panel."""

    panel: Panel
    title: str
    lines: tuple[str, ...]
    """The lines under the title: note, batch, shares of the ranks' time."""
    duration: float
    ranks: tuple[RankScene, ...]
    chunks: tuple[ChunkLook, ...]
    cut: dict[int, int]
    """The tokens of each cut sequence of the picture, the longest first."""

    @property
    def thin_tracks(self) -> list[Track]:
        """The tracks besides the cells that have something to show."""
        seen = {bar.track for rank in self.ranks for bar in rank.bars if bar.seconds > 0}
        return [track for track in ("link", "copy") if track in seen]

    @property
    def highest_bytes(self) -> tuple[int, int]:
        """The most that a rank's device and the tiers below it hold, or may hold."""
        limits = [rank.limit_bytes or 0 for rank in self.ranks if rank.device.parts]
        device = max([rank.device.peak for rank in self.ranks] + limits, default=0)
        return device, max((rank.lower.peak for rank in self.ranks), default=0)


def make_scenes(panels: Sequence[Panel]) -> list[Scene]:
    """The scenes of one picture, which agree on the colours of the sequences that are cut."""
    cut = _cut_sequences(panel.plan for panel in panels)
    return [_make_scene(panel, cut) for panel in panels]


def _make_scene(panel: Panel, cut: dict[int, int]) -> Scene:
    plan, figures = panel.plan, measure(panel.timeline, panel.plan)
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for record in panel.timeline.records:
        by_rank[record.rank].append(record)
    numbers = range(len(figures.ranks)) if panel.ranks is None else panel.ranks
    ranks = tuple(_rank(panel, rank, by_rank[rank]) for rank in numbers)
    shares = share_words(figures, alone=is_alone(plan))
    several = "a rank's memory is that of the device that needs most" if plan.sp_size > 1 else ""
    return Scene(
        panel=panel,
        title=title_words(panel, figures),
        lines=tuple(filter(None, (panel.note, batch_words(plan), shares, several))),
        duration=figures.duration_s,
        ranks=ranks,
        chunks=_colour_chunks(plan, panel.timeline, cut),
        cut=cut,
    )


def _rank(panel: Panel, rank: int, records: Sequence[Record]) -> RankScene:
    plan = panel.plan
    stages = sorted({r.action.stage for r in records if not isinstance(r.action, MESSAGES)})
    names = ["device" if is_alone(plan) else f"rank {rank}"]
    if len(plan.stages) > 1 and stages:
        one = len(stages) == 1
        names.append(f"stage {stages[0]}" if one else f"stages {stages[0]}-{stages[-1]}")
    if plan.sp_size > 1:
        names.append(count_words(plan.sp_size, "device"))
    curve = panel.memory[rank] if panel.memory else None
    actions = plan.actions[rank] if rank < len(plan.actions) else ()
    tiers = [tier for tier in ("host", "disk") if tier in asdict(plan.tiers).values()]
    device, lower = memory_steps(records, actions, " and ".join(tiers) or "host", curve)
    instant = {
        (r.action.chunk, r.action.stage)
        for r in records
        if isinstance(r.action, Forward) and r.start_s == r.stop_s
    }
    late = computed_late(plan) & instant
    bars = (_bar(record, late, with_stage=len(stages) > 1) for record in records)
    return RankScene(
        rank=rank,
        name="\n".join(names),
        bars=tuple(sorted(bars, key=lambda bar: bar.record.start_s)),
        device=device,
        lower=lower,
        limit_bytes=panel.limits_bytes[rank] if panel.limits_bytes else None,
    )


def _bar(record: Record, late: Collection[tuple[int, int]], *, with_stage: bool) -> Bar:
    """The bar of a record. `late`: cells whose recompute is the first time that they are computed,
    and is shown as the forward that it is counted as."""
    action = record.action
    chunk = -1 if isinstance(action, ON_PARAMETERS) else action.chunk
    if record.lane == "copy":
        return Bar("copy", "copy", chunk, "", record)
    if isinstance(action, MESSAGES):
        return Bar("link", action.payload, chunk, "", record)
    if type(action) not in _CELLS:
        return Bar("link", "collective", chunk, "", record)
    kind, letter = _CELLS[type(action)]
    if isinstance(action, Recompute) and (chunk, action.stage) in late:
        kind, letter = _CELLS[Forward]
    label = f"{letter}{chunk}" + (f".{action.stage}" if with_stage else "")
    return Bar("compute", kind, chunk, label, record)
