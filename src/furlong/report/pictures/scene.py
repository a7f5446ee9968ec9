"""A timeline made ready to be drawn: bars with a kind, a track and an owner, and memory curves.

Every action becomes a bar on a track of its rank. A bar's owner is what gives it its colour: the
long sequence that its chunk is a piece of, the one sequence that its chunk holds, or the common
owner of all chunks into which several whole sequences are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from furlong.plan.values import (
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from furlong.report.pictures.looks import COLOURS, KIND_WORDS, PACKED_COLOUR
from furlong.report.words import batch_words, share_words, title_words
from furlong.simulate.figures import StepFigures, measure
from furlong.timeline import Record, Timeline
from furlong.units import format_count

Kind = Literal[
    "forward", "recompute", "rebuild", "backward", "activation", "gradient", "collective", "copy"
]
Track = Literal["compute", "copy", "link"]

PACKED = -1
"""The owner of all chunks that hold several whole sequences."""
NOBODY = -2
"""The owner of what belongs to no chunk: collectives."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline, the plan that it is of, and what a picture says about them."""

    timeline: Timeline
    plan: ChunkPlan
    title: str = ""
    limits_bytes: tuple[int, ...] | None = None
    """What each rank may use on its device."""
    time_unit: str = "s"
    """What the timeline's seconds are: "s", or another word if its costs had no hardware."""
    ranks: tuple[int, ...] | None = None
    """Those that a picture shows; None: all. Title and shares are of all."""
    note: str = ""
    """A line under the title: what else there is to say, such as which ranks are shown."""


@dataclass(frozen=True, slots=True)
class Bar:
    track: Track
    kind: Kind
    start: float
    stop: float
    chunk: int
    """-1 for what belongs to no chunk."""
    stage: int
    owner: int
    record: Record


@dataclass(frozen=True, slots=True)
class Owner:
    """A colour and its meaning."""

    name: str
    colour: str
    num_tokens: int


@dataclass(slots=True)
class RankScene:
    """What one rank's row shows."""

    rank: int
    name: str
    bars: list[Bar] = field(default_factory=list)
    """In the order of their starts."""
    device: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes in use from then on)."""
    host: list[tuple[float, int]] = field(default_factory=list)
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    title: str
    note: str
    batch: str
    """What the plan is of."""
    shares: str
    """What the ranks' time went into."""
    time_unit: str
    duration: float
    figures: StepFigures
    ranks: tuple[RankScene, ...]
    owners: dict[int, Owner]
    """In the order in which they first run."""
    chunk_owners: tuple[int, ...]
    timed_kinds: frozenset[Kind]
    """Those of which some bar is longer than nothing, so that it can be seen."""
    labels_stages: bool
    """Whether a chunk's number alone does not say which cell of its rank is meant."""
    plan: ChunkPlan

    @property
    def has_memory(self) -> bool:
        return any(self.figures.peak_device_bytes)

    @property
    def has_host_memory(self) -> bool:
        return any(self.figures.peak_host_bytes)

    @property
    def legend_kinds(self) -> list[str]:
        """The kinds that can be seen, in the order of a legend."""
        return [kind for kind in KIND_WORDS if kind in self.timed_kinds]

    def longest_owners(self, most: int) -> list[int]:
        """At most so many owners, those with most tokens, in the order in which they first run."""
        by_tokens = sorted(self.owners, key=lambda owner: -self.owners[owner].num_tokens)
        shown = set(by_tokens[:most])
        return [owner for owner in self.owners if owner in shown]


def make_scene(panel: Panel) -> Scene:
    """Bars, curves, colours and words of a timeline."""
    plan, timeline = panel.plan, panel.timeline
    figures = measure(timeline)
    chunk_owners = tuple(_owner(plan, chunk) for chunk in range(len(plan.chunks)))
    ranks = [RankScene(rank, f"rank {rank}") for rank in range(len(figures.ranks))]
    stages: list[set[int]] = [set() for _ in ranks]
    for record in timeline.records:
        bar = _bar(record, chunk_owners)
        ranks[record.rank].bars.append(bar)
        if not isinstance(record.action, (Send, Recv)):
            stages[record.rank].add(bar.stage)
    for index, (rank, own) in enumerate(zip(ranks, stages, strict=True)):
        rank.bars.sort(key=lambda bar: bar.start)
        rank.name += _stage_words(own, len(plan.stages))
        rank.limit_bytes = panel.limits_bytes[index] if panel.limits_bytes else None
        # what is still on its way when the rank goes on says nothing about the rank's memory
        settled = [b for b in rank.bars if b.track == "compute" or _is_settled(b.record)]
        rank.device = _curve((bar.start, bar.record.device_bytes) for bar in settled)
        rank.host = _curve((bar.start, bar.record.host_bytes) for bar in settled)
    ranks = ranks if panel.ranks is None else [ranks[rank] for rank in panel.ranks]
    return Scene(
        name=panel.title or "timeline",
        title=title_words(panel.title, figures, panel.time_unit),
        note=panel.note,
        batch=batch_words(plan),
        shares=share_words(figures),
        time_unit=panel.time_unit,
        duration=figures.duration_s,
        figures=figures,
        ranks=tuple(ranks),
        owners=_owners(plan, chunk_owners, ranks),
        chunk_owners=chunk_owners,
        timed_kinds=frozenset(
            bar.kind for rank in ranks for bar in rank.bars if bar.stop > bar.start
        ),
        labels_stages=len(plan.stages) > 1 and any(len(own) > 1 for own in stages),
        plan=plan,
    )


