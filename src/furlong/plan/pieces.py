"""Lengths of the pieces of cut sequences: what a sequence has in each chunk of its group."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan


def piece_lens(plan: ChunkPlan) -> dict[int, list[int]]:
    """Tokens of each cut sequence in each chunk of its group that has a Forward, by `seq_id`."""
    return {seq_id: piece_lens_of(plan, seq_id) for seq_id in plan.groups}


def piece_lens_of(plan: ChunkPlan, seq_id: int) -> list[int]:
    """Tokens of a cut sequence in each chunk of its group that has a Forward."""
    computed = plan.groups[seq_id][: plan.num_computed[seq_id]]
    bounds = (plan.bounds(seq_id, chunk) for chunk in computed)
    return [sum(stop - start for start, stop, _ in own) for own in bounds]
