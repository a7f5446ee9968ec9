"""The plan of one replica from its dials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from furlong.cost.model import CostModel
from furlong.plan.plan import Action, Chunk, ChunkPlan, Forward, Tiers
from furlong.planners.chunks import Groups, group_chunks, shard, shard_long, sliced_groups
from furlong.planners.infinipipe import cut_and_pack, fit_work, plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    assemble,
    number_chunks,
    plan_groups,
    plan_replica,
    state_aware_lists,
    token_level_lists,
)
from furlong.planners.places import plan_places
from furlong.planners.skrull import micro_batch_groups
from papers.published.chunks import packed_groups, padded_groups
from papers.published.dials import Cut, Dials
from papers.published.flexsp import plan_flexsp
from papers.published.group_order import choose_order
from papers.published.hybrid_cp import plan_hybrid_cp

POOLED: dict[Cut, Callable[..., ChunkPlan]] = {
    "places": plan_places,
    "disjoint places": plan_flexsp,
    "places by length": plan_hybrid_cp,
}
"""Planners of whole sequences on places of a pool, by the cut that they make."""
MAX_SLICE_NUMBERS = 24
"""Numbers of slices that InfiniPipe tries in a search."""


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
    if dials.options is not None:
        return plan_replica(
            seq_lens, dials.options, num_layers=model.shape.num_layers, stages=dials.stages,
            sp_size=dials.layout.sp,
        )  # fmt: skip
    sp_size, stages, tiers = dials.layout.sp, dials.stages, Tiers(kv=dials.tier)
    if dials.cut in POOLED:
        return POOLED[dials.cut](
            seq_lens, model, pool_size=sp_size, budget_bytes=budget_bytes,
            recompute_layers=sum(dials.recompute_layers) if dials.recompute_layers else None,
        )  # fmt: skip
    match dials.walk:
        case "layer-first":
            assert dials.size and dials.stage_layers and dials.keep
            options = ChunkOptions(
                size=dials.size, num_retained=0, keep=dials.keep, tier=tiers,
                order="layer-first", stage_layers=dials.stage_layers, hybrid=False,
            )  # fmt: skip
            return plan_groups(
                seq_lens, shard(group_chunks(seq_lens, options), sp_size), options,
                num_layers=model.shape.num_layers, sp_size=sp_size,
            )  # fmt: skip
        case "elastic":
            return plan_infinipipe(
                seq_lens, model, num_stages=len(stages), sp_size=sp_size, stages=stages,
                budget_bytes=budget_bytes, balance="time" if dials.cut == "time" else "tokens",
                checkpointing=dials.checkpointing, max_tried=MAX_SLICE_NUMBERS, beat_s=beat_s,
            ).plan  # fmt: skip
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
    sp_size, stages, tiers = dials.layout.sp, dials.stages, Tiers(kv=dials.tier)
    numbered = number_chunks(groups)
    of_all: dict[str, Any] = {"tiers": tiers, "sp_size": sp_size, "checked": checked}
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
            tiers = Tiers(kv=dials.tier)
            work = fit_work(
                model, longest, count, stages=dials.stages, sp_size=sp_size, tiers=tiers
            )
            groups = cut_and_pack(lens, count, work)
        case "slices":
            quadratic = _quadratic_share(model) if dials.by_work else 0.0
            groups = sliced_groups(lens, num_slices=dials.slices or 1, quadratic=quadratic)
        case "packed":
            groups = packed_groups(lens, whole)
        case "padded":
            lens, groups = padded_groups(lens, pad_to=whole)
        case "placed":
            groups = micro_batch_groups(
                lens,
                model,
                sp_size=sp_size,
                bucket_tokens=-(-size // sp_size),
                recompute_layers=sum(dials.recompute_layers),
            )
            return lens, _slowest_first(groups, lens, model, sp_size)
    if dials.local:
        return lens, shard_long(groups, lens, model.shape, sp_size)
    sharded = shard(groups, sp_size)
    if dials.cut == "packed" and len(dials.stages) == 1:
        # where replicas go in step, those that take longest meet
        return lens, _slowest_first(sharded, lens, model, sp_size)
    return lens, sharded


def replica_model(dials: Dials, model: CostModel) -> CostModel:
    """The cost model of a plan of one replica: the others share its state."""
    training = replace(model.training, zero_stage=dials.zero, replicas=dials.layout.dp)
    return replace(model, training=training)


def settled(dials: Dials, plan: ChunkPlan) -> Dials:
    """Dials that leave nothing to choose, from a replica's plan or the batch's: of InfiniPipe's
    the slices of the longest sequence and the most layers that a cell of each stage recomputes; of
    places all layers, which take the least memory checkpointed."""
    if dials.is_pool:
        return replace(dials, recompute_layers=dials.stages)
    if dials.walk != "elastic":
        return dials
    layers = [0] * len(plan.stages)
    for action in (a for own in plan.actions for a in own):
        if isinstance(action, Forward):
            layers[action.stage] = max(layers[action.stage], action.recompute_layers)
    slices = max(map(len, plan.groups.values()), default=1)
    return replace(dials, walk="token-level", cut="time", slices=slices,
                   recompute_layers=tuple(layers))  # fmt: skip


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
    shape, layers = model.shape, range(model.shape.num_layers)
    keys = sum(layer.key_flops for layer in shape.layers)
    return keys / 2 / sum(shape.layer_flops(layer) for layer in layers)
