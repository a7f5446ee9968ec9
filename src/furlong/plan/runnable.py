"""Needs of a plan that is to be carried out, beyond what is there."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan


def missing_to_run(
    plan: ChunkPlan, num_tokens: int | None = None, *, num_processes: int = 1
) -> str:
    """The needs of a plan that `num_processes` do not meet, as words; empty where it runs.

    A pool that shards no sequence is data parallelism. `num_tokens`: those of the batch; a plan of
    more pads its sequences, which nothing carries out.
    """
    needed = len(plan.actions) * plan.sp_size
    parts = []
    if num_tokens is not None and sum(plan.seq_lens) != num_tokens:
        parts.append("padding")
    if needed != num_processes:
        parts.append(f"{needed} processes: start it with torchrun --nproc-per-node {needed}")
    return ", ".join(parts)
