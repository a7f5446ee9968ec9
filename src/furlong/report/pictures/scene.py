"""Timelines made ready to be drawn, as PNG and as a page alike.

Every action becomes a bar on a track of its rank, with the colour of its chunk; every rank has its
memory over time; and the scene has the words around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from furlong.cost.memory.curve import MemoryCurve
from furlong.plan.passes import computed_late
from furlong.plan.values import (
    MESSAGES,
    ON_PARAMETERS,
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
)
from furlong.report.pictures.colours import ChunkLook, Kind, colour_chunks, cut_sequences
from furlong.report.pictures.memory import Steps, memory_steps
from furlong.report.words import batch_words, is_alone, lower_words, share_words, title_words
from furlong.simulate.figures import measure
from furlong.timeline import Record, Timeline
from furlong.units import count_words

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
    cut = cut_sequences(panel.plan for panel in panels)
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
        title=title_words(panel.title, figures, panel.time_unit, alone=is_alone(plan)),
        lines=tuple(filter(None, (panel.note, batch_words(plan), shares, several))),
        duration=figures.duration_s,
        ranks=ranks,
        chunks=colour_chunks(plan, panel.timeline, cut),
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
    device, lower = memory_steps(records, actions, lower_words(plan.tiers), curve)
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
