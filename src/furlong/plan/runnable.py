"""Whether this release carries a plan out, or only plans it."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan, Forward


def missing_to_run(plan: ChunkPlan, num_tokens: int | None = None) -> str:
    """The part of a plan that no executor carries out yet, as words; empty where there is none.

    One rank of one process runs; the executor's comms refuse a plan for the same reason.
    `num_tokens`: those of the batch; a plan of more pads its sequences, and is refused too.
    """
    num_replicas = sum(
        any(isinstance(action, Forward) and action.stage == 0 for action in actions)
        for actions in plan.actions
    )
    num_stages = len(plan.actions) // max(1, num_replicas)
    parts = [
        words.format(number)
        for words, number in (
            ("data parallelism over {} replicas", num_replicas),
            ("sequence parallelism over {} devices", plan.sp_size),
            ("a pipeline of {} stages", num_stages),
        )
        if number > 1
    ]
    if num_tokens is not None and sum(plan.seq_lens) != num_tokens:
        parts.append("padding")
    return ", ".join(parts)
