"""The longest sequence that a decision could still train: memory only, one sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from furlong.errors import PlanError, UserError
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import plan_replica
from furlong.planners.predict import needs_of
from furlong.planners.question import Answer

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
    answer: Answer, *, start: int = 1024, num_positions: int | None = None
) -> Longest:
    """By bisection, to 1 % or a token, with the chosen method and with the dials of its layout.

    `start`: a length to try first; `num_positions`: the most that the model has, None where that is
    unknown. The other replicas share the state and hold less.
    """
    question, layout = answer.question, answer.best.candidate.layout
    model, stages = question.model_of(layout), question.stages_of(layout)
    memory, options = model.memory(), answer.dials.candidate.options

    def plans(num_tokens: int) -> Iterator[ChunkPlan]:
        yield plan_replica(
            [num_tokens], options, num_layers=model.shape.num_layers, stages=stages,
            sp_size=layout.sp,
        )  # fmt: skip
        if answer.best is not answer.dials:
            with suppress(UserError):
                yield answer.best.candidate.plan_of([num_tokens])

    def try_length(num_tokens: int) -> ChunkPlan | None:
        """The plan, or None where there is none that fits."""
        with suppress(PlanError):
            for plan in plans(num_tokens):
                curves = (memory.curve(plan, rank) for rank in range(len(plan.actions)))
                if all(question.limits.hold(needs_of(curve)) for curve in curves):
                    return plan
        return None

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
