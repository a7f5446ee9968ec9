"""Packs whole sequences into as few chunks as best-fit-decreasing finds.

ChunkFlow (Algorithm 1) tries bin counts upwards until a packing succeeds. Opening a bin only when
no open one has room gives the same count in one pass: with fewer bins the same pass would have
failed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import count

from furlong.errors import DataError
from furlong.units import count_words


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
                given=f"sequence {seq_id} has {count_words(seq_len, 'token')}",
                required=f"1 to {count_words(chunk_size, 'token')} in each sequence to be packed",
                source="the lengths of the global batch",
                change="leave out empty sequences; cut longer ones first",
            )
    bins: list[list[int]] = [[] for _ in taken]
    stamps = count(0, -1)  # of bins with equal space the one that was filled last
    spaces = sorted((chunk_size - n, next(stamps), index) for index, n in enumerate(taken))
    for seq_id in sorted(seq_lens, key=lambda seq_id: (-seq_lens[seq_id], seq_id)):
        place = bisect_left(spaces, (seq_lens[seq_id],))
        if place < len(spaces):
            space, _, index = spaces.pop(place)
        else:
            space, index = chunk_size, len(bins)
            bins.append([])
        bins[index].append(seq_id)
        insort(spaces, (space - seq_lens[seq_id], next(stamps), index))
    return bins
