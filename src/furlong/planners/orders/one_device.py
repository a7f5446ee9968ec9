"""The plan of a batch on one device, in either order: what `ChunkOptions` say is what it does.

    plan_on_device([9000, 300], ChunkOptions(order="layer-first", stage_layers=2), num_layers=8)

Chunk-first is ChunkFlow's walk over one stage. Layer-first finishes a stage for all chunks of a
group before the next (`orders.layer_first`), with the same chunks: hybrid ones too, which FPDT, the
published method, does not have.

Groups run one after another, each through all stages and back. The other order, every stage over
all groups, would hold the hidden states of the whole batch at every stage at once; it would only
gather sharded parameters less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from furlong.plan.check import check
from furlong.plan.values import Action, ChunkPlan, Reduce
from furlong.planners.chunks.branches import Forks, without_unread
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
    forks: Forks | None = None,
    **others: Any,
) -> ChunkPlan:
    """A checked plan for one device of the chunks that `options` make; `forks`: where sequences
    branch; `others` as for `plan_groups`."""
    groups = group_chunks(seq_lens, options, forks)
    return plan_groups(seq_lens, groups, options, num_layers=num_layers, **others)


def plan_groups(
    seq_lens: Sequence[int],
    groups: Groups,
    options: ChunkOptions,
    *,
    num_layers: int,
    backward: bool = True,
    frozen_layers: int = 0,
    sp_size: int = 1,
) -> ChunkPlan:
    """A checked plan of any groups for one device, or for one pool of `sp_size`; without backward
    a plan that only evaluates.

    `frozen_layers`: first layers without a trained parameter in them or below, so that neither
    recompute nor backward runs at stages of such layers alone. The last stage always has both, for
    the loss is in its backward; so chunk-first, with all layers in one stage, leaves nothing out.
    """
    stages = stages_of(num_layers, options)
    ends = list(accumulate(stages))[:-1]
    frozen_stages = sum(end <= frozen_layers for end in ends) if backward else 0
    numbered = number_chunks(groups)
    actions: list[Action] = []
    for numbers in numbered:
        actions += walk_group(
            numbers, stages, options, frozen_stages=frozen_stages, backward=backward,
            reduces=numbers is numbered[-1],
        )  # fmt: skip
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunk for group in groups for chunk in group),
        stages=stages, actions=(tuple(actions),), tiers=options.tiers, sp_size=sp_size,
        frozen_stages=frozen_stages,
    )  # fmt: skip
    plan = without_unread(plan)
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
    backward: bool = True,
    reduces: bool = False,
    **layer_first: Any,
) -> list[Action]:
    """The actions of one group. `reduces`: it is a rank's last one, and each stage is reduced
    behind its last Backward; `layer_first`: more for `walk_layer_first`."""
    dials: dict[str, Any] = {
        "keep": options.kept, "num_retained": options.num_retained, "backward": backward,
        "recompute_layers": min(options.recompute_layers, stages[0]),
    }  # fmt: skip
    if options.order == "layer-first":
        return walk_layer_first(chunks, stages, reduces=reduces, **dials, **layer_first)
    actions = schedule_group(chunks, **dials)
    return [*actions, Reduce(0)] if reduces and backward else actions
