"""Hidden states between stages: a cell's input, which becomes the gradient of that input.

Both live in one buffer of the pool `inputs`, under one handle; the ledger knows which of the two it
is, so that a Backward out of order cannot read hidden states as gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from furlong.kv.pools.contract import Handle, Lease, Pool
from furlong.plan.plan import Action, Backward, Forward, RebuildKV, Recompute
from furlong.runtime.memory.ledger import Ledger

_Cell = tuple[int, int]
"""(chunk, stage) of the cell that the hidden states enter."""


class StageInputs:
    """Inputs of all cells behind the first stage, and their gradients, (T, D) each."""

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._pool, self._ledger = pool, ledger
        self._handles: dict[_Cell, Handle] = {}

    def deliver(self, cell: _Cell, hidden: Tensor) -> None:
        """Keep the output of the stage before as the cell's input."""
        self._ledger.hold("input", *cell)
        self._handles[cell] = self._pool.put(hidden.detach())

    def read(self, cell: _Cell) -> Lease:
        """The cell's input."""
        assert self._ledger.holds("input", *cell), f"no input of cell {cell} is there"
        return self._pool.get(self._handles[cell])

    def deliver_gradient(self, cell: _Cell, gradient: Tensor) -> None:
        """Keep the gradient of the cell's input, for the stage before, in the input's place."""
        if self._ledger.holds("input", *cell):
            self._ledger.turn(*cell)
            self._pool.overwrite(self._handles[cell], gradient)
        else:
            self._ledger.hold("gradient", *cell)
            self._handles[cell] = self._pool.put(gradient)

    def read_gradient(self, cell: _Cell) -> Lease:
        """The gradient of the cell's input."""
        assert self._ledger.holds("gradient", *cell), f"no gradient of cell {cell} is there"
        return self._pool.get(self._handles[cell])

    def drop(self, cell: _Cell) -> None:
        """Forget the cell's input, or its gradient."""
        self._ledger.release("input" if self._ledger.holds("input", *cell) else "gradient", *cell)
        self._pool.drop(self._handles.pop(cell))

    def expect_for(self, actions: Sequence[Action]) -> None:
        """Begin to bring what is there of the cells that these actions read."""
        for action in actions:
            match action:
                case Forward(chunk, stage) | Recompute(chunk, stage) | RebuildKV(chunk, stage):
                    self._expect((chunk, stage))
                case Backward(chunk, stage):
                    self._expect((chunk, stage + 1))

    def _expect(self, cell: _Cell) -> None:
        handle = self._handles.get(cell)
        if handle is not None:
            self._pool.prefetch(handle)
