"""Bytes of the states that recurrent layers leave at the end of a chunk, for the next one.

The state of a cut sequence lives as long as its chunk's K,V do, in the same tier: from the pass
that writes them until the chunk's Backward (`plan.liveness`). The next chunk's passes work on a
copy, and its Backward makes the gradients: they stay on the device until the chunk's own Backward,
one set per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from furlong.cost.memory.levels import Levels
from furlong.cost.memory.rules import MemoryRules
from furlong.cost.memory.stored_layers import token_share
from furlong.plan.values import ChunkPlan


class StoredStates:
    """The states of one process, which add to its `levels`."""

    def __init__(self, rules: MemoryRules, plan: ChunkPlan, process: int, levels: Levels) -> None:
        self._plan, self._process, self._levels = plan, process, levels
        stages = range(len(plan.stages))
        self._bytes = [rules.cell(plan.stages, stage).state for stage in stages]
        """Bytes of one sequence's state at each stage."""
        self._largest = [rules.cell(plan.stages, stage).largest_state for stage in stages]

    def write(self, chunk: int, stage: int) -> None:
        """The states that leave a cell come into being, unless they are there."""
        leaving = self._bytes[stage] * sum(
            self._plan.is_read(*link) for link in self._sequences(chunk, stage)
        )
        if leaving and ("states", chunk, stage) not in self._levels.held:
            self._levels.hold("states", chunk, stage, "states", leaving)
            self._levels.write("kv", leaving, largest=self._largest[stage])

    def read(self, chunk: int, stage: int) -> None:
        """The cell starts with copies of the states of the chunk before."""
        entering = self._bytes[stage] * len(list(self._entering(chunk, stage)))
        if entering:
            self._levels.read("kv", entering)
            self._levels.pass_by("states", entering)

    def send_back(self, chunk: int, stage: int) -> None:
        """The cell's Backward makes the gradients of the states that it started with."""
        for seq_id, before in self._entering(chunk, stage):
            if before in self._plan.trained:
                name = _gradient_of(seq_id)
                self._levels.hold(name, before, stage, "states", self._bytes[stage])

    def free(self, chunk: int, stage: int) -> None:
        """The cell's states die, and their gradients."""
        self._levels.let_go("states", chunk, stage)
        for seq_id, _ in self._sequences(chunk, stage):
            self._levels.let_go(_gradient_of(seq_id), chunk, stage)

    def _entering(self, chunk: int, stage: int) -> Iterator[tuple[int, int]]:
        """Cut sequences whose state enters a chunk, and the chunk that it comes from."""
        for seq_id, position in self._sequences(chunk, stage):
            if position:
                yield seq_id, self._plan.groups[seq_id][position - 1]

    def _sequences(self, chunk: int, stage: int) -> Iterator[tuple[int, int]]:
        """Cut sequences of a chunk on this process, and their positions; none without states."""
        if not self._bytes[stage]:
            return
        slices = self._plan.chunks[chunk].slices
        here = {s.seq_id for s in slices if token_share(s, self._process)}
        for seq_id, position in self._plan.links[chunk]:
            if seq_id in here:
                yield seq_id, position


def _gradient_of(seq_id: int) -> str:
    return f"gradients of the states of {seq_id}"
