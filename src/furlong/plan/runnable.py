"""Needs of a plan that is to be carried out, beyond what is there."""

from __future__ import annotations

from collections.abc import Iterable

from furlong.plan.values import Action, ChunkPlan, Forward


def missing_to_run(
    plan: ChunkPlan, num_tokens: int | None = None, *, num_processes: int = 1
) -> str:
    """The needs of a plan that `num_processes` do not meet, as words; empty where it runs.

    A pool that shards no sequence is data parallelism. `num_tokens`: those of the batch; a plan of
    more pads its sequences, which nothing carries out. Nor does a pipeline gather its weights with
    every pass.
    """
    needed = len(plan.actions) * plan.sp_size
    parts = []
    if num_tokens is not None and sum(plan.seq_lens) != num_tokens:
        parts.append("padding")
    num_replicas = sum(_has_first_stage(own) for own in plan.actions)
    if plan.regathers and len(plan.actions) > num_replicas:
        parts.append("a pipeline that gathers its weights with every pass (ZeRO-3)")
    if needed != num_processes:
        parts.append(f"{needed} processes that run it by furlong.Engine.run")
    return ", ".join(parts)


def _has_first_stage(actions: Iterable[Action]) -> bool:
    return any(isinstance(action, Forward) and action.stage == 0 for action in actions)
