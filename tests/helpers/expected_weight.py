"""The expected weight of a gradient contribution if a fixed number of chunks is drawn."""

from __future__ import annotations

from math import prod

from furlong.planners.spaco import Factors


def expected_weight(num_chunks: int, num_drawn: int, hops: int, factors: Factors) -> float:
    """Return the weight a c^h of a contribution through h earlier chunks, times the probability
    that all its chunks are drawn (Eq. 6): 1 if the draw is unbiased for that many hops."""
    weight = factors.loss_factor * factors.relay_factor**hops
    return weight * prod(max(0, num_drawn - r) / (num_chunks - r) for r in range(hops + 1))
