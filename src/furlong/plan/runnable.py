"""Whether this release carries a plan out, or only plans it."""

from __future__ import annotations

from furlong.plan.values import ChunkPlan, Forward


def missing_to_run(plan: ChunkPlan, num_tokens: int | None = None) -> str:
    """The part of a plan that no executor carries out yet, as words; empty where there is none.

    One rank of one process runs; the executor's comms refuse a plan for the same reason. A pool
    that shards no sequence is data parallelism. `num_tokens`: those of the batch; a plan of more
    pads its sequences, and is refused too.
    """
    firsts = (any(isinstance(a, Forward) and a.stage == 0 for a in own) for own in plan.actions)
    num_replicas = max(1, sum(firsts))
    num_stages = len(plan.actions) // num_replicas
    largest = plan.sizes_of_places[-1]
    of_pool = "" if largest == plan.sp_size else f" of a pool of {plan.sp_size}"
    if largest == 1:
        num_replicas *= plan.sp_size
    parts = {
        f"data parallelism over {num_replicas} replicas": num_replicas > 1,
        f"sequence parallelism over {largest} devices{of_pool}": largest > 1,
        f"a pipeline of {num_stages} stages": num_stages > 1,
        "padding": num_tokens is not None and sum(plan.seq_lens) != num_tokens,
    }
    return ", ".join(words for words, is_missing in parts.items() if is_missing)
