"""A cell between its actions: what of it is alive, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from furlong.plan.plan import Action, Backward, Forward, RebuildKV, Recompute
from furlong.runtime.cells.cell import Cell
from furlong.runtime.memory.saved_graphs import SavedGraph
from furlong.runtime.rng import RNGState


@dataclass(slots=True)
class LiveCell:
    """A cell with all that it holds between its forward and its backward."""

    cell: Cell
    x: Tensor | None = None
    """The leaf (T, D) that entered the graph, behind the first stage."""
    output: Tensor | None = None
    """Hidden states (T, D) behind the stage, with their graph."""
    rng: RNGState | None = None
    saved: SavedGraph | None = None
    """Tensors of a retained graph that wait in a lower tier."""

    def forget_graph(self) -> None:
        """Drop what only its backward needed."""
        self.output = None
        self.cell.forget()
        if self.saved is not None:
            self.saved.drop()


def last_actions(actions: Sequence[Action]) -> dict[tuple[int, int], int]:
    """By (chunk, stage): the index of the last action on each cell of a rank."""
    computing = (Forward, Recompute, RebuildKV, Backward)
    return {(a.chunk, a.stage): i for i, a in enumerate(actions) if isinstance(a, computing)}
