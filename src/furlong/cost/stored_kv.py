"""Bytes of the KVStore of one process: K,V of cut sequences and their gradients, by segments.

A segment (`plan.segments`) is born when the first of its tokens is written and dies with the last
piece that touches it; its gradients are born with the first backward that sees it, and die with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from furlong.cost.cells import StageBytes
from furlong.cost.shape import ModelShape
from furlong.plan.segments import (
    Segment,
    cut_segments,
    first_seen,
    segment_tokens,
    stored_offsets,
)
from furlong.plan.values import SHARDED, ChunkPlan, Slice

NUM_BUFFERS = 2
"""Segments of K,V on the device where they live in a lower tier: one is read, the next arrives.
And as many of the newest with their gradients."""


def token_share(piece: Slice, sp_size: int, process: int) -> float:
    """Of a slice's tokens, those that a process of the sp group holds."""
    if piece.placement == SHARDED:
        return 1 / sp_size
    return 1.0 if piece.placement % sp_size == process else 0.0


@dataclass(frozen=True)
class StoredLayers:
    """What one process stores of one sequence in those layers of a stage that share a window."""

    window: int | None
    offsets: tuple[int, ...]
    segment_tokens: int
    num_layers: int
    kv_token_bytes: float
    """K and V of one token in one layer."""
    gradient_token_bytes: float

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return cut_segments(self.offsets, self.segment_tokens)

    def touched(self, piece: int) -> range:
        """The segments that hold tokens of a piece."""
        return self._holding(self.offsets[piece], self.offsets[min(piece + 1, self._last)])

    def seen(self, piece: int) -> range:
        """The segments that hold tokens which a piece sees."""
        return self._holding(first_seen(self.offsets, piece, self.window), self.offsets[piece])

    def last_seer(self, segment: Segment) -> int:
        """The last piece that sees a segment."""
        piece = self._last
        while piece > segment.last_piece + 1 and (
            first_seen(self.offsets, piece, self.window) >= segment.stop
        ):
            piece -= 1
        return piece

    @property
    def _last(self) -> int:
        return len(self.offsets) - 1

    def _holding(self, start: int, stop: int) -> range:
        each = self.segment_tokens
        return range(start // each, -(-stop // each)) if start < stop else range(0)


def stored_layers(
    shape: ModelShape, plan: ChunkPlan, cell: StageBytes, seq_id: int, stage: int, process: int
) -> tuple[StoredLayers, ...]:
    """Of a cut sequence at a stage, one entry per window; none on a process without a share."""
    pieces = [s for c in plan.groups[seq_id] for s in plan.chunks[c].slices if s.seq_id == seq_id]
    share = _kv_share(pieces[0], plan.sp_size, process, shape.num_kv_heads)
    if not share:
        return ()
    first = sum(plan.stages[:stage])
    lens = [piece.num_tokens for piece in pieces]
    kv = cell.kv_layer * share
    return tuple(
        StoredLayers(
            window, stored_offsets(lens, window), segment_tokens(kv), count,
            kv, cell.kv_gradient_layer * share,
        )
        for window, count in Counter(shape.windows[first : first + plan.stages[stage]]).items()
    )  # fmt: skip


class StoredKV:
    """`kv_bytes` and `gradient_bytes` are what the store holds now, in whichever tier."""

    def __init__(
        self, shape: ModelShape, plan: ChunkPlan, stages: Sequence[StageBytes], process: int
    ) -> None:
        self._plan, self._stages = plan, stages
        self._shape, self._process = shape, process
        self._stored: dict[tuple[int, int], list[_Alive]] = {}
        self.kv_bytes = 0.0
        self.gradient_bytes = 0.0

    def working_set(self, held: frozenset[int]) -> tuple[float, float]:
        """Bytes of K,V and of their gradients that a lower tier needs on the device."""
        kv = gradients = 0.0
        if self._plan.tiers.kv == "device":
            return kv, gradients
        for stage in held:
            for seq_id in self._plan.groups:
                for alive in self._of(seq_id, stage):
                    layers = alive.layers
                    tokens = NUM_BUFFERS * min(layers.segment_tokens, layers.offsets[-1])
                    kv = max(kv, tokens * layers.kv_token_bytes)
                    gradients = max(gradients, tokens * layers.gradient_token_bytes)
        return kv, gradients

    def write(self, chunk: int, stage: int) -> None:
        """The cell's K,V come into being."""
        for position, layers in self._pieces(chunk, stage):
            self.kv_bytes += layers.write(position)

    def send_back(self, chunk: int, stage: int) -> None:
        """The cell's Backward adds to the gradients of its prefix."""
        for position, layers in self._pieces(chunk, stage):
            self.gradient_bytes += layers.send_back(position)

    def free(self, chunk: int, stage: int) -> None:
        """The cell's K,V die, and every segment that no other piece touches."""
        for position, layers in self._pieces(chunk, stage):
            kv_bytes, gradient_bytes = layers.free(position)
            self.kv_bytes -= kv_bytes
            self.gradient_bytes -= gradient_bytes

    def _pieces(self, chunk: int, stage: int) -> Iterator[tuple[int, _Alive]]:
        for seq_id, position in self._plan.links[chunk]:
            for layers in self._of(seq_id, stage):
                yield position, layers

    def _of(self, seq_id: int, stage: int) -> list[_Alive]:
        if (seq_id, stage) not in self._stored:
            found = stored_layers(
                self._shape, self._plan, self._stages[stage], seq_id, stage, self._process
            )
            self._stored[seq_id, stage] = [_Alive(layers) for layers in found]
        return self._stored[seq_id, stage]


class _Alive:
    """Which segments of some layers are there now."""

    def __init__(self, layers: StoredLayers) -> None:
        self.layers = layers
        self._pieces: dict[int, set[int]] = {}
        """By segment: the pieces alive that touch it."""
        self._with_gradient: set[int] = set()
        self._first_sent = len(layers.segments)
        """From this segment on all that were ever seen by a backward have had their gradients."""

    def write(self, piece: int) -> float:
        """Returns the bytes of the segments that are new."""
        new = 0
        for index in self.layers.touched(piece):
            if index not in self._pieces:
                self._pieces[index] = set()
                new += self.layers.segments[index].num_tokens
            self._pieces[index].add(piece)
        return new * self.layers.num_layers * self.layers.kv_token_bytes

    def send_back(self, piece: int) -> float:
        """Returns the bytes of the gradients that are new."""
        new = 0
        seen = self.layers.seen(piece)
        # backwards descend: what one sees was seen by those before it, but for the first segments
        for index in range(seen.start, min(seen.stop, self._first_sent)):
            self._with_gradient.add(index)
            new += self.layers.segments[index].num_tokens
        self._first_sent = min(self._first_sent, seen.start)
        return new * self.layers.num_layers * self.layers.gradient_token_bytes

    def free(self, piece: int) -> tuple[float, float]:
        """Returns the bytes of the K,V and of the gradients that are gone."""
        dead = gone = 0
        for index in self.layers.touched(piece):
            alive = self._pieces.get(index, set())
            if piece not in alive:
                continue
            alive.remove(piece)
            if not alive:
                del self._pieces[index]
                num_tokens = self.layers.segments[index].num_tokens
                dead += num_tokens
                gone += num_tokens * (index in self._with_gradient)
                self._with_gradient.discard(index)
        layers = self.layers
        return (
            dead * layers.num_layers * layers.kv_token_bytes,
            gone * layers.num_layers * layers.gradient_token_bytes,
        )


def _kv_share(piece: Slice, sp_size: int, process: int, num_kv_heads: int) -> float:
    """Of a sharded sequence each process keeps its heads of all tokens, at least one head."""
    share = token_share(piece, sp_size, process)
    return max(share, 1 / num_kv_heads) if piece.placement == SHARDED else share
