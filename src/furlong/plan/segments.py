"""The tokens of a cut sequence that a layer stores, and the segments that they are cut into.

Pure integers: what the store does and what the cost model counts follow from them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

NUM_HOT = 2
"""Newest segments of a prefix whose gradients stay on the device though K,V live elsewhere."""
_SEGMENT_STEP = 64
_MIN_SEGMENT_TOKENS, _MAX_SEGMENT_TOKENS = 512, 8192
_SEGMENT_BYTES = {"cpu": 2**21}
_SEGMENT_BYTES_ELSEWHERE = 2**23
"""A kernel on a GPU wants more keys per call than one on a CPU."""


def segment_tokens(token_bytes: float, device_type: str) -> int:
    """Stored tokens per segment, where K and V of a token and layer take `token_bytes`."""
    aim_bytes = _SEGMENT_BYTES.get(device_type, _SEGMENT_BYTES_ELSEWHERE)
    tokens = int(aim_bytes / max(1, token_bytes)) // _SEGMENT_STEP * _SEGMENT_STEP
    return min(max(tokens, _MIN_SEGMENT_TOKENS), _MAX_SEGMENT_TOKENS)


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The tokens of one sequence that one layer stores, numbered without gaps from 0."""

    lens: tuple[int, ...]
    """Tokens of each piece."""
    offsets: tuple[int, ...]
    """offsets[p] : offsets[p + 1] are the stored tokens of piece p; the last piece stores none."""
    bounds: tuple[int, ...]
    """bounds[i] : bounds[i + 1] are the tokens of segment i."""
    with_gradients: tuple[range, ...] | None = None
    """The tokens whose gradients are kept, ascending; None: all. Others are of chunks that were
    not drawn in a sampled plan: what later ones would send them is dropped."""

    @classmethod
    def of(cls, lens: Sequence[int], window: int | None, per_segment: int) -> StoredTokens:
        """The stored tokens of pieces: through a window of w, later ones see w - 1 of each."""
        kept = [n if window is None else min(n, window - 1) for n in lens[:-1]]
        offsets = tuple(accumulate(kept, initial=0))
        return cls(tuple(lens), offsets, (*range(0, offsets[-1], per_segment), offsets[-1]))

    def with_gradients_of(self, pieces: Iterable[int]) -> StoredTokens:
        """These tokens with gradients of some pieces alone, which ascend."""
        parts: list[range] = []
        for piece in pieces:
            if piece + 1 >= len(self.offsets) or not (own := self.of_piece(piece)):
                continue
            if parts and parts[-1].stop == own.start:
                own = range(parts.pop().start, own.stop)
            parts.append(own)
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

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    def seen_from(self, piece: int, window: int | None) -> range:
        """Stored tokens before `piece` that its tokens see."""
        stop = self.offsets[piece]
        return range(0 if window is None else max(0, stop - (window - 1)), stop)

    def of_piece(self, piece: int) -> range:
        return range(self.offsets[piece], self.offsets[piece + 1])

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
