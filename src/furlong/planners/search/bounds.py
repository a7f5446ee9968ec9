"""Lower bounds of a step: of given chunks, and of any chunks in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.model import CostModel, Hidden
from furlong.plan.values import Backward, Chunk, ChunkPlan, Forward, Slice
from furlong.planners.chunks.placement import shard
from furlong.planners.layout import first_alike


def stage_bounds_s(
    chunks: Sequence[Chunk],
    seq_lens: Sequence[int],
    stages: tuple[int, ...],
    sp_size: int,
    model: CostModel,
    *,
    recompute_layers: Sequence[int] = (),
    fills: bool = True,
    moves: bool = True,
) -> list[float]:
    """For each stage the least seconds of a step: a forward and a backward of every chunk, with
    `recompute_layers` of each stage checkpointed.

    `fills`: and those of one chunk on all stages before it, which no chunk does that is cut
    further. `moves`: with the all-to-alls of what is sharded.
    """
    alike = first_alike(model.shape, stages)
    layers = recompute_layers or (0,) * len(stages)
    actions = [
        tuple(
            action
            for c in range(len(chunks))
            for action in (Forward(c, stage, "all", layers[stage]), Backward(c, stage))
        )
        if first == stage
        else ()
        for stage, first in enumerate(alike)
    ]
    plan = ChunkPlan(tuple(seq_lens), tuple(chunks), stages, tuple(actions), sp_size=sp_size)
    free: tuple[Hidden, ...] = () if moves else ("all-to-all",)
    costs = model.costs(plan, free=free)
    seconds = [[costs.compute_s(a, rank) for a in own] for rank, own in enumerate(actions)]
    bounds_s, filled_s = [], 0.0
    for first in alike:
        own_s = seconds[first]
        bounds_s.append(filled_s + sum(own_s))
        if fills:
            filled_s += min(own_s[::2]) + min(own_s[1::2])
    return bounds_s


def least_s(
    seq_lens: Sequence[int], stages: tuple[int, ...], sp_size: int, model: CostModel
) -> float:
    """Seconds below which no plan of one replica with these stages gets, however it cuts and
    places: all tokens in one chunk, at the efficiency of endless ones."""
    hardware = model.hardware
    endless = {
        name: replace(getattr(hardware, name), half_tokens=0.0)
        for name in ("linear", "attention_forward", "attention_backward")
    }
    hardware = replace(hardware, **endless, slice_launch_s=0.0, tile_tokens=0)
    model = replace(model, hardware=hardware)
    whole = [[Chunk(tuple(Slice(i, 0, n) for i, n in enumerate(seq_lens)))]]
    ((chunk,),) = shard(whole, sp_size)
    return max(stage_bounds_s([chunk], seq_lens, stages, sp_size, model, fills=False, moves=False))
