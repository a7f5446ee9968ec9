"""Which ranks a table or a picture shows where there are too many of them."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.plan.values import ChunkPlan
from furlong.report.plan_report import held_stages
from furlong.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ShownRanks:
    """A choice of ranks, and how to tell it."""

    ranks: tuple[int, ...]
    note: str = ""
    """Empty where all are shown."""


def choose_ranks(plan: ChunkPlan, timeline: Timeline, most: int = 16) -> ShownRanks:
    """All ranks, or at most `most` of the replica whose last cell ends last, spread over its
    stages."""
    num_ranks = len(plan.actions)
    if num_ranks <= most:
        return ShownRanks(tuple(range(num_ranks)))
    per_replica = ranks_per_replica(plan)
    ends = [0.0] * num_ranks
    for record in timeline.records:
        if record.lane == "compute":
            ends[record.rank] = max(ends[record.rank], record.stop_s)
    slowest = max(range(num_ranks), key=ends.__getitem__) // per_replica
    own = range(slowest * per_replica, min((slowest + 1) * per_replica, num_ranks))
    if len(own) == num_ranks:
        return ShownRanks(_spread(own, most), f"{most} of its {num_ranks} ranks are shown")
    shown = _spread(own, most)
    count = f"{len(shown)} of {num_ranks} ranks"
    replica = f"replica {slowest} of {num_ranks // per_replica}, the slowest"
    if len(own) > len(shown):
        return ShownRanks(shown, f"shown: {count}, of {replica}")
    return ShownRanks(shown, f"shown: {count}, those of {replica}")


def ranks_per_replica(plan: ChunkPlan) -> int:
    """How many consecutive ranks hold the whole model."""
    stages = held_stages(plan)
    again = (rank for rank in range(1, len(stages)) if stages[rank] == stages[0])
    return next(again, len(stages))


def _spread(ranks: range, most: int) -> tuple[int, ...]:
    """At most so many, the first and the last among them."""
    if len(ranks) <= most:
        return tuple(ranks)
    if most == 1:
        return (ranks[0],)
    return tuple(ranks[round(i * (len(ranks) - 1) / (most - 1))] for i in range(most))
