"""The tokens of a cut sequence that a layer stores, and the segments that they are cut into.

Pure integers: what the store does and what the cost model counts follow from them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from furlong.plan.plan import Tree

NUM_HOT = 2
"""Newest segments of a prefix whose gradients stay on the device though K,V live elsewhere."""
KERNEL_STEP = 128
"""cuDNN takes rows and keys in multiples of this (`furlong.ops.backends.cudnn`)."""
_MIN_SEGMENT_TOKENS, _MAX_SEGMENT_TOKENS, _MAX_BLOCK_TOKENS = 512, 8192, 32_768
_SEGMENT_BYTES = {"cpu": 2**21}
_SEGMENT_BYTES_ELSEWHERE = 2**25
"""8,192 keys of 8 heads of 128 in 16 bits: what a GPU does around a call would cost a fifth of one
of 2,048 keys."""


def row_step(device_type: str, sp_size: int = 1) -> int:
    """The tokens of which planners make slices of `sp_size` processes a multiple."""
    return KERNEL_STEP * sp_size if device_type == "cuda" else 1


def segment_tokens(token_bytes: float, device_type: str, is_moved: bool) -> int:
    """Stored tokens per segment, where K and V of a token and layer take `token_bytes`.

    A segment is the keys of one call. Of those that stay on a GPU each call may have as many as a
    kernel takes: every block costs a pass over the rows' float32 output. Segments that are moved
    need staging, and the newest gradients wait on the device in whole ones.
    """
    if device_type == "cuda" and not is_moved:
        return _MAX_BLOCK_TOKENS
    aim_bytes = _SEGMENT_BYTES.get(device_type, _SEGMENT_BYTES_ELSEWHERE)
    tokens = int(aim_bytes / max(1, token_bytes)) // KERNEL_STEP * KERNEL_STEP
    return min(max(tokens, _MIN_SEGMENT_TOKENS), _MAX_SEGMENT_TOKENS)


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The tokens of one sequence that one layer stores, numbered without gaps from 0."""

    lens: tuple[int, ...]
    """Tokens of each piece."""
    offsets: tuple[int, ...]
    """offsets[p] : offsets[p + 1] are the stored tokens of piece p; a last piece stores none."""
    bounds: tuple[int, ...]
    """bounds[i] : bounds[i + 1] are the tokens of segment i."""
    with_gradients: tuple[range, ...] | None = None
    """The tokens whose gradients are kept, ascending; None: all. Others are of chunks that were
    not drawn in a sampled plan: what later ones would send them is dropped."""
    tree: Tree | None = None
    """How pieces follow one another; None: each follows the one before it."""

    @classmethod
    def of(
        cls,
        lens: Sequence[int],
        window: int | None,
        per_segment: int,
        tree: Tree | None = None,
        block: int | None = None,
    ) -> StoredTokens:
        """The stored tokens of pieces: through a window of w, later ones see w - 1 of each; of
        attention blocks, those of the one that is open at its end."""
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
        """These tokens with gradients of some pieces alone, which ascend."""
        parts = _joined(own for piece in pieces if (own := self.of_piece(piece)))
        return replace(self, with_gradients=tuple(parts))

    def gradients_in(self, tokens: range) -> list[range]:
        """The part of `tokens` whose gradients are kept, as ranges."""
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
        """Stored tokens before `piece` that its tokens see, as ranges behind one another."""
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
        """Segments that hold tokens which a piece sees, ascending."""
        runs = [self.segments(run) for run in self.seen_from(piece, window)]
        if len(runs) < 2:
            return runs[0] if runs else range(0)
        return sorted({index for run in runs for index in run})

    def segments(self, tokens: range) -> range:
        """Segments that hold some of `tokens`."""
        if not tokens:
            return range(0)
        per_segment = self.bounds[1]  # all but the last have as many tokens as the first
        return range(tokens.start // per_segment, (tokens.stop - 1) // per_segment + 1)

    def pieces(self, tokens: range) -> list[int]:
        """Pieces that hold some of `tokens`."""
        first = bisect_right(self.offsets, tokens.start) - 1
        last = bisect_left(self.offsets, tokens.stop)
        return [p for p in range(first, last) if self.of_piece(p)] if tokens else []


def _joined(parts: Iterable[range]) -> list[range]:
    """Ascending ranges, those that lie behind one another as one."""
    runs: list[range] = []
    for part in parts:
        if runs and runs[-1].stop == part.start:
            part = range(runs.pop().start, part.stop)
        runs.append(part)
    return runs
