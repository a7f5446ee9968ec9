"""Everything alive during a step: cells' graphs, kept tensors, K,V. Empty at its end."""

from __future__ import annotations

from typing import Literal

Held = Literal["graph", "attention", "kv", "input", "gradient"]
"""input: hidden states that enter a cell; gradient: the gradient of that input, for the stage
before. What waits for its Send lies in the executor's outbox."""


class Ledger:
    def __init__(self) -> None:
        self._alive: set[tuple[Held, int, int]] = set()

    def hold(self, what: Held, chunk: int, stage: int) -> None:
        entry = (what, chunk, stage)
        assert entry not in self._alive, f"{what} of cell {chunk}.{stage} is held twice"
        self._alive.add(entry)

    def release(self, what: Held, chunk: int, stage: int) -> None:
        entry = (what, chunk, stage)
        assert entry in self._alive, f"{what} of cell {chunk}.{stage} is not held"
        self._alive.remove(entry)

    def turn(self, chunk: int, stage: int) -> None:
        """A cell's input becomes the gradient of that input: one buffer, read as two things."""
        self.release("input", chunk, stage)
        self.hold("gradient", chunk, stage)

    def holds(self, what: Held, chunk: int, stage: int) -> bool:
        return (what, chunk, stage) in self._alive

    def assert_empty(self) -> None:
        assert not self._alive, f"left over at the end of the step: {sorted(self._alive)}"
