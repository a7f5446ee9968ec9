"""Attention of slices whose rows a process has: their own tokens, and the stored keys before them.

    out = merge over blocks of softmax(q k^T) v

Own rows are causal and see nothing of one another; the prefix of a slice is read block by block
from the store, in any order. Partial results are merged by log-sum-exp; the backward uses the
merged output and log-sum-exp for every block, as flash attention does.

Where keys and values were gathered (`furlong.plan.rows`), a stretch of a slice also sees the keys
of its own chunk that lie before it. They are one more block without a mask.

    T query rows, S gathered keys, N query heads, K key-value heads, all of this process; H head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.ops.backend import Backend, Block, lse_dtype, merge_
from furlong.ops.layer_kv import AttentionRule, LayerKV, PrefixBlock
from furlong.plan.rows import PlacedSlice, Stretch


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys and values of all tokens of the slices, in token order."""

    k: Tensor  # (K, S, H)
    v: Tensor  # (K, S, H)
    dk: Tensor | None = None
    """Their gradients in log-sum-exp's dtype, where a backward adds to them."""
    dv: Tensor | None = None


def store_slices(
    slices: Sequence[PlacedSlice], k: Tensor, v: Tensor, layer_kv: LayerKV,
    rule: AttentionRule, first_row: int = 0,
) -> None:  # fmt: skip
    """Store k, v (K, S, H) of those slices that later chunks read; `first_row` as in
    `SliceAttention`."""
    for placed in slices:
        if layer_kv.keeps(placed.index):
            keys = slice(placed.keys[0] - first_row, placed.keys[1] - first_row)
            layer_kv.write(placed.index, k[:, keys], v[:, keys], rule)


