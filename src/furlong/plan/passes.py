"""The passes of a plan: what each action computes, writes and saves, and what is freed after it.

Executor, cost model and memory simulation all use these functions. A cell is the work of one chunk
at one stage.

A Forward stops as early as the plan allows. At the last stage its output is not needed if a
Recompute follows: it then stops after the last K,V projection or, if no later chunk reads its K,V,
computes nothing. The same holds for a chunk that a sampled plan did not draw, unless the plan
reports its loss. In a plan of two phases every Forward runs to its end, as the caller needs all
outputs.

K,V of a cell are written by its Forward, if a later chunk reads them, and again by each RebuildKV.
Their readers are all actions of later chunks of the sequence at the same stage (in a sequence that
branches, only of descendants), and the cell's Recompute and Backward. K,V are freed after their
last reader. If a RebuildKV writes them again, the first K,V are freed after the last reader before
it; with `keep="input"` this is the last Forward of the sequence.

The input of a cell after the first stage is allocated when the stage before delivers it. It is
freed after the last pass that reads it, or replaced by its gradient in the cell's Backward. The
gradient is freed by the Backward of the stage before.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from furlong.plan.plan import COMPUTING, Backward, ChunkPlan, Forward, RebuildKV, Recompute

Computed = Literal["nothing", "to last kv", "values", "graph", "backward"]
"""Extent of a pass: nothing; the stage up to its last layer's K,V projection; the stage without an
autograd graph; the stage with its graph; the backward of a graph made before."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The part of its cell (one chunk at one stage) that one action computes."""

    computes: Computed = "nothing"
    writes_kv: bool = False
    """Whether K,V go into the store, for later chunks."""
    remembers: int = 0
    """Number of first layers of the stage whose attention output and log-sum-exp are saved."""
    remembered: int = 0
    """Number of first layers that reuse a saved attention output instead of computing it."""
    recompute_layers: int = 0
    """Number of first layers that are checkpointed: they keep their input only and run again in the
    backward, where they reuse saved attention outputs."""
    loss: bool = False
    """Whether the pass includes head and loss, with their gradients in a backward only."""


NOTHING = Pass()

Direction = Literal["forward", "backward"]


def layer_directions(plan: ChunkPlan, rank: int) -> tuple[Direction | None, ...]:
    """Return the direction in which each action of `rank` runs the layers of its stage, or None.

    If each pass gathers weights, this is the order in which layers are gathered. Recomputation
    inside a Backward gathers nothing more: the weights are there.
    """
    ways: dict[Computed, Direction | None] = {"nothing": None, "backward": "backward"}
    return tuple(ways.get(what.computes, "forward") for what in passes(plan, rank))


def passes(plan: ChunkPlan, rank: int) -> tuple[Pass, ...]:
    """Return the pass of each action of `rank`, NOTHING for an action that computes nothing. The
    result is cached on the plan, which is immutable."""
    known: dict[int, tuple[Pass, ...]] = vars(plan).setdefault("_passes", {})
    if rank not in known:
        known[rank] = _passes_of(plan, rank)
    return known[rank]


def keep_passes(made: ChunkPlan, first_rank: int, plan: ChunkPlan) -> None:
    """Store the passes of `plan` in the cache of the plan `made`, so that they are not computed
    again. Rank r of `plan` is rank `first_rank` + r of `made`, with the same actions, before which
    `made` may have Unshards."""
    known: dict[int, tuple[Pass, ...]] = vars(made).setdefault("_passes", {})
    for rank, actions in enumerate(plan.actions):
        ahead = len(made.actions[first_rank + rank]) - len(actions)
        known[first_rank + rank] = (NOTHING,) * ahead + passes(plan, rank)


def _passes_of(plan: ChunkPlan, rank: int) -> tuple[Pass, ...]:
    actions = plan.actions[rank]
    trained = {(a.chunk, a.stage) for a in actions if isinstance(a, Backward)}
    forwards: dict[tuple[int, int], Pass] = {}
    graphs: dict[tuple[int, int], Pass] = {}
    found: list[Pass] = []
    for action in actions:
        what = NOTHING
        match action:
            case Forward():
                cell = action.chunk, action.stage
                what = forwards[cell] = _of_forward(plan, action, trained=cell in trained)
            case Recompute(chunk, stage, layers):
                remembered = forwards[chunk, stage].remembers
                what = Pass("graph", remembered=remembered, recompute_layers=layers)
            case RebuildKV(chunk, stage):
                # nothing after the last projection runs, so the last layer has no attention to skip
                known = min(forwards[chunk, stage].remembers, plan.stages[stage] - 1)
                what = Pass("to last kv", writes_kv=True, remembered=known)
            case Backward(chunk, stage):
                graph = graphs[chunk, stage]
                layers = graph.recompute_layers
                known = min(graph.remembered, layers)
                is_last = stage == len(plan.stages) - 1
                what = Pass("backward", remembered=known, recompute_layers=layers, loss=is_last)
        if isinstance(action, (Forward, Recompute)) and what.computes == "graph":
            graphs[action.chunk, action.stage] = what
        found.append(what)
    return tuple(found)


