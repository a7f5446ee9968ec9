"""One sequence in one layer: its segments, and which of its pieces are alive.

A segment is the unit of freeing and of tiers: it dies when the last piece that touches it is freed.
On the device a layer's segments lie behind one another, and blocks are views across them. With a
pool a segment stays in the arena until its last piece is written, and then goes through the pool.

    S stored tokens, K key-value heads, H head dim; tensors of the store are token-major
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools.contract import Pool
from furlong.kv.segments import (
    Segment,
    SegmentGradient,
    StoredBlock,
    add_token_major,
    joined,
    present,
)
from furlong.plan.segments import StoredTokens


class LayerSegments:
    """The segments of one sequence in one layer, and which pieces are alive."""

    def __init__(
        self, arena: Arena, pool: Pool | None, tokens: StoredTokens, like: Tensor, num_hot: int
    ) -> None:
        """`like`: keys (K, T, H) of the layer; `num_hot`: newest segments of a prefix whose
        gradients stay in the arena though there is a pool."""
        self.tokens = tokens
        self.alive: set[int] = set()
        self.segments = [Segment(start, stop) for start, stop in pairwise(tokens.bounds)]
        self._arena, self._pool, self._num_hot = arena, pool, num_hot
        self._dtype = like.dtype
        self._wide = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        self._token_shape = (2, like.shape[0], like.shape[2])
        if pool is None:
            parts = self._take(self.segments, self._dtype)
            for segment, part in zip(self.segments, parts, strict=True):
                segment.kv = part

    def write(self, piece: int, k: Tensor, v: Tensor) -> None:
        """Keep what later pieces see of k, v (K, T, H)."""
        tokens = self.tokens.of_piece(piece)
        first = k.shape[1] - len(tokens)
        again = piece not in self.alive
        for segment in self._holding(tokens):
            rows = segment.rows(tokens)
            there = segment.start + rows.start - tokens.start + first
            part = slice(there, there + rows.stop - rows.start)
            if again:
                self._zero_grad(segment, rows)
            self._write_part(segment, rows, k[:, part], v[:, part])
            segment.written.add(piece)
            if self._pool is not None and segment.kv is not None:
                held = range(segment.start, segment.stop)
                if segment.written.issuperset(self.tokens.pieces(held)):
                    segment.kv_handle = self._pool.put(segment.kv)
                    self._arena.give(segment.kv)
                    segment.kv = None
        self.alive.add(piece)

    def free(self, piece: int) -> None:
        """Forget a piece, and the segments that no piece alive touches."""
        self.alive.discard(piece)
        for segment in self._holding(self.tokens.of_piece(piece)):
            pieces = self.tokens.pieces(range(segment.start, segment.stop))
            if self.alive.isdisjoint(pieces):
                self._forget(segment)

    def require_alive(self, seen: Sequence[range], what: str) -> None:
        pieces = (p for run in seen for p in self.tokens.pieces(run))
        missing = [p for p in pieces if p not in self.alive]
        assert not missing, f"K,V of pieces {missing} of {what} are gone"

    def blocks(
        self, seen: Sequence[range], *, gradients: bool, max_tokens: int
    ) -> Iterator[StoredBlock]:
        """On the device: views of at most `max_tokens`, with `gradients` the newest first."""
        blocks, left = [], sum(map(len, seen))
        for part in seen:
            start = part.start
            for run in joined([s.kv_rows(part) for s in self._holding(part)]):
                for kv in run.split(max_tokens):
                    tokens = range(start, start + kv.shape[0])
                    blocks.append(StoredBlock(kv, left, partial(self._add, tokens)))
                    start, left = tokens.stop, left - kv.shape[0]
        yield from reversed(blocks) if gradients else blocks

    def streamed(self, seen: Sequence[range], *, gradients: bool) -> Iterator[StoredBlock]:
        """Through the pool: a block per segment, or per part of one that is seen, the next segment
        on its way meanwhile."""
        assert self._pool is not None
        order, step = self.order(seen, gradients=gradients), -1 if gradients else 1
        for number, segment in enumerate(order):
            self.prefetch(order[number : number + 2], gradients=gradients)
            lease = None if segment.kv_handle is None else self._pool.get(segment.kv_handle)
            kv = present(segment.kv if lease is None else lease.tensor)
            grad = SegmentGradient(self._arena, self._pool, segment, self._zeros)
            for index, part in list(enumerate(seen))[::step]:
                rows = segment.rows(part)
                if rows.start >= rows.stop:
                    continue
                first = segment.start + rows.start
                add = partial(self._add_streamed, grad, first) if gradients else _refuse_gradients
                distance = part.stop - first + sum(map(len, seen[index + 1 :]))
                yield StoredBlock(kv[rows], distance, add)
            # Not in a `finally`: a generator may be ended by the garbage collector, which must
            # not touch tensors. After an error `clear` ends the leases.
            grad.settle(stays=number < self._num_hot)
            if lease is not None:
                lease.release()

    def order(self, seen: Sequence[range], *, gradients: bool) -> list[Segment]:
        """In which order a prefix is streamed."""
        indices = dict.fromkeys(index for run in seen for index in self.tokens.segments(run))
        holding = [self.segments[index] for index in indices]
        return holding[::-1] if gradients else holding

    def prefetch(self, segments: Sequence[Segment], *, gradients: bool) -> None:
        assert self._pool is not None
        for segment in segments:
            for handle in (segment.kv_handle, segment.grad_handle if gradients else None):
                if handle is not None:
                    self._pool.prefetch(handle)

    def relayed(self, piece: int) -> Tensor | None:
        """dK,dV (S, 2, K, H) of a piece's stored tokens, or None if none were sent."""
        tokens = self.tokens.of_piece(piece)
        parts = []
        for segment in (holding := self._holding(tokens)):
            rows = segment.rows(tokens)
            if segment.grad is not None:
                parts.append(segment.grad[rows])
            elif segment.grad_handle is not None:
                assert self._pool is not None
                lease = self._pool.get(segment.grad_handle)
                parts.append(lease.tensor[rows].clone())
                lease.release()
            else:
                shape = (rows.stop - rows.start, *self._token_shape)
                parts.append(torch.zeros(shape, dtype=self._wide, device=self._arena.device))
        if all(s.grad is None and s.grad_handle is None for s in holding):
            return None
        runs = joined(parts)
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def forget(self) -> None:
        """Give everything back."""
        for segment in self.segments:
            self._forget(segment)

    def forget_arena(self) -> bool:
        """After an error give back what is in the arena; whether anything is in the pool."""
        in_pool = any(s.kv_handle is not None or s.grad_handle is not None for s in self.segments)
        for segment in self.segments:
            segment.kv_handle = segment.grad_handle = None
        self.forget()
        return in_pool

    def _holding(self, tokens: range) -> list[Segment]:
        return [self.segments[index] for index in self.tokens.segments(tokens)]

    def _write_part(self, segment: Segment, rows: slice, k: Tensor, v: Tensor) -> None:
        """k, v (K, rows, H) into a segment, wherever it is."""
        lease = None
        if segment.kv_handle is not None:
            assert self._pool is not None
            lease = self._pool.get(segment.kv_handle)
        elif segment.kv is None:
            segment.kv = self._take([segment], self._dtype)[0]
        into = present(segment.kv if lease is None else lease.tensor)[rows]
        into[:, 0] = k.transpose(0, 1)
        into[:, 1] = v.transpose(0, 1)
        if lease is not None:
            lease.write_back()

    def _add(self, tokens: range, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (K, tokens, H) to the gradients on the device."""
        trained = self.tokens.gradients_in(tokens)
        if not trained:
            return
        bare = [s for s in self.segments if s.is_alive and s.grad is None and self._takes(s)]
        for segment, grad in zip(bare, self._take(bare, self._wide), strict=True):
            segment.grad = grad.zero_()
        for part in trained:
            start = part.start - tokens.start
            for run in joined([present(s.grad)[s.rows(part)] for s in self._holding(part)]):
                stop = start + run.shape[0]
                add_token_major(run, dk[:, start:stop], dv[:, start:stop])
                start = stop

    def _add_streamed(self, grad: SegmentGradient, first: int, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (K, tokens, H) of a segment's tokens from `first` on."""
        for part in self.tokens.gradients_in(range(first, first + dk.shape[1])):
            own = slice(part.start - first, part.stop - first)
            grad.add(grad.rows(part), dk[:, own], dv[:, own])

    def _takes(self, segment: Segment) -> bool:
        """Whether any of its tokens has a gradient."""
        return bool(self.tokens.gradients_in(range(segment.start, segment.stop)))

    def _zero_grad(self, segment: Segment, rows: slice) -> None:
        """A piece that is written again after it was freed begins without gradients."""
        if segment.grad is not None:
            segment.grad[rows] = 0
        elif segment.grad_handle is not None:
            assert self._pool is not None
            lease = self._pool.get(segment.grad_handle)
            lease.tensor[rows] = 0
            lease.write_back()

    def _take(self, segments: Sequence[Segment], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Uninitialised tensors (S, 2, K, H), behind one another, to be given back one by one."""
        lens = [segment.stop - segment.start for segment in segments]
        if not lens:
            return ()
        return self._arena.split(self._arena.take((sum(lens), *self._token_shape), dtype), lens)

    def _zeros(self, segment: Segment) -> Tensor:
        return self._take([segment], self._wide)[0].zero_()

    def _forget(self, segment: Segment) -> None:
        for tensor in (segment.kv, segment.grad):
            if tensor is not None:
                self._arena.give(tensor)
        for handle in (segment.kv_handle, segment.grad_handle):
            if handle is not None:
                assert self._pool is not None
                self._pool.drop(handle)
        segment.kv = segment.kv_handle = segment.grad = segment.grad_handle = None
        segment.written.clear()


def _refuse_gradients(dk: Tensor, dv: Tensor) -> None:
    raise AssertionError("the prefix was asked for without gradients")