def _curve(points: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The steps of a curve from 0 on; of points at one time the last stands."""
    curve: list[tuple[float, int]] = []
    for time, used in points:
        if not curve:
            curve.append((0.0, used))
        elif curve[-1][0] == time:
            curve[-1] = time, used
        elif curve[-1][1] != used:
            curve.append((time, used))
    return curve


def bar_label(bar: Bar, *, with_stage: bool) -> str:
    """What is written into a bar: its letter and its chunk."""
    letter = {"forward": "F", "recompute": "R", "rebuild": "K", "backward": "B"}.get(bar.kind, "")
    if not letter:
        return ""
    return f"{letter}{bar.chunk}" + (f".{bar.stage}" if with_stage else "")


def _is_settled(record: Record) -> bool:
    """Whether the rank waits for what is no cell."""
    return record.lane != "copy" and isinstance(record.action, (Recv, Reshard, Reduce))


def _bar(record: Record, chunk_owners: Sequence[int]) -> Bar:
    action, copied = record.action, record.lane == "copy"
    kind: Kind
    match action:
        case Forward():
            kind = "forward"
        case Recompute():
            kind = "recompute"
        case RebuildKV():
            kind = "rebuild"
        case Backward():
            kind = "backward"
        case Send(payload) | Recv(payload):
            kind = payload
        case _:
            kind = "collective"
    chunk = -1 if isinstance(action, (Unshard, Reshard, Reduce)) else action.chunk
    owner = chunk_owners[chunk] if chunk >= 0 else NOBODY
    linked = isinstance(action, (Send, Recv, Unshard, Reshard, Reduce))
    track: Track = "copy" if copied else "link" if linked else "compute"
    kind = "copy" if copied else kind
    return Bar(track, kind, record.start_s, record.stop_s, chunk, action.stage, owner, record)


def _owner(plan: ChunkPlan, chunk: int) -> int:
    if plan.links[chunk]:
        return plan.links[chunk][0][0]
    slices = plan.chunks[chunk].slices
    return slices[0].seq_id if len(slices) == 1 else PACKED


def _owners(
    plan: ChunkPlan, chunk_owners: Sequence[int], ranks: Sequence[RankScene]
) -> dict[int, Owner]:
    """The owners of the bars of `ranks`."""
    owners: dict[int, Owner] = {}
    tokens_of: dict[int, int] = {PACKED: 0}
    num_packed = 0
    first_runs = _first_runs(ranks)
    for chunk in first_runs:
        owner = chunk_owners[chunk]
        if owner == PACKED:
            tokens_of[PACKED] += plan.chunks[chunk].num_tokens
            num_packed += len(plan.chunks[chunk].slices)
        else:
            tokens_of[owner] = plan.seq_lens[owner]
    in_order = sorted(first_runs, key=first_runs.__getitem__)
    for owner in dict.fromkeys(chunk_owners[chunk] for chunk in in_order):
        tokens = f"{format_count(tokens_of[owner])} tokens"
        if owner == PACKED:
            name, colour = f"{num_packed} packed sequences, {tokens}", PACKED_COLOUR
        else:
            place = len(owners) - (PACKED in owners)
            name, colour = f"sequence {owner}, {tokens}", COLOURS[place % len(COLOURS)]
        owners[owner] = Owner(name, colour, tokens_of[owner])
    return owners


def _first_runs(ranks: Sequence[RankScene]) -> dict[int, float]:
    """For each chunk, when a cell of it runs first."""
    first: dict[int, float] = {}
    for rank in ranks:
        for bar in rank.bars:
            if bar.track == "compute":
                first[bar.chunk] = min(first.get(bar.chunk, bar.start), bar.start)
    return first


def _stage_words(stages: set[int], num_stages: int) -> str:
    if num_stages == 1 or not stages:
        return ""
    low, high = min(stages), max(stages)
    return f"\nstage {low}" if low == high else f"\nstages {low}-{high}"
