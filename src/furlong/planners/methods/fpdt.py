"""FPDT (Yao et al., 2024), and the dial between it and SeCO: how many layers a stage has.

FPDT finishes a layer for all chunks before the next begins, on one device or one sp group, with K,V
of earlier chunks streamed from the host. Its own backward walks K,V outside and queries inside;
this one walks chunks in descending order, with the same gradients, and then grouped heads spare the
backward's loads too.

Groups run one after another, each through all stages and back. The other order, every stage over
all groups, would hold the hidden states of the whole batch at every stage at once; it would only
gather sharded parameters less often.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.check import check
from furlong.plan.values import ON_DEVICE, Action, ChunkPlan, Keep, Tiers
from furlong.planners.chunks.groups import group_chunks
from furlong.planners.chunks.placement import shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.layer_first import stage_heights, walk_layer_first
from furlong.planners.orders.pipeline import number_chunks


def plan_fpdt(
    seq_lens: Sequence[int],
    *,
    num_layers: int,
    chunk_size: int,
    stage_layers: int = 1,
    keep: Keep = "input",
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    backward: bool = True,
) -> ChunkPlan:
    """A checked plan for one rank: stages of at most `stage_layers` layers, layer-first.

    `chunk_size` counts the tokens of the whole sp group; with `sp_size` above 1 every slice is
    sharded. Short sequences are packed; a packed chunk is walked like any other group.
    """
    options = ChunkOptions(size=chunk_size, hybrid=False)
    groups = shard(group_chunks(seq_lens, options), sp_size)
    stages = stage_heights(num_layers, stage_layers)
    numbered = number_chunks(groups)
    actions: list[Action] = []
    for numbers in numbered:
        is_last = numbers is numbered[-1]
        actions += walk_layer_first(numbers, stages, keep=keep, backward=backward, reduces=is_last)
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens),
        chunks=tuple(chunk for group in groups for chunk in group),
        stages=stages,
        actions=(tuple(actions),),
        tiers=tiers,
        sp_size=sp_size,
    )
    check(plan)
    return plan
