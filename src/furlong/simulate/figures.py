"""The figures of a timeline, simulated or measured: seconds of each rank, and the bubble ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from furlong.plan.passes import computed_late
from furlong.plan.plan import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Unshard,
)
from furlong.timeline import Record, Timeline


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds of one rank; they add up to the step's. Where several fields claim a moment, it
    belongs to the first of them."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backwards, with the recomputation inside them of layers that were checkpointed one by one."""
    recompute_s: float = 0.0
    """The second forward of cells, and what makes their K,V again."""
    copies_s: float = 0.0
    """Idle time while K,V are copied between tiers."""
    messages_s: float = 0.0
    """Idle time while a message for this rank is on its way."""
    collectives_s: float = 0.0
    """Idle time while parameters are gathered or gradients are reduced."""
    waiting_s: float = 0.0
    """Idle time for all other reasons: the bubble proper."""


_FIELDS: dict[type[Action], str] = {
    Backward: "backward_s",
    RebuildKV: "recompute_s",
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
    """Bytes on the device of each rank at its peak."""
    peak_host_bytes: tuple[int, ...]
    """Bytes of each rank in the tiers below at their peak."""

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


def measure(timeline: Timeline, plan: ChunkPlan | None = None) -> StepFigures:
    """The figures of a timeline; its ranks are those that left a record and all below them.

    `plan`: the plan that ran. Where one of its Forwards computes nothing, the Recompute is the
    cell's first forward, and counts as such; None: every Recompute counts as a second one.
    """
    num_ranks = max((record.rank for record in timeline.records), default=-1) + 1
    by_rank: list[list[Record]] = [[] for _ in range(num_ranks)]
    for record in timeline.records:
        by_rank[record.rank].append(record)
    late = computed_late(plan) if plan is not None else frozenset()
    return StepFigures(
        duration_s=timeline.duration_s,
        ranks=tuple(_measure_rank(records, timeline.duration_s, late) for records in by_rank),
        peak_device_bytes=tuple(max((r.device_bytes for r in rs), default=0) for rs in by_rank),
        peak_host_bytes=tuple(max((r.host_bytes for r in rs), default=0) for rs in by_rank),
    )


def _measure_rank(
    records: Sequence[Record], duration_s: float, late: frozenset[tuple[int, int]]
) -> RankSeconds:
    """Every moment belongs to the first field of RankSeconds for which a record stands then."""
    changes: list[tuple[float, int, str]] = []
    for record in records:
        if name := _field(record, late):
            changes += [(record.start_s, 1, name), (record.stop_s, -1, name)]
    seconds = dict.fromkeys(RankSeconds.__dataclass_fields__, 0.0)
    running = dict.fromkeys(seconds, 0) | {"waiting_s": 1}
    now = 0.0
    for time, change, name in [*sorted(changes), (duration_s, 0, "waiting_s")]:
        seconds[next(field for field in running if running[field])] += time - now
        running[name] += change
        now = time
    return RankSeconds(**seconds)


def _field(record: Record, late: frozenset[tuple[int, int]]) -> str | None:
    """The field of RankSeconds that a record's time belongs to."""
    action = record.action
    if record.lane == "copy":
        return "copies_s"
    if isinstance(action, (Forward, Recompute)):
        is_first = isinstance(action, Forward) != ((action.chunk, action.stage) in late)
        return "forward_s" if is_first else "recompute_s"
    return _FIELDS.get(type(action))
