"""Pack whole sequences into as few chunks as best-fit-decreasing finds.

ChunkFlow (Algorithm 1) tries bin counts upwards until a packing succeeds. Opening a bin only when
no open one has room gives the same count in one pass: with fewer bins the same pass would have
failed. A best fit needs "the smallest free space of at least n", which a set of whole numbers kept
as bits answers in constant time, so the sort is the dearest part: O(n log n).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isqrt

from furlong.errors import DataError


def pack(
    seq_lens: Mapping[int, int], chunk_size: int, *, taken: Sequence[int] = ()
) -> list[list[int]]:
    """Bins of seq_ids whose tokens fit into `chunk_size`; `seq_lens` maps seq_ids to tokens.

    `taken` offers bins that are partly filled already, each with that many tokens in it. They come
    first in the result, and stay there when nothing was added.
    """
    for seq_id, seq_len in seq_lens.items():
        if not 1 <= seq_len <= chunk_size:
            raise DataError(
                given=f"sequence {seq_id} has {seq_len} tokens",
                required=f"1 to {chunk_size} tokens in a sequence that is to be packed",
                source="the lengths of the global batch",
                change="leave out empty sequences; cut longer ones first",
            )
    # with room for all in one bin, more room changes nothing
    chunk_size = min(chunk_size, sum(seq_lens.values()) + sum(taken))
    bins: list[list[int]] = [[] for _ in taken]
    bins_by_free: dict[int, list[int]] = defaultdict(list)
    sizes = _SmallIntegers(chunk_size)
    for index, num_tokens in enumerate(taken):
        bins_by_free[chunk_size - num_tokens].append(index)
        sizes.add(chunk_size - num_tokens)
    for seq_id in sorted(seq_lens, key=lambda seq_id: (-seq_lens[seq_id], seq_id)):
        free = sizes.at_least(seq_lens[seq_id])
        if free is None:
            free = chunk_size
            index = len(bins)
            bins.append([])
        else:
            index = bins_by_free[free].pop()
            if not bins_by_free[free]:
                sizes.remove(free)
        bins[index].append(seq_id)
        left = free - seq_lens[seq_id]
        bins_by_free[left].append(index)
        sizes.add(left)
    return bins


class _SmallIntegers:
    """A set of integers in [0, highest] as two levels of bits, each about sqrt(highest) wide."""

    def __init__(self, highest: int) -> None:
        self._width = isqrt(highest) + 1
        self._words = [0] * (highest // self._width + 1)
        self._non_empty = 0

    def add(self, value: int) -> None:
        word, bit = divmod(value, self._width)
        self._words[word] |= 1 << bit
        self._non_empty |= 1 << word

    def remove(self, value: int) -> None:
        word, bit = divmod(value, self._width)
        self._words[word] &= ~(1 << bit)
        if not self._words[word]:
            self._non_empty &= ~(1 << word)

    def at_least(self, value: int) -> int | None:
        """The smallest member that is no less than `value`."""
        word, bit = divmod(value, self._width)
        if found := self._words[word] >> bit:
            return value + _lowest_bit(found)
        if not (later := self._non_empty >> (word + 1)):
            return None
        word += 1 + _lowest_bit(later)
        return word * self._width + _lowest_bit(self._words[word])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
