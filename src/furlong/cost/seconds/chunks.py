"""The chunks of a plan as arrays: tokens, attended keys and prefixes, per process of a pool.

C chunks, S processes of a pool; a slice on a place of n processes counts 1/n with each of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from furlong.cost.seconds.flops import attended_keys
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.values import Chunk, Slice

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkTable:
    """Arrays of one shape, (S, C) in general."""

    tokens: Array
    """Tokens that each process holds of each chunk."""
    num_slices: Array
    """Calls of attention on each process: one for a slice, two where inner groups divide its rows,
    of which each takes an early and a late part, so that all have equally many keys."""
    exchanged_tokens: dict[int, Array]
    """size of a place, more than 1 -> tokens of the slices on the process's place of that size."""
    local_keys: dict[int | None, Array]
    """window -> keys of slices on one process that are computed: the attended ones, and those that
    share a tile with them behind the mask."""
    shared_keys: dict[int | None, Array]
    """window -> the process's part of the computed keys of slices on larger places."""
    prefix_tokens: dict[int | None, Array]
    """window -> stored tokens that the process reads before its slices, in units of whole heads: of
    a prefix it counts the share of the heads that it keeps."""
    prefix_keys: dict[int | None, Array]
    """window -> the attended keys that lie in those prefixes, in the same units."""


def chunk_table(
    chunks: Sequence[Chunk],
    model: ModelShape,
    sp_size: int,
    tile_tokens: int = 0,
    position: Callable[[Slice], int] = attrgetter("start"),
) -> ChunkTable:
    """The table of a model's chunks. `tile_tokens`: keys of a tile of attention; of the one that
    the diagonal cuts, on average half is computed in vain. `position`: that of a slice's first
    token, for sequences that branch."""
    kinds = list(dict.fromkeys(model.windows))
    shape = (sp_size, len(chunks))
    sizes = {piece.place.size for chunk in chunks for piece in chunk.slices} - {1}
    calls = {size: attention_calls(model, size) for size in (1, *sizes)}
    tokens, num_slices = np.zeros(shape), np.zeros(shape)
    exchanged = {size: np.zeros(shape) for size in sorted(sizes)}
    local, shared, prefix, prefix_keys = (
        {window: np.zeros(shape) for window in kinds} for _ in range(4)
    )
    for c, chunk in enumerate(chunks):
        if chunk.is_dummy:
            tokens[:, c] = num_slices[:, c] = 1
        before = -1
        for piece in chunk.slices:
            n, start, size = piece.num_tokens, position(piece), piece.place.size
            who = slice(piece.place.first, piece.place.stop)
            tokens[who, c] += n / size
            num_slices[who, c] += calls[size]
            if size > 1:
                exchanged[size][who, c] += n
            for window in kinds:
                keys = computed_keys(start, start + n, window, tile_tokens)
                (shared if size > 1 else local)[window][who, c] += keys / size
                if start:
                    seen = start if window is None else min(start, window - 1)
                    if piece.seq_id != before:  # branches of one parent read it once
                        prefix[window][who, c] += seen * model.kv_share(size)
                    earlier = attended_keys(start, start + n, window) - attended_keys(0, n, window)
                    prefix_keys[window][who, c] += earlier / size
            before = piece.seq_id
    return ChunkTable(tokens, num_slices, exchanged, local, shared, prefix, prefix_keys)


def attention_calls(model: ModelShape, place_size: int) -> int:
    """Calls of attention that a slice takes on each process of its place (zigzag, as context
    parallelism balances causal attention: parts b and 2 c - 1 - b of 2 c for group b of c)."""
    return 1 if model.inner_size(place_size) == place_size else 2


def computed_keys(start: int, stop: int, window: int | None, tile_tokens: int) -> float:
    """Keys of the tokens [start, stop) of a sequence: those that they attend, and those of their
    tiles behind the mask."""
    num_tokens = stop - start
    return attended_keys(start, stop, window) + num_tokens * min(num_tokens, tile_tokens) / 2
