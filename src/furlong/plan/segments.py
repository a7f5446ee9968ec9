"""Segments of stored K,V: the unit in which they are freed, and in which they change tiers.

What later pieces of a cut sequence need of earlier ones lies behind one another, per layer: all
pieces but the last, of a layer with a window the last window - 1 tokens of each, for no later token
sees the others. It is cut at multiples of one length, which aims at SEGMENT_BYTES of K and V. A
segment is freed when all pieces that touch it are dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

SEGMENT_BYTES = 2 * 2**20
_STEP_TOKENS = 64
_LEAST_TOKENS, _MOST_TOKENS = 1024, 8192


@dataclass(frozen=True, slots=True)
class Segment:
    """Stored tokens [start, stop) of one sequence in one layer."""

    start: int
    stop: int
    first_piece: int
    last_piece: int
    """The pieces of the sequence that touch it, both included."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def segment_tokens(token_bytes: float) -> int:
    """Tokens per segment; `token_bytes`: K and V of one token in one layer of one process."""
    tokens = int(SEGMENT_BYTES / token_bytes) // _STEP_TOKENS * _STEP_TOKENS
    return min(max(tokens, _LEAST_TOKENS), _MOST_TOKENS)


def stored_offsets(piece_lens: Sequence[int], window: int | None) -> tuple[int, ...]:
    """Where each piece's stored tokens start: those of piece p are [offsets[p], offsets[p + 1]).

    `piece_lens`: tokens of all pieces of the sequence, the last of which is never stored, so that
    its offset is the total.
    """
    kept = (n if window is None else min(n, window - 1) for n in piece_lens[:-1])
    return tuple(accumulate(kept, initial=0))


def first_seen(offsets: Sequence[int], piece: int, window: int | None) -> int:
    """The first stored token that `piece` sees; the last is the one before its own offset."""
    return 0 if window is None else max(0, offsets[piece] - (window - 1))


def cut_segments(offsets: Sequence[int], tokens_each: int) -> tuple[Segment, ...]:
    """The segments of one sequence in one layer, in the order of its tokens."""
    segments = []
    first = 0
    for start in range(0, offsets[-1], tokens_each):
        stop = min(start + tokens_each, offsets[-1])
        while offsets[first + 1] <= start:
            first += 1
        last = first
        while offsets[last + 1] < stop:
            last += 1
        segments.append(Segment(start, stop, first, last))
    return tuple(segments)
