"""The plan of one replica of a run: all layers on one pool, or a pipeline of stages on pools."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import ChunkPlan
from furlong.planners.chunks.groups import group_chunks
from furlong.planners.chunks.placement import shard, shard_long
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import plan_groups
from furlong.planners.orders.pipeline import plan_1f1b


def plan_replica(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    stages: Sequence[int] = (),
    sp_size: int = 1,
    backward: bool = True,
    frozen_layers: int = 0,
    local_in: ModelShape | None = None,
) -> ChunkPlan:
    """A checked plan of the chunks that `options` make, every slice shared by all `sp_size`
    processes of a pool, or with the shape `local_in` of a model whole sequences on one process as
    far as its work then balances.

    `stages`: layers of each stage of a pipeline, which is walked in state-aware 1F1B; without one
    the order is that of `options`. `frozen_layers`: first layers without a trained parameter in
    them or below.
    """
    groups = group_chunks(seq_lens, options)
    if local_in is None:
        groups = shard(groups, sp_size)
    else:
        groups = shard_long(groups, seq_lens, local_in, sp_size)
    if len(stages) < 2:
        return plan_groups(
            seq_lens, groups, options, num_layers=num_layers, backward=backward,
            frozen_layers=frozen_layers, sp_size=sp_size,
        )  # fmt: skip
    ends = list(accumulate(stages))[:-1]
    return plan_1f1b(
        seq_lens, groups, stages=stages, tiers=options.tiers, sp_size=sp_size,
        frozen_stages=sum(end <= frozen_layers for end in ends), backward=backward,
        num_retained=options.num_retained, keep=options.kept,
        recompute_layers=options.recompute_layers,
    )  # fmt: skip