def computed_late(plan: ChunkPlan) -> frozenset[tuple[int, int]]:
    """Return the (chunk, stage) cells whose Forward computes nothing: their Recompute is the first
    computation."""
    return frozenset(
        (action.chunk, action.stage)
        for rank, actions in enumerate(plan.actions)
        for action, what in zip(actions, passes(plan, rank), strict=True)
        if isinstance(action, Forward) and what is NOTHING
    )


def _of_forward(plan: ChunkPlan, action: Forward, *, trained: bool) -> Pass:
    height = plan.stages[action.stage]
    is_last = action.stage == len(plan.stages) - 1
    continues = plan.continues[action.chunk]
    is_dummy = plan.chunks[action.chunk].is_dummy
    if not trained and (plan.report_loss or not is_last or is_dummy):
        return Pass("values", writes_kv=continues, loss=is_last)
    if action.keep == "all":
        return Pass("graph", writes_kv=continues, recompute_layers=action.recompute_layers)
    remembers = height if trained and action.keep == "attention" else 0
    if plan.two_phases:
        return Pass("values", writes_kv=continues, remembers=remembers, loss=is_last)
    if not is_last:
        return Pass("values", writes_kv=continues, remembers=remembers)
    if continues:
        return Pass("to last kv", writes_kv=True, remembers=min(remembers, height - 1))
    return NOTHING


def kv_frees(plan: ChunkPlan, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each action of `rank`, the (chunk, stage) cells whose K,V are freed after it.

    The list is walked backwards, so the first reader of a cell's K,V that is met is the last one.
    """
    actions, links = plan.actions[rank], plan.links
    frees: list[list[tuple[int, int]]] = [[] for _ in actions]
    last_use: dict[tuple[int, int], int] = {}
    unread: dict[tuple[int, int], list[int]] = {}
    """(unbranched sequence, stage) -> heap of the pieces that have no reader so far."""
    for index, action in reversed(list(enumerate(actions))):
        if not isinstance(action, COMPUTING):
            continue
        chunk, stage = cell = action.chunk, action.stage
        makes_kv = isinstance(action, RebuildKV)
        makes_kv |= isinstance(action, Forward) and plan.continues[chunk]
        if makes_kv:
            frees[last_use.pop(cell, index)].append(cell)
        elif not isinstance(action, Forward):
            last_use.setdefault(cell, index)
        for seq_id, piece in links[chunk]:
            group, tree = plan.groups[seq_id], plan.trees.get(seq_id)
            if tree is not None:
                read = tree.path(piece)
            else:  # all earlier pieces, each once
                if (seq_id, stage) not in unread:
                    unread[seq_id, stage] = list(range(len(group)))
                pieces = unread[seq_id, stage]
                if makes_kv:
                    heappush(pieces, piece)
                read = []
                while pieces and pieces[0] < piece:
                    read.append(heappop(pieces))
            for earlier in read:
                last_use.setdefault((group[earlier], stage), index)
    return tuple(tuple(reversed(cells)) for cells in frees)


def input_frees(plan: ChunkPlan, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each action of `rank`, the (chunk, stage) cells whose input is freed after it.

    An input whose last reader is a Recompute is not freed here: the cell's Backward replaces it by
    its gradient, or frees it if no earlier stage is trained.
    """
    if len(plan.stages) == 1:
        return ((),) * len(plan.actions[rank])
    last_read: dict[tuple[int, int], int] = {}
    for index, (action, what) in enumerate(
        zip(plan.actions[rank], passes(plan, rank), strict=True)
    ):
        if isinstance(action, (Forward, Recompute, RebuildKV)) and action.stage:
            cell = action.chunk, action.stage
            if what is not NOTHING or cell not in last_read:
                last_read[cell] = index
    frees: dict[int, list[tuple[int, int]]] = {}
    for cell, index in last_read.items():
        if not isinstance(plan.actions[rank][index], Recompute):
            frees.setdefault(index, []).append(cell)
    return tuple(tuple(frees.get(index, ())) for index in range(len(plan.actions[rank])))
