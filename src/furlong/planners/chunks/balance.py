"""Deals the sequences of a global batch to data-parallel replicas.

A step is as slow as its slowest replica, and whatever is balanced decides which that is: tokens
balance memory and matrices, work also the attention that grows with the square of a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Literal

from furlong.cost.seconds.flops import stage_flops
from furlong.cost.shapes.shape import ModelShape
from furlong.errors import ConfigError
from furlong.units import count_words

Balance = Literal["none", "tokens", "flops", "time"]
"""Ways to deal sequences to replicas: in turn, of equal tokens, of equal work; or, by who plans
them, of equal time (`by_speed`), which begins with equal work."""


def deal_sequences(
    seq_lens: Sequence[int], shape: ModelShape, dp_size: int, balance: Balance
) -> list[list[int]]:
    """The seq_ids of each replica."""
    match balance:
        case "none":
            return by_order(len(seq_lens), dp_size)
        case "tokens":
            return by_cost(seq_lens, dp_size)
        case "flops" | "time":
            return by_cost(sequence_work(seq_lens, shape), dp_size)


def by_order(num_sequences: int, dp_size: int) -> list[list[int]]:
    """The seq_ids of each replica, dealt in turn as a plain distributed sampler does."""
    refuse_idle(num_sequences, dp_size)
    return [list(range(replica, num_sequences, dp_size)) for replica in range(dp_size)]


def by_cost(costs: Sequence[float], dp_size: int) -> list[list[int]]:
    """The seq_ids of each replica, of about equal sums of `costs` (one per sequence).

    Longest processing time first (Graham 1969): the dearest sequence goes to the replica with least
    so far. At most 4/3 of the best makespan. No replica is empty.
    """
    refuse_idle(len(costs), dp_size)
    replicas: list[list[int]] = [[] for _ in range(dp_size)]
    lightest = [(0.0, 0, replica) for replica in range(dp_size)]
    heapify(lightest)
    for seq_id in sorted(range(len(costs)), key=lambda seq_id: (-costs[seq_id], seq_id)):
        total, count, replica = lightest[0]
        replicas[replica].append(seq_id)
        # of equal sums the one with fewer sequences, so that costs of zero leave nobody idle
        heapreplace(lightest, (total + costs[seq_id], count + 1, replica))
    return replicas


def by_speed(
    work: Sequence[float], dealt: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[list[int]]:
    """The sequences dealt anew, longest processing time first, where a unit of work takes each
    replica as long as in `dealt`, whose replicas took `seconds`.

    The sequence of most work stays, or replicas would only change their roles.
    """
    rates = [s / sum(work[i] for i in own) for own, s in zip(dealt, seconds, strict=True)]
    first, *others = sorted(range(len(work)), key=lambda i: (-work[i], i))
    home = next(replica for replica, own in enumerate(dealt) if first in own)
    replicas: list[list[int]] = [[] for _ in dealt]
    loads_s = [0.0] * len(dealt)
    for seq_id in (first, *others):
        ends_s = [load + work[seq_id] * rate for load, rate in zip(loads_s, rates, strict=True)]
        replica = home if seq_id == first else ends_s.index(min(ends_s))
        replicas[replica].append(seq_id)
        loads_s[replica] = ends_s[replica]
    return replicas if all(replicas) else [list(own) for own in dealt]


def sequence_work(seq_lens: Sequence[int], shape: ModelShape) -> list[float]:
    """FLOPs of a forward of each whole sequence, head included: Skrull's Eq. 13 with the exact
    constants of the model (its quadratic term halved, since attention is causal)."""
    whole = stage_flops(shape, (shape.num_layers,), 0)
    return [whole.sequence(seq_len).total for seq_len in seq_lens]


def refuse_idle(num_sequences: int, dp_size: int) -> None:
    """Raises ConfigError where there are fewer sequences than replicas, or no replicas."""
    if 1 <= dp_size <= num_sequences:
        return
    works = f"set dp to at most {num_sequences}, or put more sequences into a step"
    raise ConfigError(
        given=f"dp {dp_size} for a global batch of {count_words(num_sequences, 'sequence')}",
        required="at least one replica, and at least one sequence for each",
        source="the size of the data-parallel axis and the sequences of a step",
        change=works if num_sequences else "put at least one sequence into a step",
    )
