"""Ways to make groups of chunks.

A group is all pieces of one sequence in order, branches included, or one packed chunk. Groups run
in the order in which they are listed; these functions list the one with most tokens first, since a
short sequence before a long one interrupts the steady phase of a pipeline (InfiniPipe, III-C).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from furlong.errors import DataError
from furlong.plan.values import Chunk, Slice
from furlong.planners.chunks.branches import Forks, branch_chunks
from furlong.planners.chunks.pack import pack
from furlong.planners.chunks.split import split_equal_work, split_long
from furlong.planners.options import ChunkOptions
from furlong.units import count_words

Groups = Sequence[Sequence[Chunk]]


def group_chunks(
    seq_lens: Sequence[int], options: ChunkOptions, forks: Forks | None = None
) -> list[list[Chunk]]:
    """The chunks of every cut sequence, and every packed chunk by itself; most tokens first.
    `forks`: where sequences branch."""
    refuse_unusable(seq_lens)
    forks = forks or {}
    groups = [
        [Chunk((piece,)) for piece in pieces]
        for seq_id, pieces in split_long(seq_lens, options.size).items()
        if seq_id not in forks
    ]
    groups += [branch_chunks(i, seq_lens[i], own, options.size) for i, own in forks.items()]
    cut = {group[0].slices[0].seq_id for group in groups}
    short = {seq_id: n for seq_id, n in enumerate(seq_lens) if seq_id not in cut}
    tails = [group[-1].num_tokens for group in groups] if options.hybrid else []
    bins = [
        [Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids]
        for seq_ids in pack(short, options.size, taken=tails)
    ]
    if options.hybrid:
        for group, joined in zip(groups, bins, strict=False):
            # a chunk's piece with a prefix comes first
            group[-1] = Chunk((*group[-1].slices, *joined))
    groups += [[Chunk(tuple(slices))] for slices in bins[len(tails) :]]
    return longest_first(groups)


def whole_groups(seq_lens: Sequence[int]) -> list[list[Chunk]]:
    """A group of one chunk for every sequence."""
    return sliced_groups(seq_lens, num_slices=1)


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
    return longest_first(
        [Chunk(tuple(Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids))] for seq_ids in bins
    )


def sliced_groups(
    seq_lens: Sequence[int], *, num_slices: int, quadratic: float = 0.0, linear: float = 1.0
) -> list[list[Chunk]]:
    """A group for every sequence, cut into `num_slices` chunks of equal tokens, or with `quadratic`
    of equal work (`planners.chunks.split.split_equal_work`); Seq1F1B's two ways."""
    refuse_unusable(seq_lens)
    work = {"quadratic": quadratic, "linear": linear}
    return longest_first(
        [Chunk((piece,)) for piece in split_equal_work(seq_id, seq_len, num_slices, **work)]
        for seq_id, seq_len in enumerate(seq_lens)
    )


def refuse_unusable(seq_lens: Sequence[int]) -> None:
    """Raises DataError for a batch without sequences and for a sequence without tokens."""
    empty = next((seq_id for seq_id, seq_len in enumerate(seq_lens) if seq_len < 1), None)
    if seq_lens and empty is None:
        return
    raise DataError(
        given="no sequences" if empty is None else f"sequence {empty} has {seq_lens[empty]} tokens",
        required="at least one sequence, and at least one token in each",
        source="the lengths of the global batch",
        change="give every rank a sequence; one token without a label will do",
    )


def longest_first(groups: Iterable[Sequence[Chunk]]) -> list[list[Chunk]]:
    """The groups by falling tokens; equal ones stay in their order."""
    return sorted(map(list, groups), key=lambda group: -sum(chunk.num_tokens for chunk in group))
