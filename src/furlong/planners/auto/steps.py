"""The steps that the search of `auto` times, and the one whose memory it walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from furlong.cost.model import CostModel, update_s
from furlong.plan.plan import Chunk, ChunkPlan
from furlong.planners.auto.candidates import Space
from furlong.planners.chunks import Groups, by_cost, group_chunks, sequence_work, shard
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, number_chunks, plan_replica, state_aware_lists
from furlong.planners.predict import one_draw, simulated_s, step_s

Dealt = list[list[list[int]]]
"""Places of the sequences among all, by step and by replica; the replica with most work first."""


def deal_steps(space: Space) -> Dealt:
    """The sequences of each step, dealt to its replicas by their work, as a run deals them."""
    work = sequence_work(space.seq_lens, space.model.shape)
    steps = []
    for first in range(0, len(work), space.sequences_per_step):
        own = work[first : first + space.sequences_per_step]
        replicas = by_cost(own, min(space.layout.dp, len(own)))
        most_first = sorted(replicas, key=lambda some: -sum(own[i] for i in some))
        steps.append([[first + i for i in sorted(some)] for some in most_first])
    return steps


def busiest_groups(space: Space, dealt: Dealt, size: int) -> list[list[list[Chunk]]]:
    """For each step the groups of chunks of the replica with most work."""
    found = []
    for step in dealt:
        groups = group_chunks([space.seq_lens[i] for i in step[0]], ChunkOptions(size=size))
        shared = groups if space.layout.sp == 1 else shard(groups, space.layout.sp)
        found.append([[_renamed(chunk, step[0]) for chunk in group] for group in shared])
    return found


def _renamed(chunk: Chunk, seq_ids: Sequence[int] | Mapping[int, int]) -> Chunk:
    """The chunk with `seq_ids[i]` for the sequence i."""
    return Chunk(tuple(replace(piece, seq_id=seq_ids[piece.seq_id]) for piece in chunk.slices))


def longest_step(space: Space, size: int) -> list[int]:
    """The longest sequence, and as many tokens of others as may share its last chunk; in a pipeline
    also chunks of others, which its first stages have begun by then."""
    left = -(-space.sequences_per_step // space.layout.dp) - 1
    others = min(-space.longest % size, left * space.longest)
    found = [space.longest]
    for _ in range(max(1, len(space.stages))):
        found += [others] if others else []
        left -= -(-others // space.longest)
        others = min(size, left * space.longest)
    return found


def plan_of(space: Space, options: ChunkOptions, seq_lens: Sequence[int]) -> ChunkPlan:
    """The plan of one replica."""
    return plan_replica(
        seq_lens, options, num_layers=space.model.shape.num_layers, stages=space.stages,
        sp_size=space.layout.sp,
    )  # fmt: skip


def busiest_s(space: Space, steps: Sequence[Groups], options: ChunkOptions) -> float:
    """Seconds of all steps of the replicas with most work, without the gradients' reduction, which
    takes as long under all options."""
    if space.stages:
        plans = (_pipeline(space, groups, options) for groups in steps)
        return sum(step_s(space.model, one_draw(plan, options)) for plan in plans)
    seq_lens, groups = _numbered(space.seq_lens, one_list(steps))
    return simulated_s(space.model, seq_lens, groups, options, sp_size=space.layout.sp)


def _numbered(seq_lens: Sequence[int], groups: Groups) -> tuple[Sequence[int], list[list[Chunk]]]:
    """The lengths of the sequences that groups have, which are numbered by them from 0."""
    found = {piece.seq_id for group in groups for chunk in group for piece in chunk.slices}
    numbers = {seq_id: number for number, seq_id in enumerate(sorted(found))}
    return [seq_lens[seq_id] for seq_id in numbers], [
        [_renamed(chunk, numbers) for chunk in group] for group in groups
    ]


def _pipeline(space: Space, groups: Groups, options: ChunkOptions) -> ChunkPlan:
    """The plan of some of the sequences, not checked: for its seconds."""
    seq_lens, groups = _numbered(space.seq_lens, groups)
    lists = state_aware_lists(
        number_chunks(groups), space.stages, num_retained=options.num_retained,
        keep=options.kept, recompute_layers=options.recompute_layers,
    )  # fmt: skip
    return ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunk for group in groups for chunk in group),
        stages=space.stages, actions=tuple(map(tuple, lists)), tiers=options.tiers,
        sp_size=space.layout.sp,
    )  # fmt: skip


def mean_step_s(space: Space, dealt: Dealt, options: ChunkOptions) -> float:
    """Seconds of a step on average, of the plans of all replicas as a run joins them, which meet in
    the last Backward of each stage, and of the optimizer. Where only a part of a step's sequences
    is there the time is that part's share."""
    model, num_replicas, total_s, first = whole_model(space.model), space.layout.dp, 0.0, 0
    for step in dealt:
        seq_lens = space.seq_lens[first : first + sum(map(len, step))]
        own_ids = [[i - first for i in own] for own in step]
        plans = [plan_of(space, options, [seq_lens[i] for i in own]) for own in own_ids]
        plan = join_kept(plans, own_ids, seq_lens, num_replicas)
        total_s += step_s(model, plan) + update_s(model, plan)
        first += len(seq_lens)
    return total_s * space.sequences_per_step / len(space.seq_lens)


def whole_model(model: CostModel) -> CostModel:
    """The model of plans that list all replicas."""
    return replace(model, training=replace(model.training, replicas=1))


def one_list(steps: Sequence[Groups]) -> list[Sequence[Chunk]]:
    """The groups of all steps."""
    return [group for groups in steps for group in groups]
