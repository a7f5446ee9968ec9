"""The tokens of a cut sequence whose K,V a layer stores, and the segments that they are cut into.

The KV store and the cost model both use these numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from furlong.plan.plan import Tree

NUM_HOT = 2
"""Newest segments of a prefix whose gradients stay on the device when K,V are offloaded."""
KERNEL_STEP = 128
"""cuDNN requires multiples of this many rows and keys (`furlong.ops.backends.cudnn`)."""
_MIN_SEGMENT_TOKENS, _MAX_SEGMENT_TOKENS, _MAX_BLOCK_TOKENS = 512, 8192, 32_768
_SEGMENT_BYTES = {"cpu": 2**21}
_SEGMENT_BYTES_ELSEWHERE = 2**25
"""Bytes of 8,192 keys and values with 8 heads of 128 in 16 bits. With 2,048 keys, a GPU's overhead
per call would be a fifth of the call."""


def row_step(device_type: str, sp_size: int = 1) -> int:
    """Return the step in tokens at which slices may be cut: slices that are sharded over `sp_size`
    processes should begin at its multiples, which suit GPU kernels. On a CPU the step is 1."""
    return KERNEL_STEP * sp_size if device_type == "cuda" else 1


def segment_tokens(token_bytes: float, device_type: str, is_moved: bool) -> int:
    """Return the number of tokens per segment; `token_bytes`: K and V of one token in one layer.

    A segment holds the keys of one kernel call. On a GPU without offload it is as large as a kernel
    allows, since each call costs a pass over the rows' float32 output. Segments that are offloaded
    (`is_moved`) are smaller: they need staging buffers, and whole segments of the newest gradients
    stay on the device.
    """
    if device_type == "cuda" and not is_moved:
        return _MAX_BLOCK_TOKENS
    aim_bytes = _SEGMENT_BYTES.get(device_type, _SEGMENT_BYTES_ELSEWHERE)
    tokens = int(aim_bytes / max(1, token_bytes)) // KERNEL_STEP * KERNEL_STEP
    return min(max(tokens, _MIN_SEGMENT_TOKENS), _MAX_SEGMENT_TOKENS)


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The tokens of one sequence whose K,V one layer stores, numbered without gaps from 0."""

    lens: tuple[int, ...]
    """Tokens of each piece."""
    offsets: tuple[int, ...]
    """offsets[p] : offsets[p + 1] are the stored tokens of piece p; none if no piece reads it."""
    bounds: tuple[int, ...]
    """bounds[i] : bounds[i + 1] are the tokens of segment i."""
    with_gradients: tuple[range, ...] | None = None
    """The tokens whose gradients are kept, ascending; None: all. The others belong to chunks that a
    sampled plan did not draw: gradients sent to them are dropped."""
    tree: Tree | None = None
    """The tree of the pieces; None: each follows the one before it."""

    @classmethod
    def of(
        cls,
        lens: Sequence[int],
        window: int | None,
        per_segment: int,
        tree: Tree | None = None,
        block: int | None = None,
    ) -> StoredTokens:
        """Return which tokens of a sequence a layer stores. The sequence has pieces of `lens`
        tokens, and segments have `per_segment` tokens. A layer stores all tokens of each piece that
        a later piece reads. With a sliding window of `window` tokens it stores only the last
        window - 1 tokens of such a piece; with attention in blocks of `block` tokens, only the
        unfinished block at its end."""
        is_read = tree.continued if tree else (*(True for _ in lens[1:]), False)
        longest = max(lens, default=0) if window is None else window - 1
        kept = [min(n, longest) if read else 0 for n, read in zip(lens, is_read, strict=True)]
        if block is not None:
            stops = tree.stops(lens) if tree else accumulate(lens)
            kept = [min(n, stop % block) for n, stop in zip(kept, stops, strict=True)]
        offsets = tuple(accumulate(kept, initial=0))
        bounds = (*range(0, offsets[-1], per_segment), offsets[-1])
        return cls(tuple(lens), offsets, bounds, tree=tree)

    def with_gradients_of(self, pieces: Iterable[int]) -> StoredTokens:
        """Return a copy that keeps K,V gradients for the tokens of `pieces` (ascending) only."""
        parts = _joined(own for piece in pieces if (own := self.of_piece(piece)))
        return replace(self, with_gradients=tuple(parts))

    def gradients_in(self, tokens: range) -> list[range]:
        """Return the ranges of `tokens` whose K,V gradients are kept."""
        if self.with_gradients is None:
            return [tokens] if tokens else []
        first = bisect_right(self.with_gradients, tokens.start, key=lambda part: part.stop)
        found = []
        for part in self.with_gradients[first:]:
            if part.start >= tokens.stop:
                break
            found.append(range(max(part.start, tokens.start), min(part.stop, tokens.stop)))
        return found

    def seen_from(self, piece: int, window: int | None) -> tuple[range, ...]:
        """Return the ranges of stored tokens of earlier pieces, ascending, to which piece `piece`
        attends. `window`: the layer's sliding window."""
        runs: list[range] = [range(self.offsets[piece])]
        if self.tree is not None:
            runs = _joined(self.of_piece(earlier) for earlier in self.tree.path(piece))
        if window is None:
            return tuple(run for run in runs if run)
        seen: list[range] = []
        left = window - 1
        for run in reversed(runs):
            seen.append(run[max(0, len(run) - left) :])
            left -= len(seen[-1])
        return tuple(run for run in reversed(seen) if run)

    def of_piece(self, piece: int) -> range:
        return range(self.offsets[piece], self.offsets[piece + 1])

    def seen_segments(self, piece: int, window: int | None) -> Sequence[int]:
        """Return the indices of the segments, ascending, with tokens that `seen_from` returns."""
        runs = [self.segments(run) for run in self.seen_from(piece, window)]
        if len(runs) < 2:
            return runs[0] if runs else range(0)
        return sorted({index for run in runs for index in run})

    def segments(self, tokens: range) -> range:
        """Return the range of segment indices that hold some of `tokens`."""
        if not tokens:
            return range(0)
        per_segment = self.bounds[1]  # all but the last have as many tokens as the first
        return range(tokens.start // per_segment, (tokens.stop - 1) // per_segment + 1)

    def pieces(self, tokens: range) -> list[int]:
        """Return the indices of the pieces that hold some of the stored `tokens`."""
        first = bisect_right(self.offsets, tokens.start) - 1
        last = bisect_left(self.offsets, tokens.stop)
        return [p for p in range(first, last) if self.of_piece(p)] if tokens else []


def _joined(parts: Iterable[range]) -> list[range]:
    """Return ascending ranges with adjacent ones merged."""
    runs: list[range] = []
    for part in parts:
        if runs and runs[-1].stop == part.start:
            part = range(runs.pop().start, part.stop)
        runs.append(part)
    return runs