@dataclass(frozen=True, slots=True)
class SliceAttention:
    """The attention of some slices in one layer. `first_row`: the row, among those that the
    stretches count, of the first one that is given."""

    slices: Sequence[PlacedSlice]
    layer_kv: LayerKV
    rule: AttentionRule
    backend: Backend
    first_row: int = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, gathered: Gathered | None
    ) -> tuple[Tensor, Tensor]:
        """q (N, T, H), k and v (K, T, H) of the same rows -> out (N, T, H), lse (N, T)."""
        squares = self._squares()
        if not squares:  # an inner place may have no row of a few tokens
            return q, q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
        own = self.rule.scores(0)
        if len(squares) == 1:
            out, lse = self.backend.forward(q, k, v, own)
        else:
            out, lse = self.backend.packed_forward(q, k, v, squares, own)
        for branches in self._branches():
            self._merge_earlier(branches, q, out, lse, gathered)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
            out = (out * torch.exp(lse - with_sinks)[..., None]).to(q.dtype)
            lse = with_sinks
        return out, lse

    def _merge_earlier(
        self, branches: Sequence[PlacedSlice], q: Tensor, out: Tensor, lse: Tensor,
        gathered: Gathered | None,
    ) -> None:  # fmt: skip
        """Merge what the rows of slices with one prefix see before them into their out and lse."""
        whole = self._rows(branches)
        wide = _Wide(out, whole, lse.dtype)
        for rows, block, keys in self._seeing_in_chunk(branches):
            assert gathered is not None
            of = gathered.k[:, keys], gathered.v[:, keys]
            wide.merge(rows, lse, *self.backend.forward(q[:, rows], *of, block))
        for piece in self._prefix(branches[0], gradients=False):
            for rows, block in self._seeing(branches, piece):
                wide.merge(rows, lse, *self.backend.forward(q[:, rows], piece.k, piece.v, block))
            del piece  # done with, before the next is asked for
        wide.end()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        gathered: Gathered | None, *, needs_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq (N, T, H) and dk, dv (K, T, H) of the same rows.

        With `needs_kv` the prefix's dK,dV go to the store, and those that later chunks have sent
        are added: to dk and dv, or to those of what was gathered.
        """
        squares, own = self._squares(), self.rule.scores(0)
        if not squares:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        elif len(squares) == 1:
            dq, dk, dv = self.backend.backward(dout, q, k, v, out, lse, own)
        else:
            dq, dk, dv = self.backend.packed_backward(dout, q, k, v, out, lse, squares, own)
        for branches in self._branches():
            self._add_earlier(branches, (dout, q, out, lse), dq, gathered, needs_kv)
        for placed in self.slices if needs_kv else ():
            self._add_relayed(placed, dk, dv, gathered)
        return dq, dk, dv

    def _add_earlier(
        self, branches: Sequence[PlacedSlice], whole: tuple[Tensor, ...], dq: Tensor,
        gathered: Gathered | None, needs_kv: bool,
    ) -> None:  # fmt: skip
        """Add to dq what the rows of slices with one prefix see before them, and send the keys
        there theirs.

        `whole` is dout, q, out (N, T, H) and lse (N, T).
        """
        wide = _Wide(dq, self._rows(branches), whole[3].dtype)
        for rows, block, keys in self._seeing_in_chunk(branches):
            assert gathered is not None and gathered.dk is not None and gathered.dv is not None
            of = gathered.k[:, keys], gathered.v[:, keys]
            dk, dv = self._part_backward(rows, block, whole, *of, wide)
            gathered.dk[:, keys] += dk
            gathered.dv[:, keys] += dv
        for piece in self._prefix(branches[0], gradients=needs_kv):
            sent: tuple[Tensor, Tensor] | None = None
            for rows, block in self._seeing(branches, piece):
                part = self._part_backward(rows, block, whole, piece.k, piece.v, wide)
                sent = part if sent is None else (sent[0] + part[0], sent[1] + part[1])
                del part
            if needs_kv and sent is not None:
                piece.add_grad(*sent)
            del piece, sent  # done with, before the next is asked for
        wide.end()

    def _part_backward(
        self, rows: slice, block: Block, whole: tuple[Tensor, ...], k: Tensor, v: Tensor,
        wide: _Wide,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """dk, dv of earlier keys k, v (K, S, H) from some rows, whose dq is added."""
        dout, q, out, lse = (x[:, rows] for x in whole)
        dq, dk, dv = self.backend.backward(dout, q, k, v, out, lse, block)
        wide.add(rows, dq)
        return dk, dv

    def _add_relayed(
        self, placed: PlacedSlice, dk: Tensor, dv: Tensor, gathered: Gathered | None
    ) -> None:
        sent = self.layer_kv.relayed(placed.index)
        if sent is None:
            return
        first, dk_relayed, dv_relayed = sent
        start = placed.keys[0] + first - (0 if gathered else self.first_row)
        kept = slice(start, start + dk_relayed.shape[1])
        if gathered is not None:
            assert gathered.dk is not None and gathered.dv is not None
            dk, dv = gathered.dk, gathered.dv
        dk[:, kept] += dk_relayed
        dv[:, kept] += dv_relayed

    def _prefix(self, placed: PlacedSlice, *, gradients: bool) -> Iterator[PrefixBlock]:
        """The stored blocks that a slice's rows see."""
        if self.rule.block is None:
            return self.layer_kv.prefix(placed.index, self.rule.window, gradients=gradients)
        num_open = self.rule.open_tokens(placed.start)
        if not num_open:
            return iter(())
        return self.layer_kv.prefix(placed.index, num_open + 1, gradients=gradients)

    def _squares(self) -> list[slice]:
        """The rows that see themselves causally: of each stretch, or of its part of each attention
        block."""
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
        """The slices that have rows, those together that have one prefix."""
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
        """The rows of slices' stretches, which lie behind one another."""
        first, last = branches[0].stretches[0], branches[-1].stretches[-1]
        return slice(first.start - self.first_row, last.stop - self.first_row)

    def _seeing(
        self, branches: Sequence[PlacedSlice], piece: PrefixBlock
    ) -> Iterator[tuple[slice, Block]]:
        """The rows of slices with one prefix that see a block of it, and how.

        Of each stretch they are the first ones; the others are past the window. Without one all
        see all of it: the branches of a parent take one call.
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

    def _seeing_in_chunk(
        self, branches: Sequence[PlacedSlice]
    ) -> Iterator[tuple[slice, Block, slice]]:
        """The same for the gathered keys of each slice itself that lie before a stretch."""
        for placed in branches:
            for stretch in placed.stretches:
                inside = stretch.position - placed.start
                before = min(inside, self.rule.open_tokens(stretch.position))
                rows, block = self._first_rows(stretch, before, before)
                if rows.start < rows.stop and before:
                    last = placed.keys[0] + inside
                    yield rows, block, slice(last - before, last)

    def _first_rows(self, stretch: Stretch, distance: int, num_keys: int) -> tuple[slice, Block]:
        """Those of a stretch that see keys, of which the first one lies `distance` before it."""
        block, start = self.rule.scores(distance), stretch.start - self.first_row
        num_seeing = block.visible_rows(stretch.stop - stretch.start, num_keys)
        num_seeing = min(num_seeing, self._in_block_of(stretch.position - distance, stretch))
        return slice(start, start + num_seeing), block

    def _in_block_of(self, position: int, stretch: Stretch) -> int:
        """The first rows of a stretch that lie in the attention block of an earlier position."""
        distance, num_rows = stretch.position - position, stretch.stop - stretch.start
        return max(0, self.rule.left_tokens(position, distance + num_rows) - distance)


class _Wide:
    """Rows of x (N, T, H) while blocks add to them: in log-sum-exp's dtype, rounded once."""

    def __init__(self, x: Tensor, rows: slice, dtype: torch.dtype) -> None:
        self._x, self._rows, self._dtype = x, rows, dtype
        self._wide: Tensor | None = None

    def merge(self, rows: slice, lse: Tensor, out: Tensor, other_lse: Tensor) -> None:
        """Merge attention of `rows` over more keys into x and lse (N, T)."""
        merge_(self._of(rows), lse[:, rows], out, other_lse)

    def add(self, rows: slice, part: Tensor) -> None:
        self._of(rows).add_(part)

    def end(self) -> None:
        if self._wide is not None and self._wide.dtype != self._x.dtype:
            self._x[:, self._rows] = self._wide

    def _of(self, rows: slice) -> Tensor:
        if self._wide is None:
            self._wide = self._x[:, self._rows].to(self._dtype)
        start = rows.start - self._rows.start
        return self._wide[:, start : start + rows.stop - rows.start]
