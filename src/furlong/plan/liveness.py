"""The end of memory: for each action of a rank, the cells whose K,V or inputs nobody needs.

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

from bisect import bisect_left

from furlong.plan.passes import NOTHING, passes
from furlong.plan.plan import COMPUTING, Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.plan.trees import Tree


def kv_frees(plan: ChunkPlan, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every action of `rank`, the (chunk, stage) cells whose K,V die right after it."""
    actions = plan.actions[rank]
    frees: dict[int, list[tuple[int, int]]] = {}
    born: dict[tuple[int, int], int] = {}
    held: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], _Readers | _TreeReaders] = {}

    def die(chunk: int, stage: int) -> None:
        last = max(born[chunk, stage], held.get((chunk, stage), -1))
        for seq_id, position in plan.links[chunk]:
            if (seq_id, stage) in readers:
                last = max(last, readers[seq_id, stage].latest_behind(position))
        frees.setdefault(last, []).append((chunk, stage))

    for index, action in enumerate(actions):
        if not isinstance(action, COMPUTING):
            continue
        cell = action.chunk, action.stage
        if isinstance(action, (Recompute, Backward)):
            held[cell] = index
        elif isinstance(action, RebuildKV) or plan.continues[action.chunk]:
            if cell in born:
                die(*cell)
            born[cell] = index
        for seq_id, position in plan.links[action.chunk]:
            key = seq_id, action.stage
            if key not in readers:
                tree = plan.trees.get(seq_id)
                readers[key] = _TreeReaders(tree) if tree else _Readers()
            readers[key].add(position, index)
    for cell in born:
        die(*cell)
    return tuple(tuple(frees.get(index, ())) for index in range(len(actions)))


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


class _Readers:
    """The latest action of any chunk behind a position, for one sequence at one stage.

    A new action is later than all before it, so it hides those at its own and at earlier positions.
    What remains has falling positions and rising indices: a new action costs O(1) amortized, a
    question one bisection.
    """

    def __init__(self) -> None:
        self._negated_positions: list[int] = []
        self._indices: list[int] = []

    def add(self, position: int, index: int) -> None:
        while self._negated_positions and self._negated_positions[-1] >= -position:
            self._negated_positions.pop()
            self._indices.pop()
        self._negated_positions.append(-position)
        self._indices.append(index)

    def latest_behind(self, position: int) -> int:
        """Index of the latest action at a position beyond `position`, or -1."""
        count = bisect_left(self._negated_positions, -position)
        return self._indices[count - 1] if count else -1


class _TreeReaders:
    """The latest action of any chunk that goes on from a piece, for one sequence that branches."""

    def __init__(self, tree: Tree) -> None:
        self._ends = tree.ends
        self._indices = [-1] * len(tree.ends)

    def add(self, position: int, index: int) -> None:
        self._indices[position] = index

    def latest_behind(self, position: int) -> int:
        return max(self._indices[position + 1 : self._ends[position]], default=-1)
