"""The KVStore: per sequence and layer, what later chunks need of earlier ones.

K,V of a cut sequence lie in one buffer per layer, in the order of their tokens, so that the prefix
of a chunk is a view. Their gradients lie in a second buffer of the same shape (float32 where K,V
have 16 bits), made when the first gradient arrives. With a sliding window of w tokens only the
last w-1 tokens of a chunk are kept: no later token sees the others, and what a later chunk sees
stays contiguous.

    K key-value heads, S stored tokens, H head dim; `piece` is a chunk's position in its group
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.kv.arena import Arena

_MAX_BLOCK_TOKENS = 8192
"""Keys per prefix block: bounds the gradients that one kernel call returns."""


@dataclass
class _LayerBuffer:
    """K,V of one sequence in one layer."""

    kv: Tensor  # (2, K, S, H)
    offsets: list[int]
    """offsets[p] : offsets[p + 1] are the stored tokens of piece p."""
    lens: Sequence[int]
    """Tokens of each piece."""
    grad: Tensor | None = None  # (2, K, S, H)
    alive: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    """Tokens [start, stop) of a buffer, `distance` tokens before the piece that reads them."""

    arena: Arena
    buffer: _LayerBuffer
    start: int
    stop: int
    distance: int

    @property
    def k(self) -> Tensor:
        return self.buffer.kv[0, :, self.start : self.stop]  # (K, S, H)

    @property
    def v(self) -> Tensor:
        return self.buffer.kv[1, :, self.start : self.stop]  # (K, S, H)

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        kv = self.buffer.kv
        if self.buffer.grad is None:
            wide = torch.float32 if kv.dtype.itemsize < 4 else kv.dtype
            self.buffer.grad = self.arena.take(tuple(kv.shape), wide).zero_()
        self.buffer.grad[0, :, self.start : self.stop] += dk
        self.buffer.grad[1, :, self.start : self.stop] += dv


class KVStore:
    """K,V blocks on the device, from a pooled arena."""

    def __init__(
        self, arena: Arena, pieces: Mapping[int, Sequence[int]], pool: object = None
    ) -> None:
        """`pieces`: for each cut sequence, the tokens of each of its pieces in order."""
        self.arena = arena
        self._pieces = pieces
        self._buffers: dict[tuple[int, int], _LayerBuffer] = {}

    def write(
        self, seq_id: int, layer: int, piece: int, k: Tensor, v: Tensor, window: int | None
    ) -> None:
        """Keep a piece's k, v (K, T, H) for the pieces after it."""
        buffer = self._buffers.get((seq_id, layer))
        if buffer is None:
            lens = self._pieces[seq_id]
            kept = [n if window is None else min(n, window - 1) for n in lens[:-1]]
            offsets = [0]
            for count in kept:
                offsets.append(offsets[-1] + count)
            shape = (2, k.shape[0], offsets[-1], k.shape[2])
            buffer = _LayerBuffer(self.arena.take(shape, k.dtype), offsets, lens)
            self._buffers[seq_id, layer] = buffer
        start, stop = buffer.offsets[piece], buffer.offsets[piece + 1]
        first = k.shape[1] - (stop - start)
        buffer.kv[0, :, start:stop] = k[:, first:]
        buffer.kv[1, :, start:stop] = v[:, first:]
        buffer.alive.add(piece)

    def prefix_blocks(
        self, seq_id: int, layer: int, piece: int, window: int | None
    ) -> Iterator[_StoredBlock]:
        """What the tokens of `piece` see of the pieces before it, in blocks."""
        buffer = self._buffers[seq_id, layer]
        stop = buffer.offsets[piece]
        missing = [p for p in range(piece) if p not in buffer.alive and buffer.lens[p] > 0]
        assert not missing, f"K,V of pieces {missing} of sequence {seq_id} are gone"
        first = 0 if window is None else max(0, stop - (window - 1))
        for start in range(first, stop, _MAX_BLOCK_TOKENS):
            end = min(start + _MAX_BLOCK_TOKENS, stop)
            yield _StoredBlock(self.arena, buffer, start, end, stop - start)

    def prefix(self, seq_id, layer, piece, window, *, gradients):  # type: ignore
        return self.prefix_blocks(seq_id, layer, piece, window)

    def relayed(self, seq_id: int, layer: int, piece: int) -> tuple[int, Tensor, Tensor] | None:
        """(index within the piece of the first kept token, dK, dV (K, kept tokens, H)) that later
        pieces have sent, or None if they sent nothing."""
        buffer = self._buffers.get((seq_id, layer))
        if buffer is None or buffer.grad is None or piece + 1 >= len(buffer.lens):
            return None
        start, stop = buffer.offsets[piece], buffer.offsets[piece + 1]
        first = buffer.lens[piece] - (stop - start)
        return first, buffer.grad[0, :, start:stop], buffer.grad[1, :, start:stop]

    def free(self, seq_id: int, layer: int, piece: int) -> None:
        """Forget a piece; the sequence's buffers go back when its last piece is forgotten."""
        buffer = self._buffers.get((seq_id, layer))
        if buffer is None:
            return
        buffer.alive.discard(piece)
        if buffer.alive:
            return
        del self._buffers[seq_id, layer]
        self.arena.give(buffer.kv)
        if buffer.grad is not None:
            self.arena.give(buffer.grad)

    def clear(self) -> None:
        """Give everything back, after an error."""
        for buffer in self._buffers.values():
            self.arena.give(buffer.kv)
            if buffer.grad is not None:
                self.arena.give(buffer.grad)
        self._buffers.clear()

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    @property
    def taken_bytes(self) -> int:
        return self.arena.taken_bytes
