"""Costs without hardware, as ChunkFlow's figures have them.

Time is proportional to tokens, a backward takes twice as long as a forward, messages take no time.
"""

from __future__ import annotations

from furlong.plan.plan import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Reduce,
    Send,
    Unshard,
)


class UnitCosts:
    """ActionCosts of one plan, in units instead of seconds; a dummy counts one token.

    Layers that a Forward or a Recompute has checkpointed run once more within the Backward
    (InfiniPipe, Eq. 11).
    """

    def __init__(self, plan: ChunkPlan) -> None:
        self._tokens = [chunk.num_tokens or 1 for chunk in plan.chunks]
        mean = max(1, sum(plan.stages)) / max(1, len(plan.stages))
        self._heights = [num_layers / mean for num_layers in plan.stages]
        self._again: dict[tuple[int, int], float] = {}
        """Share of a cell's layers that its Backward recomputes."""
        for actions in plan.actions:
            for action in actions:
                if isinstance(action, (Forward, Recompute)) and action.recompute_layers:
                    share = action.recompute_layers / plan.stages[action.stage]
                    self._again[action.chunk, action.stage] = share

    def compute_s(self, action: Action, rank: int) -> float:
        match action:
            case Forward(chunk, stage) | Recompute(chunk, stage) | RebuildKV(chunk, stage):
                return self._tokens[chunk] * self._heights[stage]
            case Backward(chunk, stage):
                share = 2 + self._again.get((chunk, stage), 0.0)
                return self._tokens[chunk] * self._heights[stage] * share
        return 0.0

    def transfer_s(self, action: Send, rank: int) -> float:
        return 0.0

    def link_s(self, action: Reduce, rank: int) -> float:
        return 0.0

    def blocking_s(self, action: Unshard | Reduce, rank: int) -> float:
        return 0.0

    def head_s(self, action: Unshard, rank: int) -> float:
        return 0.0
