"""What a draw of a fixed number of chunks gives a contribution on average (`planners.spaco`)."""

from __future__ import annotations

from math import prod

from furlong.planners.spaco import Factors


def expected_weight(num_chunks: int, num_drawn: int, hops: int, factors: Factors) -> float:
    """The weight a c^h of a contribution through h earlier chunks times the probability that all
    its chunks are among `num_drawn` (Eq. 6): 1 where the draw is unbiased for that many hops."""
    weight = factors.loss_factor * factors.relay_factor**hops
    return weight * prod(max(0, num_drawn - r) / (num_chunks - r) for r in range(hops + 1))
