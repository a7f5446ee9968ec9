"""State-aware 1F1B: pipelines over groups of chunks, one stage per rank.

ChunkFlow (Yuan et al., ICML 2025) shows this order in its Figures 6 and 7 without an algorithm; the
rule here is the one that gives the figures' numbers. All chunks are forwarded in the order of their
groups. The backwards of a group, with the recomputes of what was dropped, are bound to the place of
its last chunk. Stage s of P runs P - 1 - s forwards ahead, then a forward and what is bound to its
place in turn. Where every group is one chunk this is plain 1F1B, the order of Megatron-LM.

Data dependencies never close a circle, and neighbours agree on the order of messages per direction,
so a Send that does not wait and a queue per direction are all it needs. A stage s holds at most
P - 1 - s + num_retained graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from furlong.plan.check import check
from furlong.plan.values import (
    ON_DEVICE,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Keep,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Send,
    Tiers,
)
from furlong.planners.chunks.groups import Groups
from furlong.planners.orders.schedule import schedule_group

RecomputeStart = Literal["eager", "lazy"]
"""Moments at which a dropped chunk may be recomputed: as soon as its stage is free, or after the
gradient of its output has arrived (then it is part of the backward; never faster, and what
ChunkFlow draws)."""


def plan_1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    backward: bool = True,
    **dials: Any,
) -> ChunkPlan:
    """A checked plan of any groups in state-aware 1F1B, in the order in which they are listed.

    `stages`: layers per stage; rank s holds stage s. The first `frozen_stages`, with nothing to
    train in them or below, only run forward; without backward all do. `dials`: those of
    `state_aware_lists`.
    """
    numbered = number_chunks(groups)
    first = frozen_stages if backward else len(stages)
    lists = state_aware_lists(numbered, stages, frozen_stages=first, **dials)
    return assemble(
        seq_lens, groups, stages, lists, tiers=tiers, sp_size=sp_size,
        frozen_stages=frozen_stages if backward else 0,
    )  # fmt: skip


def state_aware_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    *,
    num_retained: int = 1,
    keep: Keep = "kv",
    recompute: RecomputeStart = "eager",
    recompute_layers: int = 0,
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """The list of every rank for groups whose chunks have the numbers `numbered`.

    Dropped chunks keep what `keep` says, the others recompute `recompute_layers` of each stage; the
    first `frozen_stages` only run forward.
    """
    lists = []
    for stage, height in enumerate(stages):
        schedules = [
            schedule_group(
                group,
                num_retained=num_retained,
                keep=keep,
                backward=stage >= frozen_stages,
                stage=stage,
                recompute_layers=min(recompute_layers, height),
            )
            for group in numbered
        ]
        cells = _interleave(schedules, num_ahead=len(stages) - 1 - stage)
        lists.append(with_messages(cells, stage, len(stages), recompute, frozen_stages))
    return lists


def _interleave(schedules: Sequence[Sequence[Action]], *, num_ahead: int) -> list[Action]:
    """Forwards of all groups in order, `num_ahead` of them before anything else; what follows a
    group's forwards in its own schedule comes at the place of its last forward."""
    forwards: list[Action] = []
    bound: list[Sequence[Action]] = []
    for schedule in schedules:
        own = [action for action in schedule if isinstance(action, Forward)]
        forwards += own
        bound += [()] * (len(own) - 1) + [schedule[len(own) :]]
    cells = forwards[:num_ahead]
    for place, actions in enumerate(bound):
        cells += forwards[place + num_ahead : place + num_ahead + 1]
        cells += actions
    return cells


def number_chunks(groups: Groups) -> list[range]:
    """The indices of each group's chunks when the groups' chunks are numbered one after another."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group))
    return [range(a, b) for a, b in pairwise(starts)]


def with_messages(
    cells: Iterable[Action],
    stage: int,
    num_stages: int,
    recompute: RecomputeStart = "eager",
    frozen_stages: int = 0,
) -> list[Action]:
    """The list of rank `stage`: its cells, each with the messages from and to its neighbours.

    A message is received right before the cell that needs it and sent right after the cell that
    makes it, so that both ends have the order of their cells. No gradient goes to one of the first
    `frozen_stages`.
    """
    actions: list[Action] = []
    early = -1
    for action in cells:
        if isinstance(action, Forward) and stage > 0:
            actions.append(Recv("activation", action.chunk, stage - 1, stage - 1))
        lazy = isinstance(action, Recompute) and recompute == "lazy"
        if (lazy or isinstance(action, Backward)) and stage < num_stages - 1:
            assert isinstance(action, (Recompute, Backward))
            if action.chunk != early:
                actions.append(Recv("gradient", action.chunk, stage + 1, stage + 1))
            early = action.chunk
        actions.append(action)
        if isinstance(action, Forward) and stage < num_stages - 1:
            actions.append(Send("activation", action.chunk, stage, stage + 1))
        if isinstance(action, Backward) and stage > frozen_stages:
            actions.append(Send("gradient", action.chunk, stage, stage - 1))
    return actions


def assemble(
    seq_lens: Sequence[int],
    groups: Groups,
    stages: Sequence[int],
    lists: Iterable[list[Action]],
    *,
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
    checked: bool = True,
) -> ChunkPlan:
    """The plan of every rank's list, checked unless told otherwise; a Reduce ends each that has a
    Backward. K,V that no later chunk reads are not built again: a group's chunks need not be pieces
    of one sequence."""
    chunks: list[Chunk] = [chunk for group in groups for chunk in group]
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens),
        chunks=tuple(chunks),
        stages=tuple(stages),
        actions=tuple(
            (*actions, Reduce(stage)) if _trains(actions) else tuple(actions)
            for stage, actions in enumerate(lists)
        ),
        tiers=tiers,
        sp_size=sp_size,
        frozen_stages=frozen_stages,
    )
    if any(_is_for_nobody(action, plan) for own in plan.actions for action in own):
        needed = (
            tuple(action for action in own if not _is_for_nobody(action, plan))
            for own in plan.actions
        )
        plan = replace(plan, actions=tuple(needed))
    if checked:
        check(plan)
    return plan


def _is_for_nobody(action: Action, plan: ChunkPlan) -> bool:
    return isinstance(action, RebuildKV) and not plan.continues[action.chunk]


def _trains(actions: Iterable[Action]) -> bool:
    return any(isinstance(action, Backward) for action in actions)
