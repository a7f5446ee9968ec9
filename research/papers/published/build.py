"""The plan of one replica from its dials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from furlong.cost.model import CostModel
from furlong.plan.plan import Action, Chunk, ChunkPlan, Offload
from furlong.planners.chunks import Groups, group_chunks, sequence_work, shard_all
from furlong.planners.infinipipe import cut_and_pack, fit_work, plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    assemble,
    number_chunks,
    plan_replica,
    state_aware_lists,
)
from furlong.planners.skrull import micro_batches
from papers.published.chunks import packed_groups, padded_groups, sliced_groups
from papers.published.dials import Cut, Dials
from papers.published.flexsp import plan_flexsp
from papers.published.group_order import choose_order
from papers.published.hybrid_cp import plan_hybrid_cp
from papers.seq1f1b_plan import token_level_lists

POOLED: dict[Cut, Callable[..., ChunkPlan]] = {
    "disjoint places": plan_flexsp,
    "places by length": plan_hybrid_cp,
}
"""Planners of whole sequences on places of a pool, by the cut that they make."""


def build(
    dials: Dials,
    seq_lens: Sequence[int],
    model: CostModel,
    budget_bytes: int | None = None,
    *,
    beat_s: float = inf,
    checked: bool = True,
) -> ChunkPlan:
    """The checked plan of one replica, which may not fit. `model`: `replica_model` of the dials;
    `budget_bytes`: for planners that search themselves; for InfiniPipe among them `beat_s`.
    `checked` False: groups in an order are not checked, which takes nearly half of the time.

    Raises UserError where there is no plan of these dials.
    """
    sp_size, stages, offload = dials.layout.sp, dials.stages, Offload(kv=dials.offload)
    if dials.cut in POOLED:
        return POOLED[dials.cut](
            seq_lens, model, pool_size=sp_size, budget_bytes=budget_bytes,
            recompute_layers=sum(dials.recompute_layers) if dials.recompute_layers else None,
        )  # fmt: skip
    match dials.walk:
        case "layer-first":
            assert dials.size and dials.stage_layers and dials.keep
            options = ChunkOptions(
                size=dials.size, num_retained=0, keep=dials.keep, offload=offload,
                order="layer-first", stage_layers=dials.stage_layers, hybrid=False,
            )  # fmt: skip
            return plan_replica(
                seq_lens, options, num_layers=model.shape.num_layers, sp_size=sp_size
            )
        case "elastic":
            return plan_infinipipe(
                seq_lens, model, stages=stages, sp_size=sp_size, budget_bytes=budget_bytes,
                beat_s=beat_s,
            )  # fmt: skip
        case "token-level":
            lens, groups = groups_of(dials, seq_lens, model)
            layers = dials.recompute_layers or (0,) * len(stages)
            rows = [[count] * sum(map(len, groups)) for count in layers]
            lists = partial(token_level_lists, stages=stages, recompute_layers=rows)
        case "state-aware":
            lens, groups = groups_of(dials, seq_lens, model)
            assert dials.num_retained is not None and dials.keep
            lists = partial(
                state_aware_lists, stages=stages, num_retained=dials.num_retained, keep=dials.keep
            )
    return _ordered(dials, lens, groups, lists, model, budget_bytes, checked=checked)


def _ordered(
    dials: Dials,
    lens: Sequence[int],
    groups: Groups,
    lists: Callable[[Sequence[range]], list[list[Action]]],
    model: CostModel,
    budget_bytes: int | None,
    *,
    checked: bool,
) -> ChunkPlan:
    """The plan of groups in the order that the dials say; `lists`: of numbered chunks."""
    sp_size, stages, offload = dials.layout.sp, dials.stages, Offload(kv=dials.offload)
    numbered = number_chunks(groups)
    of_all: dict[str, Any] = {"offload": offload, "sp_size": sp_size, "checked": checked}
    plan = assemble(lens, groups, stages, lists(numbered), **of_all)
    order = choose_order(plan, numbered, lists, model, dials.group_order, budget_bytes=budget_bytes)
    if order == tuple(range(len(groups))):
        return plan
    groups = [groups[i] for i in order]
    lists_of = lists(number_chunks(groups))
    return assemble(lens, groups, stages, lists_of, **of_all)


def groups_of(
    dials: Dials, seq_lens: Sequence[int], model: CostModel
) -> tuple[Sequence[int], Groups]:
    """The chunks of one replica, and its lengths, which may be padded."""
    sp_size, longest = dials.layout.sp, max(seq_lens)
    size = dials.size or longest
    lens, whole = seq_lens, max(size, longest)
    match dials.cut:
        case "tokens":
            groups: Groups = group_chunks(lens, ChunkOptions(size=size, hybrid=dials.hybrid))
        case "time":
            count = dials.slices or -(-longest // size)
            work = fit_work(model, longest, count, stages=dials.stages, sp_size=sp_size)
            groups = cut_and_pack(lens, count, work)
        case "slices":
            quadratic = _quadratic_share(model) if dials.by_work else 0.0
            groups = sliced_groups(lens, num_slices=dials.slices or 1, quadratic=quadratic)
        case "packed":
            groups = packed_groups(lens, whole)
        case "padded":
            lens, groups = padded_groups(lens, pad_to=whole)
        case "placed":
            batches = micro_batches(
                range(len(lens)), lens, sequence_work(lens, model.shape),
                sp_size=sp_size, bucket_tokens=-(-size // sp_size),
            )  # fmt: skip
            groups = [[batch] for batch in batches]
            return lens, _slowest_first(groups, lens, model, sp_size)
    sharded = shard_all(groups, sp_size)
    if dials.cut == "packed" and len(dials.stages) == 1:
        # where replicas go in step, those that take longest meet
        return lens, _slowest_first(sharded, lens, model, sp_size)
    return lens, sharded


def replica_model(dials: Dials, model: CostModel) -> CostModel:
    """The cost model of a plan of one replica: the others share its state."""
    training = replace(model.training, replicas=dials.layout.dp)
    return replace(model, training=training)


def _slowest_first(
    groups: Groups, seq_lens: Sequence[int], model: CostModel, sp_size: int
) -> list[Sequence[Chunk]]:
    """Groups of one chunk each."""
    chunks = [chunk for group in groups for chunk in group]
    stages = (model.shape.num_layers,)
    cells = model.cell_seconds(chunks, stages, sp_size=sp_size)
    seconds = cells[0].sum(axis=1).tolist()
    order = sorted(range(len(groups)), key=lambda i: (-seconds[i], i))
    return [groups[i] for i in order]


def _quadratic_share(model: CostModel) -> float:
    """FLOPs of attention per squared token over the others per token, of all layers."""
    layers = model.shape.layers
    return sum(layer.key_flops for layer in layers) / 2 / sum(layer.flops for layer in layers)
