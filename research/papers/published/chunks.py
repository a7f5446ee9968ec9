"""Ways to make and to deal chunks that only published methods have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from furlong.cost.shape import ModelShape
from furlong.errors import DataError
from furlong.plan.plan import Chunk, Slice
from furlong.planners.chunks import (
    by_cost,
    pack,
    refuse_idle,
    refuse_unusable,
    sequence_work,
    split_equal_work,
)
from furlong.units import count_words


def _longest_first(groups: Iterable[list[Chunk]]) -> list[list[Chunk]]:
    return sorted(groups, key=lambda group: -sum(chunk.num_tokens for chunk in group))


def whole_groups(seq_lens: Sequence[int]) -> list[list[Chunk]]:
    """A group of one chunk for every sequence."""
    return sliced_groups(seq_lens, num_slices=1)


def sliced_groups(
    seq_lens: Sequence[int], *, num_slices: int, quadratic: float = 0.0, linear: float = 1.0
) -> list[list[Chunk]]:
    """A group for every sequence, cut into `num_slices` chunks of equal tokens, or with `quadratic`
    of equal work (`split_equal_work`); Seq1F1B's two ways."""
    refuse_unusable(seq_lens)
    work = {"quadratic": quadratic, "linear": linear}
    return _longest_first(
        [Chunk((piece,)) for piece in split_equal_work(seq_id, seq_len, num_slices, **work)]
        for seq_id, seq_len in enumerate(seq_lens)
    )


def padded_groups(
    seq_lens: Sequence[int], *, pad_to: int | None = None
) -> tuple[tuple[int, ...], list[list[Chunk]]]:
    """A group of one chunk for every sequence, padded to `pad_to` tokens (None: to the longest).

    Returns the padded lengths too: for a plan a padding token is a token, only without a label.
    """
    longest = max(seq_lens, default=0)
    target = longest if pad_to is None else pad_to
    if target < longest:
        raise DataError(
            given=f"a sequence of {count_words(longest, 'token')} that is to be padded to {target}",
            required=f"at least {count_words(longest, 'token')}",
            source="the lengths of the global batch",
            change="pad to more tokens, or cut the sequence",
        )
    padded = (target,) * len(seq_lens)
    return padded, whole_groups(padded)


def packed_groups(seq_lens: Sequence[int], chunk_size: int) -> list[list[Chunk]]:
    """Whole sequences packed into chunks of at most `chunk_size` tokens; none is cut."""
    refuse_unusable(seq_lens)
    bins = pack(dict(enumerate(seq_lens)), chunk_size)
    return _longest_first(
        [Chunk(tuple(Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids))] for seq_ids in bins
    )


def by_order(num_sequences: int, dp_size: int) -> list[list[int]]:
    """The seq_ids of each replica, dealt in turn as a plain distributed sampler does."""
    refuse_idle(num_sequences, dp_size)
    return [list(range(replica, num_sequences, dp_size)) for replica in range(dp_size)]


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
