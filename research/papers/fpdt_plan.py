"""FPDT (Yao et al., 2024) as its paper plans it, and the dial between it and SeCO: how many layers
a stage has. The search makes such plans from dials (`papers.published.build`)."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.plan import ON_DEVICE, ChunkPlan, Keep, Offload
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica


def plan_fpdt(
    seq_lens: Sequence[int],
    *,
    num_layers: int,
    chunk_size: int,
    stage_layers: int = 1,
    keep: Keep = "input",
    offload: Offload = ON_DEVICE,
    sp_size: int = 1,
    backward: bool = True,
) -> ChunkPlan:
    """A checked plan for one rank: stages of at most `stage_layers` layers, layer-first.

    `chunk_size` counts the tokens of the whole sp group; with `sp_size` above 1 every slice is
    sharded. Short sequences are packed; a packed chunk is walked like any other group.
    """
    options = ChunkOptions(
        size=chunk_size, num_retained=0, keep=keep, offload=offload, order="layer-first",
        stage_layers=stage_layers, hybrid=False,
    )  # fmt: skip
    return plan_replica(
        seq_lens, options, num_layers=num_layers, sp_size=sp_size, backward=backward
    )
