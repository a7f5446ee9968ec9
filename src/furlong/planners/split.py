"""Cut long sequences into pieces (ChunkFlow, Algorithm 1, first half)."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.values import Slice


def split_long(seq_lens: Sequence[int], chunk_size: int) -> dict[int, list[Slice]]:
    """The pieces of every sequence longer than `chunk_size`, by its seq_id.

    All pieces but the last have `chunk_size` tokens; the last has the rest.
    """
    return {
        seq_id: [
            Slice(seq_id, start, min(start + chunk_size, seq_len))
            for start in range(0, seq_len, chunk_size)
        ]
        for seq_id, seq_len in enumerate(seq_lens)
        if seq_len > chunk_size
    }
