"""The chunks of a plan as arrays: tokens, attended keys and prefixes, per process of an sp group.

C chunks, S processes of an sp group; a sharded slice counts 1/S with every process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furlong.cost.seconds.flops import attended_keys
from furlong.plan.values import SHARDED, Chunk

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkTable:
    tokens: Array
    """(S, C) tokens that each process holds of each chunk."""
    sharded_tokens: Array
    """(C,) tokens of sharded slices, of the whole group."""
    num_slices: Array
    """(S, C) slices that each process attends to."""
    local_keys: dict[int | None, Array]
    """window -> (S, C): keys of local slices that are computed: the attended ones, and those that
    share a tile with them behind the mask."""
    sharded_keys: dict[int | None, Array]
    """window -> (C,): the same of sharded slices, of the whole group."""
    prefix_tokens: dict[int | None, Array]
    """window -> (S, C): stored tokens that the process reads before its slices, in units of whole
    heads: a sharded slice's prefix counts 1/S."""
    prefix_keys: dict[int | None, Array]
    """window -> (S, C): the attended keys that lie in those prefixes; sharded ones count 1/S."""

    @property
    def num_chunks(self) -> int:
        return int(self.tokens.shape[1])


def chunk_table(
    chunks: Sequence[Chunk], windows: Sequence[int | None], sp_size: int, tile_tokens: int = 0
) -> ChunkTable:
    """`windows`: those of the model's layers, repeats allowed. `tile_tokens`: keys of a tile of
    attention; of the one that the diagonal cuts, on average half is computed in vain."""
    kinds = list(dict.fromkeys(windows))
    shape = (sp_size, len(chunks))
    tokens, sharded_tokens = np.zeros(shape), np.zeros(len(chunks))
    num_slices = np.zeros(shape)
    local = {window: np.zeros(shape) for window in kinds}
    sharded = {window: np.zeros(len(chunks)) for window in kinds}
    prefix = {window: np.zeros(shape) for window in kinds}
    prefix_keys = {window: np.zeros(shape) for window in kinds}
    for c, chunk in enumerate(chunks):
        if chunk.is_dummy:
            tokens[:, c] = num_slices[:, c] = 1
        for piece in chunk.slices:
            n, start = piece.num_tokens, piece.start
            whole = piece.placement == SHARDED and sp_size > 1
            share, who = (1 / sp_size, slice(None)) if whole else (1.0, piece.placement % sp_size)
            tokens[who, c] += n * share
            num_slices[who, c] += 1
            in_vain = n * min(n, tile_tokens) / 2
            if whole:
                sharded_tokens[c] += n
            for window in kinds:
                keys = attended_keys(start, piece.stop, window)
                if whole:
                    sharded[window][c] += keys + in_vain
                else:
                    local[window][who, c] += keys + in_vain
                if start:
                    seen = start if window is None else min(start, window - 1)
                    prefix[window][who, c] += seen * share
                    own = attended_keys(0, n, window)
                    prefix_keys[window][who, c] += (keys - own) * share
    return ChunkTable(tokens, sharded_tokens, num_slices, local, sharded, prefix, prefix_keys)
