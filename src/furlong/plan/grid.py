"""A plan's actions found by cell, and the errors that show a broken plan.

The actions of all ranks stand in one list, rank after rank; `at` is always a place in that list. A
cell is a number, stage * num_chunks + chunk, so that its neighbours are one addition away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from furlong.errors import PlanError
from furlong.plan.text import format_action, format_chunk
from furlong.plan.values import MESSAGES, ON_PARAMETERS, Action, Backward, ChunkPlan, Forward, Keep
from furlong.units import count_words

_NUM_AROUND = 4
_ARROW = "    <-- here"


class Grid:
    """The places of each cell's Forward and Backward, for the checks of one plan."""

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self.num_chunks = len(plan.chunks)
        self.num_stages = len(plan.stages)
        self.actions: list[Action] = [action for actions in plan.actions for action in actions]
        self.kinds = [type(action) for action in self.actions]
        self.ranks = [rank for rank, actions in enumerate(plan.actions) for _ in actions]
        self.starts = [0]
        for actions in plan.actions:
            self.starts.append(self.starts[-1] + len(actions))
        self.cells = [self._cell(at, action) for at, action in enumerate(self.actions)]
        """The cell of each action; of an action on parameters, the stage's first."""
        num_cells = self.num_chunks * self.num_stages
        self.forward = self._first(Forward, num_cells)
        """The place of each cell's first Forward, or -1."""
        self.backward = self._first(Backward, num_cells)
        self.keep: list[Keep | None] = [
            action.keep if at >= 0 and isinstance(action := self.actions[at], Forward) else None
            for at in self.forward
        ]
        """Each cell's `keep`, None for a cell without a Forward."""
        groups = plan.groups
        self.before = [
            [
                groups[seq_id][plan.trees[seq_id].parents[at] if seq_id in plan.trees else at - 1]
                for seq_id, at in links
                if at
            ]
            for links in plan.links
        ]
        """For each chunk, the ones that it goes on from."""

    def _cell(self, at: int, action: Action) -> int:
        rule = "every action names a cell of the grid"
        if not 0 <= action.stage < self.num_stages:
            raise self.refuse(rule, f"the plan has {count_words(self.num_stages, 'stage')}", at)
        if isinstance(action, ON_PARAMETERS):
            return action.stage * self.num_chunks
        if not 0 <= action.chunk < self.num_chunks:
            raise self.refuse(rule, f"the plan has {count_words(self.num_chunks, 'chunk')}", at)
        if isinstance(action, MESSAGES):
            peers = range(len(self.plan.actions))
            if action.peer not in peers or action.peer == self.ranks[at]:
                raise self.refuse(rule, f"{action.peer} is no other rank of the plan", at)
        return action.stage * self.num_chunks + action.chunk

    def _first(self, kind: type[Action], num_cells: int) -> list[int]:
        places = [-1] * num_cells
        for at, (other, cell) in enumerate(zip(self.kinds, self.cells, strict=True)):
            if other is kind and places[cell] < 0:
                places[cell] = at
        return places

    def each(self, *kinds: type[Action]) -> Iterator[tuple[int, Action, int]]:
        """The place, the action and the cell of every action of some kinds."""
        for at, (kind, action, cell) in enumerate(
            zip(self.kinds, self.actions, self.cells, strict=True)
        ):
            if kind in kinds:
                yield at, action, cell

    def rank_of_forward(self, cell: int) -> int:
        """The rank that has the cell's first Forward."""
        return self.ranks[self.forward[cell]]

    def name(self, cell: int) -> str:
        """`chunk.stage`, as in an action's text."""
        stage, chunk = divmod(cell, self.num_chunks)
        return f"{chunk}.{stage}"

    def waiting_words(self, stuck: Sequence[tuple[int, int]]) -> str:
        """The (rank, place of its action) that wait for each other, in words."""
        texts = [f"rank {rank} at '{format_action(self.actions[at])}'" for rank, at in stuck]
        return "these wait for ever: " + ", ".join(texts)

    def refuse(self, rule: str, why: str, at: int) -> PlanError:
        """The error for a broken rule, showing the actions around the guilty one."""
        rank = self.ranks[at]
        guilty = at - self.starts[rank]
        shown = range(*_around(guilty, self.plan.actions[rank]))
        lines = [f"{i:6d}  {format_action(self.plan.actions[rank][i])}" for i in shown]
        lines[shown.index(guilty)] += _ARROW
        return PlanError("\n".join([f"broken rule: {rule}", why, f"rank {rank}", *lines]))


def refuse_chunk(plan: ChunkPlan, rule: str, why: str, chunk: int) -> PlanError:
    """The error for a broken rule, showing the chunks around the guilty one."""
    shown = range(*_around(chunk, plan.chunks))
    lines = [f"{i:6d}  {format_chunk(plan.chunks[i], plan.sp_size):.80}" for i in shown]
    if lines:
        lines[shown.index(chunk)] += _ARROW
    return PlanError("\n".join([f"broken rule: {rule}", why, "chunks", *lines]))


def _around(middle: int, values: Sequence[object]) -> tuple[int, int]:
    return max(0, middle - _NUM_AROUND), min(len(values), middle + _NUM_AROUND + 1)


Breaks = Iterator[tuple[str, int]]
"""The ways in which a plan breaks a rule: why, and the place of the guilty action."""
Rule = tuple[str, Callable[[Grid], Breaks]]
