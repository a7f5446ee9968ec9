"""What a timeline amounts to: how long each rank did what, and the bubble ratio.

Works on any Timeline, simulated or measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from furlong.plan.values import (
    Action,
    Backward,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Unshard,
)
from furlong.timeline import Record, Timeline

_Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds of one rank; they add up to the step's."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """With the recomputation inside it of layers that were checkpointed one by one."""
    recompute_s: float = 0.0
    """Recompute and RebuildKV."""
    copies_s: float = 0.0
    """Idle while K,V are copied between tiers."""
    messages_s: float = 0.0
    """Idle while a message for this rank is on its way."""
    collectives_s: float = 0.0
    """Idle while parameters are gathered or gradients are reduced."""
    waiting_s: float = 0.0
    """Idle for all other reasons: the bubble proper."""


_KINDS: dict[type[Action], str] = {
    Forward: "forward_s",
    Backward: "backward_s",
    Recompute: "recompute_s",
    RebuildKV: "recompute_s",
}
_LINKS: dict[type[Action], str] = {
    Recv: "messages_s",
    Unshard: "collectives_s",
    Reduce: "collectives_s",
}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of one step over all its ranks."""

    duration_s: float
    ranks: tuple[RankSeconds, ...]
    peak_device_bytes: tuple[int, ...]
    """Per rank, as are the next."""
    peak_host_bytes: tuple[int, ...]

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time that is neither a first forward nor a backward, 0..1.

        Recomputation is no useful work (ChunkFlow, Eq. 1; its Figure 6 fits no other reading).
        """
        return self._share_without("forward_s", "backward_s")

    @property
    def idle_ratio(self) -> float:
        """Share of all ranks' time in which nothing is computed, 0..1."""
        return self._share_without("forward_s", "backward_s", "recompute_s")

    def _share_without(self, *busy: str) -> float:
        total_s = self.duration_s * len(self.ranks)
        busy_s = sum(getattr(rank, name) for rank in self.ranks for name in busy)
        return 1 - busy_s / total_s if total_s else 0.0

    def shares(self) -> dict[str, float]:
        """Share of all ranks' time by the fields of RankSeconds without their unit; sums to 1."""
        total_s = self.duration_s * len(self.ranks)
        names = RankSeconds.__dataclass_fields__
        sums = {name: sum(getattr(rank, name) for rank in self.ranks) for name in names}
        return {
            name.removesuffix("_s"): (value / total_s if total_s else 0.0)
            for name, value in sums.items()
        }

    def to_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        ratios = {"bubble_ratio": self.bubble_ratio, "idle_ratio": self.idle_ratio}
        return asdict(self) | ratios | {"shares": self.shares()}


def measure(timeline: Timeline) -> StepFigures:
    """The figures of a timeline; its ranks are those that left a record and all below them."""
    num_ranks = max((record.rank for record in timeline.records), default=-1) + 1
    by_rank: list[list[Record]] = [[] for _ in range(num_ranks)]
    for record in timeline.records:
        by_rank[record.rank].append(record)
    duration_s = timeline.duration_s
    return StepFigures(
        duration_s=duration_s,
        ranks=tuple(_measure_rank(records, duration_s) for records in by_rank),
        peak_device_bytes=tuple(max((r.device_bytes for r in rs), default=0) for rs in by_rank),
        peak_host_bytes=tuple(max((r.host_bytes for r in rs), default=0) for rs in by_rank),
    )


def _measure_rank(records: Sequence[Record], duration_s: float) -> RankSeconds:
    seconds: dict[str, float] = defaultdict(float)
    busy: list[_Span] = []
    reasons: dict[str, list[_Span]] = {"copies_s": [], "messages_s": [], "collectives_s": []}
    for record in records:
        span = record.start_s, record.stop_s
        kind = type(record.action)
        if record.lane == "copy":
            reasons["copies_s"].append(span)
        elif (name := _KINDS.get(kind)) is not None:
            seconds[name] += span[1] - span[0]
            busy.append(span)
        elif name := _LINKS.get(kind):
            reasons[name].append(span)
    idle = _subtract([(0.0, duration_s)], busy)
    for name, spans in reasons.items():
        left = _subtract(idle, spans)
        seconds[name] = _total_s(idle) - _total_s(left)
        idle = left
    return RankSeconds(**seconds, waiting_s=_total_s(idle))


def _total_s(spans: Sequence[_Span]) -> float:
    return sum(stop - start for start, stop in spans)


def _subtract(spans: Sequence[_Span], holes: Sequence[_Span]) -> list[_Span]:
    """What of `spans`, which are disjoint and in order, none of `holes` covers."""
    left: list[_Span] = []
    merged = _merge(holes)
    first = 0
    for start, stop in spans:
        while first < len(merged) and merged[first][1] <= start:
            first += 1
        place = first
        while place < len(merged) and merged[place][0] < stop:
            hole_start, hole_stop = merged[place]
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_stop)
            place += 1
        if start < stop:
            left.append((start, stop))
    return left


def _merge(spans: Sequence[_Span]) -> list[_Span]:
    """The same time as disjoint spans in order."""
    merged: list[_Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
