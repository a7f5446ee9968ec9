"""The ranks that a table or a picture shows where there are too many of them."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan, Forward
from furlong.timeline import Timeline


def choose_ranks(
    plan: ChunkPlan, timeline: Timeline, most: int = 16
) -> tuple[tuple[int, ...], str]:
    """All ranks, or at most `most`: whole replicas, those whose cells end last; of one replica
    that is too long itself, ranks spread over its stages. And the words for the choice, empty where
    all ranks are shown."""
    num_ranks = len(plan.actions)
    if num_ranks <= most:
        return tuple(range(num_ranks)), ""
    per_replica = ranks_per_replica(plan)
    num_replicas = num_ranks // per_replica
    ends = [0.0] * num_replicas
    for record in timeline.records:
        if record.lane == "compute":
            replica = record.rank // per_replica
            ends[replica] = max(ends[replica], record.stop_s)
    slowest = sorted(range(num_replicas), key=lambda replica: -ends[replica])
    chosen = slowest[: max(1, most // per_replica)]
    shown = tuple(
        rank
        for replica in sorted(chosen)
        for rank in _spread(range(replica * per_replica, (replica + 1) * per_replica), most)
    )
    words = f"shown: {len(shown)} of {num_ranks} ranks"
    if num_replicas > 1:
        alone = f"replica {chosen[0]}, which of {num_replicas} ends last"
        several = f"the {len(chosen)} replicas of {num_replicas} that end last"
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


def _spread(ranks: range, most: int) -> tuple[int, ...]:
    """At most `most` of the ranks, the first and the last among them."""
    if len(ranks) <= most:
        return tuple(ranks)
    gap = (len(ranks) - 1) / max(most - 1, 1)
    return tuple(ranks[round(i * gap)] for i in range(most))
