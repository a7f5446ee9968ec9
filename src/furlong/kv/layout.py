"""Where pieces of a cut sequence lie in the segments of a layer (`furlong.plan.segments`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from furlong.plan.segments import first_seen, stored_offsets


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The tokens of one sequence that one layer stores, numbered without gaps from 0."""

    lens: tuple[int, ...]
    """Tokens of each piece."""
    offsets: tuple[int, ...]
    """offsets[p] : offsets[p + 1] are the stored tokens of piece p; the last piece stores none."""
    bounds: tuple[int, ...]
    """bounds[i] : bounds[i + 1] are the tokens of segment i."""

    @classmethod
    def of(cls, lens: Sequence[int], window: int | None, per_segment: int) -> StoredTokens:
        """A window of w tokens leaves the last w - 1 of each piece to be seen by later ones."""
        offsets = stored_offsets(lens, window)
        return cls(tuple(lens), offsets, (*range(0, offsets[-1], per_segment), offsets[-1]))

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    def seen_from(self, piece: int, window: int | None) -> range:
        """Stored tokens that the first token of `piece` sees or a later one of it."""
        return range(first_seen(self.offsets, piece, window), self.offsets[piece])

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
