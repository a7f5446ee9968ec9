"""The longest sequence that a plan's dials could still train: memory only, one sequence alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.cost.model import CostModel
from furlong.errors import PlanError, UserError
from furlong.plan.plan import ChunkPlan
from furlong.planners.budget import fit
from furlong.planners.published.build import build, replica_model, settled
from furlong.planners.published.dials import Dials

MAX_CHUNKS = 2048
"""Chunks of the sequences that are tried: more take too long to plan for a figure."""
MAX_ACTIONS = 6_000
"""Most actions of one rank in a plan that is tried."""
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
    dials: Dials,
    plan: ChunkPlan,
    model: CostModel,
    *,
    budget_bytes: int | None = None,
    start: int = 1024,
    num_positions: int | None = None,
) -> Longest:
    """By bisection, to 1 % or a token, with the dials of `plan` and what it has recomputed.

    `start`: a length to try first; `num_positions`: the most that the model has, None where that is
    unknown. The other replicas share the state and hold less.
    """
    fixed, one_of = settled(dials, plan), replica_model(dials, model)

    def try_length(num_tokens: int) -> ChunkPlan | None:
        """The plan, or None where there is none that fits."""
        try:
            tried = build(fixed, [num_tokens], one_of, budget_bytes)
            fit(tried, one_of, budget_bytes)
        except (UserError, PlanError):
            return None
        return tried

    most = num_positions or MAX_TOKENS
    low, high = 0, min(max(1, start), most)
    while (tried := try_length(high)) is not None:
        low = high
        if high == num_positions:
            return Longest(low, "positions")
        is_large = len(tried.chunks) >= MAX_CHUNKS or len(tried.actions[0]) >= MAX_ACTIONS
        if is_large or high >= most:
            return Longest(low, "trials")
        high = min(2 * high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if try_length(middle) is not None else (low, middle)
    return Longest(low, "memory")
