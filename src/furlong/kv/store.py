"""The KVStore: per sequence and layer, the tensors that later chunks read of earlier ones.

A piece is the part of a cut sequence that is in one chunk. The store holds K,V of pieces, states of
recurrent layers, and the gradients of both that later chunks send. Gradients are allocated when the
first one arrives, in float32 where K,V have 16 bits.

With a sliding window of w tokens only the last w-1 tokens of a piece are stored: no later token
sees the others. The stored tokens that a later piece sees are contiguous (where a sequence
branches, along the path to the piece). With attention blocks only tokens of the unfinished block at
the piece's end are stored.

K,V and gradients are freed and offloaded in segments of tokens, which `furlong.plan.segments` cuts.
A segment is freed when the last piece that has tokens in it is freed. A recurrent state belongs to
a sequence, a layer, a kind and a token boundary. The piece that ends at the boundary writes the
state; pieces that begin there read it and send its gradient. The state is kept in the same pool and
for as long as the K,V of the piece that wrote it.

A segment is allocated in the arena with its first piece. Without a pool it stays in the arena; with
a pool it moves to the pool once its last piece is written. If pieces are written in order and their
backwards run in the opposite order, each once, one layer transfers these bytes:

    S_p       stored tokens before piece p
    P_p       the segments that hold some of the last min(S_p, window - 1) of these tokens
    e_i       the end of segment i, as a number of stored tokens
    K_i, G_i  bytes of K,V and of gradients of segment i
    h         `NUM_HOT`, the newest segments whose gradients stay in the arena
    N         number of pieces

    forward of piece p        written  sum of K_i over S_p < e_i <= S_(p+1)
                              read     sum of K_i over P_p with e_i <= S_min(p+1, N-1)
    recompute of piece p      read     sum of K_i over P_p
    backward of piece p       read     sum of K_i over P_p
                              written  sum of G_i over P_p without its newest h
    all backwards together    read     as many bytes of G as are written

After they are first written, a segment's gradients are read for each further piece that adds to
them, and once more when the segment becomes one of the newest or its gradients are relayed. A
recompute that reuses saved attention outputs reads nothing. A piece that is freed and written again
while its segment is alive costs one more read and one more write of the segment.

With a pool the arena then holds, per sequence and layer, K,V of the segment that is being filled,
and gradients of the newest `NUM_HOT` segments of the prefix and of later segments until their own
backward.

    K key-value heads, S stored tokens, H head dim, tensors are token-major;
    `piece` is a chunk's position in its group (the chunks of one cut sequence)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool, Handle, Lease, Pool
from furlong.plan.plan import Tree
from furlong.plan.segments import NUM_HOT, StoredTokens, segment_tokens

_T = TypeVar("_T")


@dataclass
class Segment:
    """Stored tokens [start, stop) with K,V and gradients, two tensors (S, 2, K, H), each in the
    arena or in the pool. The table shows which fields are then set; the others are None.

        K,V              kv      kv_handle    gradients             grad    grad_handle  grad_lease
        none written     -       -            none sent             -       -            -
        in the arena     tensor  -            in the arena          tensor  -            -
        in the pool      -       handle       in the pool           -       handle       -
                                              pooled, being added   -       handle       lease
    """

    start: int
    stop: int
    kv: Tensor | None = None
    kv_handle: Handle | None = None
    grad: Tensor | None = None
    grad_handle: Handle | None = None
    grad_lease: Lease | None = None
    """Lease of pooled gradients while a backward visits the segment."""
    has_news: bool = False
    """Whether the visit has added to the gradients."""
    written: set[int] = field(default_factory=set)
    """Pieces written since the segment was last freed."""

    def rows(self, tokens: range) -> slice:
        """Return the rows of this segment's tensors that hold some of `tokens`."""
        start, stop = max(tokens.start, self.start), min(tokens.stop, self.stop)
        return slice(start - self.start, stop - self.start)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Keys and values of some stored tokens, from one segment. With `add`, a function of (dk, dv),
    a backward can add to their gradients. Implements `ops.attention.PrefixBlock`."""

    kv: Tensor  # (S, 2, K, H)
    distance: int
    add: Callable[[Tensor, Tensor], None] | None

    @property
    def k(self) -> Tensor:
        return self.kv[:, 0].transpose(0, 1)  # (K, S, H)

    @property
    def v(self) -> Tensor:
        return self.kv[:, 1].transpose(0, 1)  # (K, S, H)

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        assert self.add is not None, "the prefix was asked for without gradients"
        self.add(dk, dv)


def present(x: _T | None) -> _T:
    assert x is not None
    return x


StateKind = tuple[str, int]
"""(kind of a recurrent state, its number among the states of its layer)."""
Boundary = tuple[int, int, int]
"""(sequence id, layer, number of the sequence's tokens before the boundary)."""


class StateStore:
    """Recurrent states at token boundaries, in a pool; their gradients stay on the device."""

    def __init__(self, pool: Pool, trained: Mapping[int, Collection[int]] | None = None) -> None:
        """`trained`: the boundaries of each cut sequence whose gradients are kept; None: all."""
        self._pool = pool
        self._trained = trained
        self._handles: dict[Boundary, dict[StateKind, Handle]] = {}
        self._grads: dict[Boundary, dict[StateKind, Tensor | None]] = {}

    def write(self, at: Boundary, states: Mapping[StateKind, Tensor]) -> None:
        """Store copies of `states` at a boundary. A state of the same kind that is stored there is
        replaced; states of other kinds stay."""
        kept = self._handles.setdefault(at, {})
        for kind, state in states.items():
            if kind in kept:
                self._pool.drop(kept.pop(kind))
            kept[kind] = self._pool.put(state.detach())

    def read(self, at: Boundary) -> dict[StateKind, Tensor]:
        """Return copies of the states at a boundary, since a graph may outlive the stored ones."""
        assert at in self._handles, f"states at {at} (sequence, layer, token) are gone"
        found = {}
        for kind, handle in self._handles[at].items():
            lease = self._pool.get(handle)
            found[kind] = lease.tensor.clone()
            lease.release()
        return found

    def send(self, at: Boundary, grads: Mapping[StateKind, Tensor | None]) -> None:
        """Store `grads`, the gradients of the states at a boundary, for the backward of the piece
        that wrote the states. The piece that read the states calls this. Nothing is stored for
        boundaries whose gradients are not kept (`trained`)."""
        if self._trained is None or at[2] in self._trained[at[0]]:
            detached = {kind: g if g is None else g.detach() for kind, g in grads.items()}
            self._grads.setdefault(at, {}).update(detached)

    def later_grads(
        self, at: Boundary, kinds: Iterable[StateKind], factor: float = 1
    ) -> list[Tensor | None]:
        """Remove and return the gradients of the states `kinds` at a boundary, times `factor`; None
        for each kind without a gradient."""
        sent = self._grads.get(at, {})
        found = [sent.pop(kind, None) for kind in kinds]
        if not sent:
            self._grads.pop(at, None)
        return [g if g is None or factor == 1 else g * factor for g in found]

    def free(self, at: Boundary) -> None:
        for handle in self._handles.pop(at, {}).values():
            self._pool.drop(handle)
        self._grads.pop(at, None)

    def clear(self) -> None:
        """Drop everything after an error; clears the pool if it held any state."""
        if self._handles:
            self._pool.clear()
        self._handles.clear()
        self._grads.clear()

    @property
    def num_buffers(self) -> int:
        return len(self._handles) + len(self._grads)


class LayerSegments:
    """The segments of one sequence in one layer, and the pieces that are stored in them."""

    def __init__(self, arena: Arena, pool: Pool | None, tokens: StoredTokens, like: Tensor) -> None:
        """`pool`: where full segments move; None: they stay in the arena. `like`: keys (K, T, H)
        of the layer."""
        self.tokens = tokens
        self.alive: set[int] = set()
        self.segments = [Segment(start, stop) for start, stop in pairwise(tokens.bounds)]
        self._arena, self._pool = arena, pool
        self._num_hot = len(self.segments) if pool is None else NUM_HOT
        self._dtype = like.dtype
        # gradients of many chunks are summed here: in 16 bits small ones would be lost
        self._wide = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        self._token_shape = (2, like.shape[0], like.shape[2])

    def write(self, piece: int, k: Tensor, v: Tensor) -> None:
        """Store k, v (K, T, H) of a piece: the last rows, as many as later pieces can see.

        A piece may be written again after it was freed, but not once gradients for it have been
        sent. Plans are checked for that."""
        tokens = self.tokens.of_piece(piece)
        first = k.shape[1] - len(tokens)  # only the last tokens of a piece are stored
        for segment in self._holding(tokens):
            rows = segment.rows(tokens)
            there = segment.start + rows.start - tokens.start + first
            part = slice(there, there + rows.stop - rows.start)
            self._write_part(segment, rows, k[:, part], v[:, part])
            segment.written.add(piece)
            # a full segment moves to the pool; a piece written again was added to it there
            if self._pool is not None and segment.kv is not None:
                held = range(segment.start, segment.stop)
                if segment.written.issuperset(self.tokens.pieces(held)):
                    segment.kv_handle = self._pool.put(segment.kv)
                    self._arena.give(segment.kv)
                    segment.kv = None
        self.alive.add(piece)

    def free(self, piece: int) -> None:
        """Free a piece, and its segments that hold no token of another live piece."""
        self.alive.discard(piece)
        for segment in self._holding(self.tokens.of_piece(piece)):
            pieces = self.tokens.pieces(range(segment.start, segment.stop))
            if self.alive.isdisjoint(pieces):
                self._forget(segment)

    def require_alive(self, seen: Sequence[range], what: str) -> None:
        pieces = (p for run in seen for p in self.tokens.pieces(run))
        missing = [p for p in pieces if p not in self.alive]
        assert not missing, f"K,V of pieces {missing} of {what} are gone"

    def blocks(self, seen: Sequence[range], *, gradients: bool) -> Iterator[StoredBlock]:
        """Yield the stored tokens in the ranges `seen`, in blocks: one for each segment and each
        range that has tokens in it. The oldest block comes first or, with `gradients`, the newest.
        The next segment is prefetched meanwhile."""
        indices = dict.fromkeys(index for run in seen for index in self.tokens.segments(run))
        step = -1 if gradients else 1
        order = [self.segments[index] for index in indices][::step]
        for number, segment in enumerate(order):
            self._prefetch(order[number : number + 2], gradients=gradients)
            lease = self._lease(segment.kv_handle)
            kv = present(segment.kv if lease is None else lease.tensor)
            for index, part in list(enumerate(seen))[::step]:
                rows = segment.rows(part)
                if rows.start >= rows.stop:
                    continue
                first = segment.start + rows.start
                add = partial(self._add, segment, first) if gradients else None
                distance = part.stop - first + sum(map(len, seen[index + 1 :]))
                yield StoredBlock(kv[rows], distance, add)
            # Not in a `finally`: the garbage collector may close a generator, and must not touch
            # tensors then. After an error `clear` ends the leases.
            if segment.has_news:  # the newest stay: the next backward reads or adds to them first
                self._settle(segment, stays=number < self._num_hot)
            if lease is not None:
                lease.release()

    def later_grads(self, piece: int) -> Tensor | None:
        """Return dK,dV (S, 2, K, H) that later pieces sent for a piece's stored tokens, or None."""
        tokens = self.tokens.of_piece(piece)
        holding = self._holding(tokens)
        if all(s.grad is None and s.grad_handle is None for s in holding):
            return None
        parts = []
        for segment in holding:
            rows = segment.rows(tokens)
            if segment.grad is not None:
                parts.append(segment.grad[rows])
            elif (lease := self._lease(segment.grad_handle)) is not None:
                # a copy: the pool reuses the leased memory
                parts.append(lease.tensor[rows].clone())
                lease.release()
            else:  # later pieces added to other segments of the piece only
                shape = (rows.stop - rows.start, *self._token_shape)
                parts.append(torch.zeros(shape, dtype=self._wide, device=self._arena.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forget(self) -> None:
        """Free all segments, in the arena and in the pool."""
        for segment in self.segments:
            self._forget(segment)

    def forget_arena(self) -> bool:
        """Free the arena's tensors after an error; return whether tensors in the pool are left."""
        in_pool = any(s.kv_handle is not None or s.grad_handle is not None for s in self.segments)
        for segment in self.segments:
            # not dropped: leases may be open, which `Pool.clear` ends together with the handles
            segment.kv_handle = segment.grad_handle = None
        self.forget()
        return in_pool

    def _holding(self, tokens: range) -> list[Segment]:
        return [self.segments[index] for index in self.tokens.segments(tokens)]

    def _lease(self, handle: Handle | None) -> Lease | None:
        return None if handle is None else present(self._pool).get(handle)

    def _prefetch(self, segments: Sequence[Segment], *, gradients: bool) -> None:
        for segment in segments:
            for handle in (segment.kv_handle, segment.grad_handle if gradients else None):
                if handle is not None:
                    present(self._pool).prefetch(handle)

    def _write_part(self, segment: Segment, rows: slice, k: Tensor, v: Tensor) -> None:
        """Write k, v (K, rows, H) to a segment in the arena or in the pool."""
        lease = self._lease(segment.kv_handle)
        if lease is None and segment.kv is None:
            segment.kv = self._take(segment, self._dtype)
        into = present(segment.kv if lease is None else lease.tensor)[rows]
        into[:, 0] = k.transpose(0, 1)
        into[:, 1] = v.transpose(0, 1)
        if lease is not None:
            lease.write_back()

    def _add(self, segment: Segment, first: int, dk: Tensor, dv: Tensor) -> None:
        """Add dk, dv (K, tokens, H) to the gradients of a segment's tokens from `first` on."""
        # with sampled chunks some tokens have no backward: their gradients are dropped
        for part in self.tokens.gradients_in(range(first, first + dk.shape[1])):
            if segment.grad is None and segment.grad_lease is None:
                segment.grad_lease = self._lease(segment.grad_handle)
                if segment.grad_lease is None:
                    segment.grad = self._take(segment, self._wide).zero_()
            lease = segment.grad_lease
            grad = present(segment.grad if lease is None else lease.tensor)[segment.rows(part)]
            own = slice(part.start - first, part.stop - first)
            grad[:, 0] += dk[:, own].transpose(0, 1)
            grad[:, 1] += dv[:, own].transpose(0, 1)
            segment.has_news = True

    def _settle(self, segment: Segment, *, stays: bool) -> None:
        """Store the gradients of a segment that a backward has changed: in the arena if `stays`,
        else in the pool."""
        lease, segment.grad_lease, segment.has_news = segment.grad_lease, None, False
        if lease is not None and not stays:
            lease.write_back()
        elif lease is not None:
            segment.grad = self._take(segment, self._wide).copy_(lease.tensor)
            lease.release()
            present(self._pool).drop(present(segment.grad_handle))
            segment.grad_handle = None
        elif not stays:
            grad = present(segment.grad)
            segment.grad_handle = present(self._pool).put(grad)
            self._arena.give(grad)
            segment.grad = None

    def _take(self, segment: Segment, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor (S, 2, K, H)."""
        return self._arena.take((segment.stop - segment.start, *self._token_shape), dtype)

    def _forget(self, segment: Segment) -> None:
        for tensor in (segment.kv, segment.grad):
            if tensor is not None:
                self._arena.give(tensor)
        for handle in (segment.kv_handle, segment.grad_handle):
            if handle is not None:
                present(self._pool).drop(handle)
        segment.kv = segment.kv_handle = segment.grad = segment.grad_handle = None
        segment.written.clear()


class KVStore:
    """Keys and values of cut sequences, in the arena or in a pool."""

    def __init__(
        self,
        arena: Arena,
        pieces: Mapping[int, Sequence[int]],
        pool: Pool | None = None,
        *,
        trained: Mapping[int, Sequence[int]] | None = None,
        trees: Mapping[int, Tree] | None = None,
    ) -> None:
        """
        Args:
            pieces: seq_id -> the number of tokens of each of its pieces, in order, for sequences
                that are cut.
            pool: Where full segments are offloaded; None: all stay in the arena.
            trained: seq_id -> the pieces whose gradients are kept, ascending. None: all pieces.
            trees: seq_id -> which piece follows which, for sequences that branch.
        """
        self.arena = arena
        self._pieces, self._trained, self._trees = pieces, trained, trees or {}
        self._pool = pool
        self._layers: dict[tuple[int, int], LayerSegments] = {}
        self._ends = {seq_id: list(accumulate(lens)) for seq_id, lens in pieces.items()}
        ends = trained and {s: [self._ends[s][i] for i in own] for s, own in trained.items()}
        self.states = StateStore(pool or DevicePool(arena), ends)

    def write(
        self, seq_id: int, layer: int, piece: int, k: Tensor, v: Tensor, window: int | None,
        block: int | None = None,
    ) -> None:  # fmt: skip
        """Store the tokens of a piece's k, v (K, T, H) that later pieces see. `window`: tokens that
        a token sees, itself included (None: all); `block`: tokens per attention block, if any."""
        # the store must keep no graph alive
        k, v = k.detach(), v.detach()
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            token_bytes = 2 * k.shape[0] * k.shape[2] * k.dtype.itemsize
            per_segment = segment_tokens(
                token_bytes, self.arena.device.type, self._pool is not None
            )
            tree = self._trees.get(seq_id)
            tokens = StoredTokens.of(self._pieces[seq_id], window, per_segment, tree, block)
            if self._trained is not None:
                tokens = tokens.with_gradients_of(self._trained[seq_id])
            segments = LayerSegments(self.arena, self._pool, tokens, k)
            self._layers[seq_id, layer] = segments
        segments.write(piece, k, v)

    def prefix(
        self, seq_id: int, layer: int, piece: int, window: int | None, *, gradients: bool
    ) -> Iterator[StoredBlock]:
        """Yield the keys and values before `piece` that its tokens see, in blocks.

        A block is valid until the next one is yielded. With `gradients` the newest comes first, and
        `add_grad` of blocks may be called.
        """
        segments = self._layers[seq_id, layer]
        seen = segments.tokens.seen_from(piece, window)
        segments.require_alive(seen, f"sequence {seq_id}")
        return segments.blocks(seen, gradients=gradients)

    def later_grads(
        self, seq_id: int, layer: int, piece: int, factor: float = 1
    ) -> tuple[int, Tensor, Tensor] | None:
        """Return the gradients that later pieces have sent for a piece, times `factor`.

        The result is (index in the piece of the first stored token, dK, dV), with dK and dV of
        shape (K, stored tokens, H), valid until the next call on the store. None if nothing was
        sent.
        """
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            return None
        sent = segments.later_grads(piece)
        if sent is None:
            return None
        sent = sent if factor == 1 else sent * factor
        first = segments.tokens.lens[piece] - sent.shape[0]
        return first, sent[:, 0].transpose(0, 1), sent[:, 1].transpose(0, 1)

    def free(self, seq_id: int, layer: int, piece: int) -> None:
        """Free a piece; a segment is freed with the last piece that has tokens in it."""
        # before the return: a recurrent layer has states and no segments
        self.states.free((seq_id, layer, self._ends[seq_id][piece]))
        segments = self._layers.get((seq_id, layer))
        if segments is None:
            return
        segments.free(piece)
        if not segments.alive:
            segments.forget()
            del self._layers[seq_id, layer]

    def clear(self) -> None:
        """Free everything after an error; clears the pool if it held anything."""
        in_pool = [segments.forget_arena() for segments in self._layers.values()]
        self.states.clear()
        self._layers.clear()
        if self._pool is not None and any(in_pool):
            self._pool.clear()

    @property
    def num_buffers(self) -> int:
        """Number of (sequence, layer) pairs with K,V, and of stored states; 0 after a step."""
        return len(self._layers) + self.states.num_buffers
