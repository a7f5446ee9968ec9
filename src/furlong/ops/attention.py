"""Attention of one chunk on one process: over the chunk's own rows and the stored prefix.

    out = merge over blocks of softmax(q k^T) v

A slice's own rows are causal. Its prefix is read from the KV store block by block, in any order.
Partial results are merged by log-sum-exp, and the backward uses the merged output and log-sum-exp
for every block, as flash attention does. Where sequence parallelism gathers keys and values, rows
also attend to earlier keys of their own slice: one more block without a mask.

A `Level` (`furlong.plan.rows`) holds the slices of a chunk that one sequence-parallel group shares.
A first all-to-all (dispatch) trades rows for heads: each process then attends to all rows with its
part of the heads. A second all-to-all (combine) returns the results to the processes that hold the
rows. Slices that one process holds alone are local and need no exchange. They are divided into two
halves, whose attention hides the all-to-alls:

    1. start the dispatch of every level
    2. attend to the first local half
    3. each level, the largest group first: wait for its dispatch, store K,V, attend, start combine
    4. attend to the second local half
    5. wait for every combine

The backward uses the same order. The dK,dV that it returns for a chunk's own K,V include the
gradients that later chunks have sent. This is the relay of SeCO (Algorithm 1) and ChunkFlow
(Algorithm 2), without hooks and without an extra loss term. If the forward is given the saved
output of an earlier identical forward, it exchanges nothing. The backward then dispatches q, k, v
and out along with dout.

    T query rows of the process, S keys of a block or gathered keys, N query heads, K key-value
    heads, H head dim; of a level t local rows, L query rows after the dispatch, n and m query and
    key-value heads of this process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.errors import UnsupportedModelError
from furlong.ops.backends.base import Backend, Block, lse_dtype, merge_
from furlong.ops.sequence_parallel import (
    Exchange,
    by_inner_place,
    combine,
    combined,
    dispatch,
    dispatched,
    in_token_order,
    part_of,
)
from furlong.plan.rows import ChunkRows, Level, PlacedSlice, Stretch

LaterGrads = tuple[int, Tensor, Tensor]
"""(first row within the slice, dK, dV (K, rows, H)): what later chunks sent for those rows."""


class PrefixBlock(Protocol):
    """Stored keys and values of tokens before a slice, valid until the next block is yielded."""

    @property
    def k(self) -> Tensor: ...  # (K, S, H)
    @property
    def v(self) -> Tensor: ...  # (K, S, H)
    @property
    def distance(self) -> int:
        """Position of the slice's first token minus the position of the block's first key."""
        ...

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        """Add dk, dv (K, S, H) to the gradients stored for the backward of the block's chunk."""
        ...


