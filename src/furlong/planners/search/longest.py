"""The longest sequence that a candidate could still train: memory only, one sequence alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from furlong.cost.model import CostModel
from furlong.errors import PlanError, UserError
from furlong.plan.values import ChunkPlan
from furlong.planners.budget import fit
from furlong.planners.search.candidates import Candidate

MAX_CHUNKS = 2048
"""Chunks of the sequences that are tried: more take too long to plan for a figure."""
MAX_ACTIONS = 6_000
"""The same of one rank's actions."""
MAX_TOKENS = 2**28


@dataclass(frozen=True, slots=True)
class Longest:
    """The answer to how long a sequence may be."""

    num_tokens: int
    """0 where not even one token fits."""
    limit: Literal["memory", "positions", "trials"]
    """Reason for the limit: a longer sequence does not fit, the model has no more positions, or
    nothing longer was tried."""


def longest_sequence(
    candidate: Candidate,
    model: CostModel,
    *,
    budget_bytes: int | None = None,
    start: int = 1024,
    num_positions: int | None = None,
) -> Longest:
    """By bisection, to 1 % or a token. `start`: a length to try first; `num_positions`: the most
    that the model has, None where that is unknown.

    The other replicas share the state and hold less; one that a method deals to itself holds a
    sequence of one token.
    """
    dp = candidate.layout.dp
    others = [1] * (dp - 1) if candidate.deals_itself else []
    training = replace(model.training, replicas=1 if others else dp)
    one_of = replace(model, training=training)

    def try_length(num_tokens: int) -> ChunkPlan | None:
        """The plan, or None where there is none that fits."""
        try:
            plan = candidate.build([num_tokens, *others], one_of)
            fit(plan, one_of, budget_bytes)
        except (UserError, PlanError):
            return None
        return plan

    most = num_positions or MAX_TOKENS
    low, high = 0, min(max(1, start), most)
    while (plan := try_length(high)) is not None:
        low = high
        if high == num_positions:
            return Longest(low, "positions")
        is_large = len(plan.chunks) >= MAX_CHUNKS or len(plan.actions[0]) >= MAX_ACTIONS
        if is_large or high >= most:
            return Longest(low, "trials")
        high = min(2 * high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if try_length(middle) is not None else (low, middle)
    return Longest(low, "memory")
