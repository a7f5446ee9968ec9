"""Result of a call of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from furlong.plan.plan import ChunkPlan
from furlong.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """The summed loss divided by the divisor."""
    loss_sum: float
    num_valid_tokens: int
    """Tokens with a label in this call."""
    timeline: Timeline
    token_losses: tuple[Tensor, ...] = ()
    """Losses of an evaluation (backward=False): one (T,) float64 tensor per sequence, on the CPU.
    Entry t is the loss of token t + 1 given those up to t; 0 where that has no label."""
    plan: ChunkPlan | None = None
    """The plan that ran, of which the timeline tells."""
    host_bytes: int = 0
    """Most bytes at a time in the tier host."""
    disk_bytes: int = 0
    has_drawn: bool = False
    """Whether a forward in train mode drew random numbers on this process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures of the loss, by name."""
