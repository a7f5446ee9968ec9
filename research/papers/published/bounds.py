"""Lower bounds of a step: of given chunks, and of any chunks in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from furlong.cost.model import CostModel
from furlong.cost.seconds import Hidden
from furlong.plan.plan import Chunk, Slice
from furlong.planners.chunks import shard_all


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
    free: tuple[Hidden, ...] = () if moves else ("all-to-all",)
    seconds = model.cell_seconds(
        chunks, stages, sp_size=sp_size, recompute_layers=recompute_layers, free=free
    )
    bounds_s, filled_s = [], 0.0
    for own_s in seconds:
        bounds_s.append(filled_s + sum(own_s.ravel().tolist()))
        if fills:
            filled_s += float(own_s.min(axis=0).sum())
    return bounds_s


def least_s(
    seq_lens: Sequence[int], stages: tuple[int, ...], sp_size: int, model: CostModel
) -> float:
    """Seconds below which no plan of one replica with these stages gets, however it cuts and
    places: all tokens in one chunk, at the efficiency of endless ones."""
    hardware = model.hardware
    endless = {
        name: replace(getattr(hardware, name), half_tokens=0.0, square=1.0, packed=1.0)
        for name in ("linear", "attention_forward", "attention_backward")
    }
    hardware = replace(hardware, **endless, slice_launch_s=0.0, tile_tokens=0)
    model = replace(model, hardware=hardware)
    whole = [[Chunk(tuple(Slice(i, 0, n) for i, n in enumerate(seq_lens)))]]
    ((chunk,),) = shard_all(whole, sp_size)
    return max(stage_bounds_s([chunk], seq_lens, stages, sp_size, model, fills=False, moves=False))
