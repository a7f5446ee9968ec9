"""What is alive of a cell between its actions, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from furlong.plan.values import Action, Backward, Forward, RebuildKV, Recompute
from furlong.runtime.cell import Cell
from furlong.runtime.rng import RNGState
from furlong.runtime.saved_graphs import SavedGraph


@dataclass(slots=True)
class LiveCell:
    """What a cell holds between its forward and its backward."""

    cell: Cell
    x: Tensor | None = None
    """The leaf (T, D) that entered the graph, behind the first stage."""
    output: Tensor | None = None
    """Hidden states (T, D) behind the stage, with their graph."""
    rng: RNGState | None = None
    saved: SavedGraph | None = None
    """What the graph of a retained cell has in a lower tier."""


def last_actions(actions: Sequence[Action]) -> dict[tuple[int, int], int]:
    """By (chunk, stage): the index of the last action on each cell of a rank."""
    computing = (Forward, Recompute, RebuildKV, Backward)
    return {(a.chunk, a.stage): i for i, a in enumerate(actions) if isinstance(a, computing)}
