"""The plan of a batch on one device, in either order: what `ChunkOptions` say is what it does.

    plan_on_device([9000, 300], ChunkOptions(order="layer-first", stage_layers=2), num_layers=8)

Chunk-first is ChunkFlow's walk over one stage (`methods.chunkflow`). Layer-first finishes a stage
for all chunks of a group before the next (`orders.layer_first`), with the same chunks: hybrid ones
too, which the published method (`methods.fpdt`) does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from furlong.plan.check import check
from furlong.plan.values import Action, ChunkPlan, Reduce
from furlong.planners.chunks.groups import Groups, group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.layer_first import stage_heights, walk_layer_first
from furlong.planners.orders.pipeline import number_chunks
from furlong.planners.orders.schedule import schedule_group


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
    return plan_groups(
        seq_lens,
        group_chunks(seq_lens, options),
        options,
        num_layers=num_layers,
        backward=backward,
        frozen_layers=frozen_layers,
    )


def plan_groups(
    seq_lens: Sequence[int],
    groups: Groups,
    options: ChunkOptions,
    *,
    num_layers: int,
    backward: bool = True,
    frozen_layers: int = 0,
) -> ChunkPlan:
    """The same over chunks that are there already."""
    stages = stages_of(num_layers, options)
    frozen_stages = _count_frozen(stages, frozen_layers) if backward else 0
    numbered = number_chunks(groups)
    actions: list[Action] = []
    for numbers in numbered:
        actions += walk_group(
            numbers,
            stages,
            options,
            frozen_stages=frozen_stages,
            backward=backward,
            reduces=numbers is numbered[-1],
        )
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens),
        chunks=tuple(chunk for group in groups for chunk in group),
        stages=stages,
        actions=(tuple(actions),),
        tiers=options.tiers,
        frozen_stages=frozen_stages,
    )
    check(plan)
    return plan


def stages_of(num_layers: int, options: ChunkOptions) -> tuple[int, ...]:
    """Layers of each stage."""
    if options.order == "chunk-first":
        return (num_layers,)
    return stage_heights(num_layers, options.stage_layers or 1)


def walk_group(
    chunks: Sequence[int],
    stages: Sequence[int],
    options: ChunkOptions,
    *,
    frozen_stages: int = 0,
    backward: bool = True,
    reduces: bool = False,
    only: Collection[int] | None = None,
) -> list[Action]:
    """Actions of one group; `reduces` and `only` as for `layer_first.walk_layer_first`."""
    if options.order == "layer-first":
        return walk_layer_first(
            chunks,
            stages,
            keep=options.keep,
            num_retained=options.num_retained,
            recompute_layers=options.recompute_layers,
            frozen_stages=frozen_stages,
            backward=backward,
            reduces=reduces,
            only=only,
        )
    actions = schedule_group(
        chunks,
        num_retained=options.num_retained,
        keep=options.keep,
        backward=backward,
        recompute_layers=min(options.recompute_layers, stages[0]),
    )
    return [*actions, Reduce(0)] if reduces and backward else actions


def _count_frozen(stages: Sequence[int], frozen_layers: int) -> int:
    """First stages wholly within the frozen layers, the last stage never."""
    return sum(end <= frozen_layers for end in list(accumulate(stages))[:-1])
