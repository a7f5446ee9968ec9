"""One plan of a global batch from the plans of its data-parallel replicas.

Replica d of plans with p ranks each becomes the ranks d * p and following. The replicas share the
Reduce of each stage, which all ranks of that stage join, and under ZeRO-3 all passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from furlong.cost.model import CostModel
from furlong.plan.check import check
from furlong.plan.values import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Computing,
    Forward,
    Recv,
    Reduce,
    Send,
    Slice,
    Unshard,
)
from furlong.planners.chunks.balance import refuse_idle
from furlong.planners.orders.in_step import fill_up
from furlong.planners.orders.pipeline import with_messages


def join_replicas(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    model: CostModel | None = None,
) -> ChunkPlan:
    """A checked plan of the global batch `seq_lens`.

    `plans[d]` is the plan of replica d for the sequences `seq_ids[d]` of the batch, numbered from 0
    in that order. All have the same stages, as many of them frozen, and the same ranks, sp_size and
    tiers. A rank with a Backward whose plan left out the Reduce of a stage gets it at its end.
    `model`: where its ZeRO-3 gathers weights with every pass, the replicas go in step. On one rank
    with one stage each, their groups are sorted and filled up for it (`in_step`); pipelines and
    layer-first walks stay as they are, and must have equal passes.
    A replica without sequences has the plan of a dummy (`idle_plan`).
    Raises ConfigError where there is no sequence, ValueError for plans that
    differ or do not belong to the sequences, and PlanError for unequal passes in step.
    """
    refuse_idle(len(seq_lens), sum(bool(plan.seq_lens) for plan in plans))
    _refuse_different(plans, seq_ids, seq_lens)
    first = plans[0]
    num_ranks = len(first.actions)
    regathers = model is not None and model.training.regathers
    if model is not None and regathers and num_ranks == len(first.stages) == 1:
        plans = fill_up(plans, model)
    chunks: list[Chunk] = []
    actions: list[tuple[Action, ...]] = []
    for replica, (plan, own) in enumerate(zip(plans, seq_ids, strict=True)):
        first_chunk, first_rank = len(chunks), replica * num_ranks
        chunks += _renamed(plan.chunks, own)
        for listed in plan.actions:
            moved = _moved(listed, first_chunk, first_rank)
            actions.append((*moved, *_missing_reduces(listed)))
    joined = ChunkPlan(
        seq_lens=tuple(seq_lens), chunks=tuple(chunks), stages=first.stages, actions=tuple(actions),
        tiers=first.tiers, sp_size=first.sp_size, sampled=any(plan.sampled for plan in plans),
        frozen_stages=first.frozen_stages,
        regathers=regathers or any(plan.regathers for plan in plans),
    )  # fmt: skip
    check(joined)
    return joined


def join_kept(
    plans: Sequence[ChunkPlan],
    seq_ids: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    num_replicas: int,
) -> ChunkPlan:
    """The checked plan of a run's batch, in which weights are kept for the step: `join_replicas`,
    with dummies for replicas without a plan.

    Weights are gathered before the first chunk: a replica meets the others then only where
    gradients are added up, and one that fails in between can tell them.
    """
    num_idle = num_replicas - len(plans)
    some = [*plans, *[idle_plan(plans[0])] * num_idle]
    some = [replace(plan, actions=tuple(map(_gathering, plan.actions))) for plan in some]
    return join_replicas(some, [*seq_ids, *[[]] * num_idle], seq_lens)


def _gathering(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list of a rank, which first gathers the weights of its stages."""
    stages = {action.stage for action in actions if isinstance(action, Forward)}
    return (*map(Unshard, sorted(stages)), *actions)


def idle_plan(like: ChunkPlan) -> ChunkPlan:
    """The plan of a replica without sequences, beside one with the plan `like`: it takes one token
    of no sequence through all stages, so that its processes meet the others' collectives."""
    trained = any(isinstance(action, Backward) for listed in like.actions for action in listed)
    stages = range(len(like.stages))
    backwards = stages[like.frozen_stages :] if trained else ()
    cells: list[list[Action]] = [
        [Forward(0, stage, "all" if stage in backwards else "input")] for stage in stages
    ]
    ends: list[list[Action]] = [
        [Backward(0, stage), Reduce(stage)] if stage in backwards else [] for stage in stages
    ]
    if len(like.actions) == 1:
        lists = [[action for own in (*cells, *reversed(ends)) for action in own]]
    else:
        lists = [
            with_messages([*own, *end], stage, len(stages), frozen_stages=like.frozen_stages)
            for stage, own, end in zip(stages, cells, ends, strict=True)
        ]
    actions = tuple(map(tuple, lists))
    return replace(like, seq_lens=(), chunks=(Chunk(()),), actions=actions)


def _refuse_different(
    plans: Sequence[ChunkPlan], seq_ids: Sequence[Sequence[int]], seq_lens: Sequence[int]
) -> None:
    layouts = {
        (plan.stages, len(plan.actions), plan.sp_size, plan.tiers, plan.frozen_stages)
        for plan in plans
    }
    if len(layouts) > 1:
        shown = "; ".join(sorted(map(str, layouts)))
        raise ValueError(f"replicas differ in (stages, ranks, sp_size, tiers, frozen): {shown}")
    for replica, (plan, own) in enumerate(zip(plans, seq_ids, strict=True)):
        if plan.seq_lens != tuple(seq_lens[seq_id] for seq_id in own):
            raise ValueError(f"the plan of replica {replica} is not one of its sequences")


def _renamed(chunks: Iterable[Chunk], seq_ids: Sequence[int]) -> list[Chunk]:
    return [
        Chunk(tuple(Slice(seq_ids[s.seq_id], s.start, s.stop, s.place) for s in chunk.slices))
        for chunk in chunks
    ]


def _moved(actions: Sequence[Action], chunks: int, ranks: int) -> list[Action]:
    """The actions with chunk numbers and peers raised by so many."""
    moved: list[Action] = []
    for action in actions:
        if isinstance(action, (Send, Recv)):
            chunk, peer = action.chunk + chunks, action.peer + ranks
            moved.append(type(action)(action.payload, chunk, action.stage, peer))
        elif isinstance(action, Computing):
            moved.append(replace(action, chunk=action.chunk + chunks))
        else:
            moved.append(action)
    return moved


def _missing_reduces(actions: Iterable[Action]) -> list[Action]:
    """A Reduce for each stage with a Backward and without one, in the order of last Backwards."""
    trained: dict[int, None] = {}
    reduced: set[int] = set()
    for action in actions:
        if isinstance(action, Backward):
            trained.pop(action.stage, None)
            trained[action.stage] = None
        elif isinstance(action, Reduce):
            reduced.add(action.stage)
    return [Reduce(stage) for stage in trained if stage not in reduced]
