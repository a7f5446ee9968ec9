"""The plan of a batch on one device, in either order: what `ChunkOptions` say is what it does.

    plan_on_device([9000, 300], ChunkOptions(order="layer-first", stage_layers=2), num_layers=8)

Chunk-first is ChunkFlow's walk over one stage (`planners.chunkflow`). Layer-first finishes a stage
for all chunks of a group before the next (`planners.layer_first`), with the same chunks: hybrid
ones too, which the published method (`planners.fpdt`) does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from furlong.plan.check import check
from furlong.plan.values import Action, Chunk, ChunkPlan
from furlong.planners.chunkflow import group_chunks, plan_chunkflow
from furlong.planners.groups import Groups
from furlong.planners.layer_first import stage_heights, walk_layer_first
from furlong.planners.options import ChunkOptions
from furlong.planners.pipeline import number_chunks


def plan_on_device(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    backward: bool = True,
    frozen_layers: int = 0,
) -> ChunkPlan:
    """A checked plan for one device; without backward a plan that only evaluates.

    `frozen_layers`: first layers without a trained parameter in them or below, so that neither
    recompute nor backward runs at stages of such layers alone. The last stage always has both, for
    the loss is in its backward; so chunk-first, with all layers in one stage, leaves nothing out.
    """
    if options.order == "chunk-first":
        return plan_chunkflow(seq_lens, options, num_layers=num_layers, backward=backward)
    stages = stage_heights(num_layers, options.stage_layers or 1)
    frozen_stages = _count_frozen(stages, frozen_layers) if backward else 0
    groups: Groups = group_chunks(seq_lens, options)
    numbered = number_chunks(groups)
    actions: list[Action] = []
    for numbers in numbered:
        actions += walk_layer_first(
            numbers,
            stages,
            keep=options.keep,
            num_retained=options.num_retained,
            recompute_layers=options.recompute_layers,
            frozen_stages=frozen_stages,
            backward=backward,
            reduces=numbers is numbered[-1],
        )
    chunks: list[Chunk] = [chunk for group in groups for chunk in group]
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens),
        chunks=tuple(chunks),
        stages=stages,
        actions=(tuple(actions),),
        tiers=options.tiers,
        frozen_stages=frozen_stages,
    )
    check(plan)
    return plan


def _count_frozen(stages: Sequence[int], frozen_layers: int) -> int:
    """First stages wholly within the frozen layers, the last stage never."""
    return sum(end <= frozen_layers for end in list(accumulate(stages))[:-1])