class LayerKV(Protocol):
    """The KV store as one layer of one cell (a chunk at a stage) uses it.

    `slice_index` is the number of a slice in the chunk. On each process of a sequence-parallel
    group, the store holds all tokens, with this process's heads.
    """

    def keeps(self, slice_index: int) -> bool:
        """Whether this pass stores the slice's keys and values for later chunks."""
        ...

    def write(self, slice_index: int, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
        """Store a slice's k and v (K, tokens, H) for later chunks. Only rows that later tokens see
        under the layer's mask rule (`rule`) are kept."""
        ...

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        """Yield the stored blocks that a slice's tokens see, in any order.

        Before asking for the next block, the caller must drop all tensors of the previous one and,
        with `gradients`, have added its gradients.
        """
        ...

    def later_grads(self, slice_index: int) -> LaterGrads | None:
        """Return what later chunks sent as gradients of the slice's keys and values, or None."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer's attention forms its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    block: int | None = None
    """Tokens per attention block (Llama 4 chunked attention): the token at position p sees tokens
    from `p // block * block` on. No kernel implements it: slices are cut at block boundaries."""

    value_width: int | None = None
    """As in `Block`."""

    def scores(self, distance: int, *squares: slice) -> Block:
        """Return the `Block` (mask rule) of query rows that begin `distance` tokens after the first
        key. If several `squares` (ranges of rows) are given, each range attends only within
        itself."""
        own = squares if len(squares) > 1 else ()
        return Block(distance, self.scale, self.window, self.softcap, self.value_width, own)

    def open_tokens(self, position: int) -> int:
        """Return the number of tokens before `position` that its attention block holds. If the
        layer has no attention blocks (see `block`), these are all tokens before it."""
        return position if self.block is None else position % self.block

    def left_tokens(self, position: int, num_tokens: int) -> int:
        """Return the number of tokens, of the `num_tokens` tokens from `position` on, that are in
        the attention block of `position`; all of them if the layer has no attention blocks."""
        if self.block is None:
            return num_tokens
        return max(0, min(num_tokens, self.block - position % self.block))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys and values of all tokens of the slices of a `Level`, gathered in token order."""

    k: Tensor  # (K, S, H)
    v: Tensor  # (K, S, H)
    dk: Tensor | None = None
    """Gradient of k in the log-sum-exp's dtype; None in a forward."""
    dv: Tensor | None = None

    def add_grad(self, keys: slice, dk: Tensor, dv: Tensor) -> None:
        assert self.dk is not None and self.dv is not None
        self.dk[:, keys] += dk
        self.dv[:, keys] += dv


def store_slices(
    slices: Sequence[PlacedSlice], k: Tensor, v: Tensor, layer_kv: LayerKV,
    rule: AttentionRule, first_row: int = 0,
) -> None:  # fmt: skip
    """Store k, v (K, S, H) of the slices that later chunks read.

    `first_row`: number of the first row in k and v, as `PlacedSlice.keys` counts rows.
    """
    for placed in slices:
        if layer_kv.keeps(placed.index):
            keys = slice(placed.keys[0] - first_row, placed.keys[1] - first_row)
            layer_kv.write(placed.index, k[:, keys], v[:, keys], rule)


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A block of keys and values of tokens before some query rows. It is valid until the next block
    is read: the caller must drop it before."""

    k: Tensor
    v: Tensor
    seen: Sequence[tuple[slice, Block]]
    """Ranges of rows that see these keys, each with its mask rule."""
    add_grad: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class SliceAttention:
    """Attention of some slices in one layer.

    `first_row`: row with which the tensors begin that are passed to the methods. Each `Stretch`
    (consecutive rows of a slice) counts rows from an earlier row 0.
    """

    slices: Sequence[PlacedSlice]
    layer_kv: LayerKV
    rule: AttentionRule
    backend: Backend
    first_row: int = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, gathered: Gathered | None
    ) -> tuple[Tensor, Tensor]:
        """Map q (N, T, H) and k, v (K, T, H) of the same rows to out (N, T, H) and lse (N, T)."""
        squares = self._squares()
        if not squares:  # no rows: slices are too short for every process to get some
            return q, q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
        out, lse = self.backend.forward(q, k, v, self.rule.scores(0, *squares))
        for branches in self._branches():
            rows, wide = self._rows(branches), None
            for earlier in self._earlier(branches, gathered, gradients=False):
                # merge in the log-sum-exp's dtype and round once, not per block
                wide = out[:, rows].to(lse.dtype) if wide is None else wide
                for part, block in earlier.seen:
                    found = self.backend.forward(q[:, part], earlier.k, earlier.v, block)
                    merge_(_within(wide, rows, part), lse[:, part], *found)
                del earlier, found
            if wide is not None and wide.dtype != out.dtype:
                out[:, rows] = wide
        if sinks is not None:
            # A sink only enlarges the denominator. As it is part of the returned log-sum-exp, the
            # backward of q, k and v needs no term for it.
            with_sinks = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
            out = (out * torch.exp(lse - with_sinks)[..., None]).to(q.dtype)
            lse = with_sinks
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        gathered: Gathered | None, *, needs_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq (N, T, H) and dk, dv (K, T, H) of the same rows.

        With `needs_kv`, dK,dV of the prefix go to the store, and the gradients that later chunks
        have sent are added to dk and dv, or to the gradients in `gathered` if it is given.
        """
        squares = self._squares()
        if squares:
            own = self.rule.scores(0, *squares)
            dq, dk, dv = self.backend.backward(dout, q, k, v, out, lse, own)
        else:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for branches in self._branches():
            rows, wide = self._rows(branches), None
            for earlier in self._earlier(branches, gathered, gradients=needs_kv):
                wide = dq[:, rows].to(lse.dtype) if wide is None else wide
                sent: list[Tensor] = []
                for part, block in earlier.seen:
                    part_dq, *grads = self.backend.backward(
                        dout[:, part], q[:, part], earlier.k, earlier.v, out[:, part],
                        lse[:, part], block,
                    )  # fmt: skip
                    _within(wide, rows, part).add_(part_dq)
                    sent = [a + b for a, b in zip(sent, grads, strict=True)] if sent else grads
                    del part_dq, grads
                if needs_kv:
                    earlier.add_grad(*sent)
                del earlier, sent
            if wide is not None and wide.dtype != dq.dtype:
                dq[:, rows] = wide
        for placed in self.slices if needs_kv else ():
            self._add_relayed(placed, dk, dv, gathered)
        return dq, dk, dv

    def _add_relayed(
        self, placed: PlacedSlice, dk: Tensor, dv: Tensor, gathered: Gathered | None
    ) -> None:
        sent = self.layer_kv.later_grads(placed.index)
        if sent is None:
            return
        first, dk_relayed, dv_relayed = sent
        start = placed.keys[0] + first - (0 if gathered else self.first_row)
        kept = slice(start, start + dk_relayed.shape[1])
        if gathered is not None:
            gathered.add_grad(kept, dk_relayed, dv_relayed)
            return
        dk[:, kept] += dk_relayed
        dv[:, kept] += dv_relayed

    def _earlier(
        self, branches: Sequence[PlacedSlice], gathered: Gathered | None, *, gradients: bool
    ) -> Iterator[_Earlier]:
        """Yield blocks of earlier K,V for slices (`branches`) that share one prefix. The first
        blocks are gathered K,V: one block for each stretch (consecutive rows) of a slice, with the
        slice's tokens before this stretch. Then come the blocks of the stored prefix."""
        for placed, stretch in ((own, s) for own in branches for s in own.stretches):
            inside = stretch.position - placed.start
            before = min(inside, self.rule.open_tokens(stretch.position))
            rows, block = self._first_rows(stretch, before, before)
            if rows.start < rows.stop and before:
                assert gathered is not None
                keys = slice(placed.keys[0] + inside - before, placed.keys[0] + inside)
                of = gathered.k[:, keys], gathered.v[:, keys]
                yield _Earlier(*of, [(rows, block)], partial(gathered.add_grad, keys))
        window, first = self.rule.window, branches[0]
        if self.rule.block is not None:  # the prefix is seen back to the start of the open block
            window = self.rule.open_tokens(first.start) + 1
            if window == 1:
                return
        for piece in self.layer_kv.prefix(first.index, window, gradients=gradients):
            if seen := list(self._seeing(branches, piece)):
                yield _Earlier(piece.k, piece.v, seen, piece.add_grad)
            del piece  # the contract of `LayerKV.prefix`

    def _squares(self) -> list[slice]:
        """Return the ranges of rows in which each row attends causally to the rows before it. These
        are the stretches (consecutive rows) of all slices, cut at the boundaries of attention
        blocks."""
        found = []
        for stretch in (s for placed in self.slices for s in placed.stretches):
            start = stretch.start
            while start < stretch.stop:
                position = stretch.position + start - stretch.start
                stop = start + self.rule.left_tokens(position, stretch.stop - start)
                found.append(slice(start - self.first_row, stop - self.first_row))
                start = stop
        return found

    def _branches(self) -> Iterator[list[PlacedSlice]]:
        """Yield lists of slices. The slices of a list are branches of one parent and share its
        prefix; a slice that shares its prefix with no other slice is alone in its list. Slices
        without rows on this process are left out."""
        found: list[PlacedSlice] = []
        for placed in self.slices:
            if found and not placed.joins:
                yield found
                found = []
            if placed.stretches:
                found.append(placed)
        if found:
            yield found

    def _rows(self, branches: Sequence[PlacedSlice]) -> slice:
        """Return the range of rows that the stretches of `branches` cover together."""
        first, last = branches[0].stretches[0], branches[-1].stretches[-1]
        return slice(first.start - self.first_row, last.stop - self.first_row)

    def _seeing(
        self, branches: Sequence[PlacedSlice], piece: PrefixBlock
    ) -> Iterator[tuple[slice, Block]]:
        """Yield pairs (range of rows, mask rule) for the rows that see `piece`, a block of the
        prefix that `branches` share.

        A range is the first rows of a stretch (consecutive rows of a slice), since for later rows
        the block may be beyond the window. If there are several branches and no window, all rows
        see the whole block, and one range covers all branches.
        """
        if len(branches) > 1 and self.rule.window is None and self.rule.block is None:
            yield self._rows(branches), self.rule.scores(piece.distance)
            return
        for placed in branches:
            for stretch in placed.stretches:
                distance = piece.distance + stretch.position - placed.start
                rows, block = self._first_rows(stretch, distance, piece.k.shape[1])
                if rows.start < rows.stop:  # a kernel may divide by their number
                    yield rows, block

    def _first_rows(self, stretch: Stretch, distance: int, num_keys: int) -> tuple[slice, Block]:
        """Return the first rows of a stretch that see any of `num_keys` keys, and the mask rule.
        The first key is `distance` tokens before the stretch."""
        block, start = self.rule.scores(distance), stretch.start - self.first_row
        num_seeing = block.visible_rows(stretch.stop - stretch.start, num_keys)
        num_seeing = min(num_seeing, self._in_block_of(stretch.position - distance, stretch))
        return slice(start, start + num_seeing), block

    def _in_block_of(self, position: int, stretch: Stretch) -> int:
        """Return how many leading rows of a stretch are in the attention block of `position`."""
        distance, num_rows = stretch.position - position, stretch.stop - stretch.start
        return max(0, self.rule.left_tokens(position, distance + num_rows) - distance)


def _within(wide: Tensor, rows: slice, part: slice) -> Tensor:
    """Return the rows `part` from `wide`, a tensor (N, any, H) that holds only the rows `rows`.
    Both ranges have the same row 0."""
    return wide[:, part.start - rows.start : part.stop - rows.start]


class LevelAttention:
    """Attention in one layer of the slices that one sequence-parallel group shares (a level)."""

    def __init__(
        self, level: Level, exchange: Exchange | None, num_heads: int, num_kv_heads: int
    ) -> None:
        """Prepare the attention of `level` in a layer with these numbers of heads. `num_heads`:
        query heads; 0 to exchange keys and values alone. Raises UnsupportedModelError if the
        processes of the group cannot divide the heads."""
        assert exchange is not None, f"a place of {level.size} processes needs an exchange"
        u = level.inner_size
        if num_heads % u or (num_kv_heads % u and u % num_kv_heads):
            raise UnsupportedModelError(
                given=f"attention with {num_heads} query and {num_kv_heads} key-value heads, which "
                f"{u} processes cannot divide among them",
                required="layers with the heads that the model's config names",
                source="the model's attention",
                change="use parallel: {sp: 1}",
            )
        self.level, self._exchange = level, exchange
        self._queries, self._keys = num_heads, (num_kv_heads, num_kv_heads)
        self._n, self._m = part_of(level, num_heads), part_of(level, num_kv_heads)
        self._transfer: Callable[[], Tensor] | None = None

    @property
    def heads(self) -> slice:
        """The range of this process's query heads."""
        inner = self.level.member % self.level.inner_size
        return slice(inner * self._n, (inner + 1) * self._n)

    def start(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Start the dispatch, the all-to-all before attention, with the local rows of `queries` (N,
        T, H) and `keys` (K, T, H)."""
        own = slice(*self.level.local)
        each = [x[:, own] for x in queries], [x[:, own] for x in keys]
        self._transfer = dispatch(self._exchange, self.level, *each)

    def store(self, layer_kv: LayerKV, rule: AttentionRule) -> None:
        """Wait for keys and values that were dispatched without queries, and store them."""
        x = self._arrived()
        inners = dispatched(self.level, x, (), self._keys)
        kv = in_token_order(self.level, inners) if len(inners) > 1 else inners[0]
        store_slices(self.level.slices, kv[: self._m], kv[self._m :], layer_kv, rule)

    def forward(
        self, attention: SliceAttention, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for q, k and v of the dispatch, store k and v, and attend. Start the all-to-all that
        returns out to the processes that hold its rows (combine).

        Return the rows as they arrived, out (n, L, H) and lse (n, L), for the backward.
        """
        x = self._arrived()
        (q,), k, v, gathered = self._unpacked(x, 1)
        of = (k, v) if gathered is None else (gathered.k, gathered.v)
        store_slices(self.level.slices, *of, attention.layer_kv, attention.rule)
        own_sinks = None if sinks is None else sinks[self.heads]
        out, lse = attention.forward(q, k, v, own_sinks, gathered)
        self._combine((out,), ())
        return x, out, lse

    def combined_out(self) -> Tensor:
        """Wait for the all-to-all that returns results (combine), and return out (t, N, H) of the
        local rows."""
        return combined(self.level, self._arrived(), (self._queries,), ())[0]

    def backward(
        self, attention: SliceAttention, lse: Tensor, before: tuple[Tensor, Tensor] | None, *,
        needs_kv: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute dq, dk, dv and start the all-to-all that returns them (combine). Return dout and
        out (n, L, H) of the rows that were dispatched, from which the caller computes dsinks.

        `before`: the first two results of `forward`, if only dout was dispatched for this backward.
        None if dout, out, q, k and v were dispatched.
        """
        x = self._arrived()
        if before is None:
            (dout, out, q), k, v, gathered = self._unpacked(x, 3)
        else:
            (q,), k, v, gathered = self._unpacked(before[0], 1)
            inners = dispatched(self.level, x, (self._queries,), ())
            dout, out = inners[self.level.inner], before[1]
        if gathered is not None:
            gathered = Gathered(
                gathered.k, gathered.v, *(_zeros(y, lse) for y in (gathered.k, gathered.v))
            )
        dq, dk, dv = attention.backward(dout, q, k, v, out, lse, gathered, needs_kv=needs_kv)
        if gathered is None:
            self._combine((dq, dk.to(q.dtype), dv.to(q.dtype)), ())
        else:
            assert gathered.dk is not None and gathered.dv is not None
            # dk and dv, from causal attention, are of this inner group's rows alone
            keys = by_inner_place(self.level, torch.cat((gathered.dk, gathered.dv)))
            keys[self.level.inner] += torch.cat((dk, dv))
            self._combine((dq,), [x.to(q.dtype) for x in keys])
        return dout, out

    def combined_gradients(self) -> list[Tensor]:
        """Wait for the all-to-all that returns results (combine), and return dq (t, N, H), dk and
        dv (t, K, H) of the local rows."""
        return combined(self.level, self._arrived(), (self._queries,), self._keys)

    def _arrived(self) -> Tensor:
        assert self._transfer is not None
        transfer, self._transfer = self._transfer, None
        return transfer()

    def _unpacked(
        self, x: Tensor, num_queries: int
    ) -> tuple[Sequence[Tensor], Tensor, Tensor, Gathered | None]:
        """Split dispatched rows x into their tensors. Return the query tensors (n, L, H), of which
        there are `num_queries` (1 for q; 3 for dout, out and q), then k and v (m, L, H) of the same
        rows, then the keys and values gathered from all inner groups. The last result is None if
        there is one inner group."""
        level, m = self.level, self._m
        inners = dispatched(level, x, (self._queries,) * num_queries, self._keys)
        *queries, k, v = inners[level.inner].split((self._n,) * num_queries + (m, m))
        if level.num_inner == 1:
            return queries, k, v, None
        kv = in_token_order(level, [inner[-2 * m :] for inner in inners])
        return queries, k, v, Gathered(kv[:m], kv[m:])

    def _combine(self, own: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Start the combine, the all-to-all that returns results to the processes that hold the
        rows.

        Args:
            own: tensors (w, L, H) for this process's inner group (the processes that divide the
                heads).
            keys: one tensor (w, L, H) for each inner group, in order; empty if there is only one.
        """
        each = [[y] for y in keys] or [[] for _ in range(self.level.num_inner)]
        each[self.level.inner] = [*own, *each[self.level.inner]]
        self._transfer = combine(self._exchange, self.level, each)


def _zeros(x: Tensor, lse: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=lse.dtype, device=x.device)


SavedAttention = tuple[Tensor, tuple[Tensor, ...]]
"""out (N, T, H) of this process's rows, and the log-sum-exps of local parts and of each level, left
where attention ran: (heads of the process, rows there)."""


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: ChunkRows,
    layer_kv: LayerKV,
    rule: AttentionRule,
    backend: Backend,
    exchange: Exchange | None = None,
    sinks: Tensor | None = None,
    saved: SavedAttention | None = None,
) -> tuple[Tensor, SavedAttention]:
    """Compute a chunk's attention and store the keys and values that `layer_kv` keeps.

    Args:
        q: (N, T, H).
        k: (K, T, H), as is v.
        rows: which rows of the chunk this process has.
        exchange: the all-to-alls; required if `rows` has a level of several processes.
        sinks: (N,) logits without a value that join every row's softmax (gpt-oss).
        saved: second result of an earlier identical forward. Then nothing is computed, exchanged
            or stored; the backward is unchanged.

    Returns:
        out (N, T, H), and the `SavedAttention` to pass as `saved`.
    """
    call = _Call(rows, layer_kv, rule, backend, exchange, saved is not None)
    with torch.no_grad():
        if saved is None:
            out, lses, kept = _forward(q, k, v, sinks, call)
        else:
            out, lses = saved
            kept = (q.detach(), k.detach(), v.detach(), out)
    given = (q, k, v, sinks, out, call, *lses, *kept)
    return _ChunkAttention.apply(*given), (out, lses)  # type: ignore[no-untyped-call]


def store_kv(
    k: Tensor,
    v: Tensor,
    *,
    rows: ChunkRows,
    layer_kv: LayerKV,
    rule: AttentionRule,
    exchange: Exchange | None = None,
) -> None:
    """Store the parts of k and v (K, T, H) that `layer_kv` keeps, without running attention."""
    with torch.no_grad():
        levels = [
            LevelAttention(level, exchange, 0, k.shape[0])
            for level in rows.exchanged
            if any(layer_kv.keeps(placed.index) for placed in level.slices)
        ]
        for level in levels:
            level.start((), (k, v))
        if rows.own is not None:
            own = slice(*rows.own.local)
            store_slices(rows.own.slices, k[:, own], v[:, own], layer_kv, rule)
        for level in levels:
            level.store(layer_kv, rule)


@dataclass(frozen=True, slots=True)
class _Call:
    rows: ChunkRows
    layer_kv: LayerKV
    rule: AttentionRule
    backend: Backend
    exchange: Exchange | None
    is_saved: bool
    """Whether the forward was given saved attention: its backward has undispatched rows alone."""

    def attention(self, slices: Sequence[PlacedSlice], first_row: int = 0) -> SliceAttention:
        return SliceAttention(slices, self.layer_kv, self.rule, self.backend, first_row)

    def levels(self, num_heads: int, num_kv_heads: int) -> list[LevelAttention]:
        return [
            LevelAttention(level, self.exchange, num_heads, num_kv_heads)
            for level in self.rows.exchanged
        ]

    def own_parts(self) -> list[tuple[SliceAttention, slice]]:
        """Return pairs (attention, rows) for the local slices, which this process holds alone: one
        pair for all of them or, if all-to-alls can be hidden, one for each of two halves. The list
        is empty if there are no local slices."""
        if self.rows.own is None:
            return []
        slices = self.rows.own.slices
        parts = []
        for part in _halves(slices) if self.rows.exchanged else (slices,):
            own = slice(part[0].stretches[0].start, part[-1].stretches[-1].stop)
            parts.append((self.attention(part, own.start), own))
        return parts


def _halves(slices: Sequence[PlacedSlice]) -> list[Sequence[PlacedSlice]]:
    """Divide slices into two parts of consecutive slices, with about equal work. A single slice is
    not divided: the list then has one part."""
    totals = list(accumulate(placed.num_pairs for placed in slices))
    cut = min(range(len(slices)), key=lambda i: abs(2 * totals[i] - totals[-1])) + 1
    return [half for half in (slices[:cut], slices[cut:]) if half]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return out (N, T, H), the log-sum-exps, and the other tensors that the backward needs.

    log-sum-exps = [local half 1, local half 2 if there is one, level 0, level 1, ...]
    kept = [q, k, v, out of local rows, then for each level: arrived rows, out (n, L, H)]
    """
    levels, parts = call.levels(q.shape[0], k.shape[0]), call.own_parts()
    # every dispatch is under way before any attention, so that local work hides it
    for level in levels:
        level.start((q,), (k, v))
    if not levels and parts:
        out, lse = _own_forward(q, k, v, sinks, *parts[0])
        return out, (lse,), (q.detach(), k.detach(), v.detach(), out)
    # a process without tokens has one dummy row, which nothing below writes
    out = _token_major(q, q.shape[1], zeros=not call.rows.num_tokens)
    # local rows come last: levels are in falling size of their groups
    own = slice(call.rows.own.local[0] if call.rows.own else q.shape[1], None)
    # clone(): a view would keep the exchanged rows in memory until the backward
    kept = [x.detach()[:, own].clone() for x in (q, k, v)] + [out[:, own]]
    lses, in_levels = [], []
    for number in range(2):
        if number < len(parts):
            attention, rows = parts[number]
            own_q, own_k, own_v, own_out = kept
            own_out[:, rows], lse = _own_forward(own_q, own_k, own_v, sinks, attention, rows)
            lses.append(lse)
        if number == 0:  # between the halves: the second one hides each level's combine
            in_levels = [x.forward(call.attention(x.level.slices), sinks) for x in levels]
    for level in levels:
        out[:, slice(*level.level.local)] = level.combined_out().transpose(0, 1)
    lses += [lse for _, _, lse in in_levels]
    kept += [x for came_in, level_out, _ in in_levels for x in (came_in, level_out)]
    return out, tuple(lses), tuple(kept)


def _own_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: SliceAttention, rows: slice
) -> tuple[Tensor, Tensor]:
    """Store k and v of local `rows`, and return their attention: out and log-sum-exps."""
    q, k, v = (_rows(x, rows) for x in (q, k, v))
    store_slices(attention.slices, k, v, attention.layer_kv, attention.rule, attention.first_row)
    return attention.forward(q, k, v, sinks, None)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x if rows == slice(0, x.shape[1]) else x[:, rows]


def _token_major(like: Tensor, num_rows: int, *, zeros: bool) -> Tensor:
    """Return a new tensor (N, rows, H) with memory layout (rows, N, H); `like` is (N, any, H)."""
    x = like.new_empty((num_rows, like.shape[0], like.shape[2]))
    return (x.zero_() if zeros else x).transpose(0, 1)


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        out: Tensor, call: _Call, *kept: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(sinks, *kept)
        return out.view_as(out)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *kept = ctx.saved_tensors
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = torch.zeros_like(sinks, dtype=lse_dtype(dout.dtype))
        dq, dk, dv = _backward(dout, kept, ctx.call, sinks, dsinks, needs_kv)
        given = None if dsinks is None else dsinks.to(sinks.dtype)
        return dq, dk, dv, given, None, None, *(None for _ in kept)


def _add_sink_grads(
    dsinks: Tensor | None, sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor,
    heads: slice = slice(None),
) -> None:  # fmt: skip
    """Add to dsinks (N,) what the rows contribute for `heads`, given dout and out (n, T, H)."""
    if dsinks is not None:
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # (n, T)
        share = torch.exp(sinks[heads].to(lse.dtype)[:, None] - lse)
        dsinks[heads] -= (share * delta).sum(-1)


def _backward(
    dout: Tensor, kept: Sequence[Tensor], call: _Call, sinks: Tensor, dsinks: Tensor | None,
    needs_kv: bool,
) -> list[Tensor]:  # fmt: skip
    """Return dq (N, T, H), dk and dv (K, T, H). `kept`: log-sum-exps, then `kept` of `_forward`."""
    parts, num_levels = call.own_parts(), len(call.rows.exchanged)
    lses, (q, k, v, out, *in_levels) = kept[: (n := len(parts) + num_levels)], kept[n:]
    if not num_levels and parts:
        dq, dk, dv = parts[0][0].backward(dout, q, k, v, out, lses[0], None, needs_kv=needs_kv)
        _add_sink_grads(dsinks, sinks, dout, out, lses[0])
        return [dq, dk.to(k.dtype), dv.to(v.dtype)]
    levels = call.levels(q.shape[0], k.shape[0])
    for level in levels:
        level.start((dout, out, q) if call.is_saved else (dout,), (k, v) if call.is_saved else ())
    num_rows, is_empty = dout.shape[1], not call.rows.num_tokens
    grads = [_token_major(x, num_rows, zeros=is_empty) for x in (q, k, v)]
    own = slice(*call.rows.own.local) if call.rows.own else slice(num_rows, num_rows)
    if call.is_saved:  # those are all rows of the process, and the levels kept nothing
        q, k, v, out = (x[:, own] for x in (q, k, v, out))
    for number in range(2):  # the levels between the two local halves, as in `_forward`
        if number < len(parts):
            attention, rows = parts[number]
            given = dout[:, own], q, k, v, out
            dout_, q_, k_, v_, out_ = (x[:, rows] for x in given)
            found = attention.backward(
                dout_, q_, k_, v_, out_, lses[number], None, needs_kv=needs_kv
            )
            _add_sink_grads(dsinks, sinks, dout_, out_, lses[number])
            for grad, part in zip(grads, found, strict=True):
                grad[:, own][:, rows] = part
        if number == 0:
            for i, level in enumerate(levels):
                before = None if call.is_saved else (in_levels[2 * i], in_levels[2 * i + 1])
                attention, lse = call.attention(level.level.slices), lses[len(parts) + i]
                both = level.backward(attention, lse, before, needs_kv=needs_kv)
                _add_sink_grads(dsinks, sinks, *both, lse, level.heads)
    for level in levels:
        for grad, part in zip(grads, level.combined_gradients(), strict=True):
            grad[:, slice(*level.level.local)] = part.transpose(0, 1)
    return grads
