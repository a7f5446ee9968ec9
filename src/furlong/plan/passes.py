"""The passes of a plan: what each action computes, writes and remembers, and what dies behind it.

Executor, cost model and memory walk read it here; none of them decides it anew. A forward stops as
early as its plan allows: at the last stage, where nobody waits for an output, behind the last K,V
projection, or before it starts if no later chunk reads K,V either. A chunk that is not drawn in a
sampled plan waits for no output either, unless the plan reports its loss. In a plan of two phases
the caller waits for every output.

The K,V of a cell come into being with its Forward (if a later chunk reads them) and again with each
RebuildKV. They are read by every action of later chunks of the same sequence (where it branches, of
those that go on from them) at the same stage, and held for the cell's own Recompute and Backward.
Each life ends with the last such action before the next one that makes them anew. So with
`keep="input"` and a RebuildKV they die after the last forward of their sequence, and cells that
never get a Backward die after their last reader.

The input of a cell behind the first stage is born when the stage before delivers it. It dies with
the last pass that reads it, or becomes the gradient of that input in the cell's Backward. The
gradient is there from that Backward on, and dies with the Backward of the stage before.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from furlong.plan.plan import COMPUTING, Backward, ChunkPlan, Forward, RebuildKV, Recompute

Computed = Literal["nothing", "to last kv", "values", "graph", "backward"]
"""How far a pass goes: not at all; the stage up to its last layer's K,V projection; the stage
without a graph; with its graph; the gradients of a graph that is there."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The part of its cell that one action computes."""

    computes: Computed = "nothing"
    writes_kv: bool = False
    """Whether K,V go into the store, for later chunks."""
    remembers: int = 0
    """First layers of the stage whose attention output and log-sum-exp are put away."""
    remembered: int = 0
    """First layers whose attention output is handed back: theirs does not run."""
    recompute_layers: int = 0
    """First layers that keep only their input in a graph, and run again in its backward (with
    what is remembered of their attention)."""
    loss: bool = False
    """Whether head and loss belong to it: with gradients in a backward, else without."""


NOTHING = Pass()

Direction = Literal["forward", "backward"]


def directions(plan: ChunkPlan, rank: int) -> tuple[Direction | None, ...]:
    """The way in which each action of `rank` goes through the layers of its stage, if it does.

    Where weights are gathered with every pass, this is the order in which they are: the layers
    ascending or descending. A recompute inside a Backward finds them there.
    """
    ways: dict[Computed, Direction | None] = {"nothing": None, "backward": "backward"}
    return tuple(ways.get(what.computes, "forward") for what in passes(plan, rank))


def passes(plan: ChunkPlan, rank: int) -> tuple[Pass, ...]:
    """One pass for every action of `rank`; NOTHING for actions that compute nothing. They are
    noted beside the plan's cached properties, for it does not change."""
    known: dict[int, tuple[Pass, ...]] = vars(plan).setdefault("_passes", {})
    if rank not in known:
        known[rank] = _passes_of(plan, rank)
    return known[rank]


def keep_passes(made: ChunkPlan, first_rank: int, plan: ChunkPlan) -> None:
    """Note the passes of `plan` as those of a plan whose ranks from `first_rank` on have its
    actions, behind some on parameters: they are the same."""
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
                # nothing behind the last projection runs, so its layer's attention is not needed
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
    """The (chunk, stage) cells whose Forward computes nothing, so that a Recompute is the first."""
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
    """For every action of `rank`, the (chunk, stage) cells whose K,V die right after it.

    The list is read backwards: the first user of a cell's K,V that is found is their last one.
    """
    actions, links = plan.actions[rank], plan.links
    frees: list[list[tuple[int, int]]] = [[] for _ in actions]
    last_use: dict[tuple[int, int], int] = {}
    unread: dict[tuple[int, int], list[int]] = {}
    """For each unbranched sequence and stage, a heap of the pieces to which no reader is known."""
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
    """For every action of `rank`, the (chunk, stage) cells whose input dies right after it.

    An input that a Recompute reads last lives on: the Backward behind it overwrites it with its
    gradient, or frees it where no stage before is trained.
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
