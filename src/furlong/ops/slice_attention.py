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
    slices: Sequence[PlacedSlice], k: Tensor, v: Tensor, layer_kv: LayerKV, window: int | None,
    first_row: int = 0,
) -> None:  # fmt: skip
    """Store k, v (K, S, H) of those slices that later chunks read; `first_row` as in
    `SliceAttention`."""
    for placed in slices:
        if layer_kv.keeps(placed.index):
            keys = slice(placed.keys[0] - first_row, placed.keys[1] - first_row)
            layer_kv.write(placed.index, k[:, keys], v[:, keys], window)


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
        own = self.rule.block(0)
        if len(squares) == 1:
            out, lse = self.backend.forward(q, k, v, own)
        else:
            out, lse = self.backend.packed_forward(q, k, v, squares, own)
        for placed in self.slices:
            if placed.stretches:
                self._merge_earlier(placed, q, out, lse, gathered)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
            out = (out * torch.exp(lse - with_sinks)[..., None]).to(q.dtype)
            lse = with_sinks
        return out, lse

    def _merge_earlier(
        self, placed: PlacedSlice, q: Tensor, out: Tensor, lse: Tensor, gathered: Gathered | None
    ) -> None:
        """Merge what a slice's rows see before them into its out and lse."""
        whole = self._rows(placed)
        wide = _Wide(out, whole, lse.dtype)
        for rows, block, keys in self._seeing_in_chunk(placed):
            assert gathered is not None
            of = gathered.k[:, keys], gathered.v[:, keys]
            wide.merge(rows, lse, *self.backend.forward(q[:, rows], *of, block))
        for piece in self.layer_kv.prefix(placed.index, self.rule.window, gradients=False):
            for rows, block in self._seeing(placed, piece):
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
        squares, own = self._squares(), self.rule.block(0)
        if not squares:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        elif len(squares) == 1:
            dq, dk, dv = self.backend.backward(dout, q, k, v, out, lse, own)
        else:
            dq, dk, dv = self.backend.packed_backward(dout, q, k, v, out, lse, squares, own)
        for placed in self.slices:
            if placed.stretches:
                self._add_earlier(placed, (dout, q, out, lse), dq, gathered, needs_kv)
            if needs_kv:
                self._add_relayed(placed, dk, dv, gathered)
        return dq, dk, dv

    def _add_earlier(
        self, placed: PlacedSlice, whole: tuple[Tensor, ...], dq: Tensor,
        gathered: Gathered | None, needs_kv: bool,
    ) -> None:  # fmt: skip
        """Add to dq what a slice's rows see before them, and send the keys there theirs.

        `whole` is dout, q, out (N, T, H) and lse (N, T).
        """
        wide = _Wide(dq, self._rows(placed), whole[3].dtype)
        for rows, block, keys in self._seeing_in_chunk(placed):
            assert gathered is not None and gathered.dk is not None and gathered.dv is not None
            of = gathered.k[:, keys], gathered.v[:, keys]
            dk, dv = self._part_backward(rows, block, whole, *of, wide)
            gathered.dk[:, keys] += dk
            gathered.dv[:, keys] += dv
        for piece in self.layer_kv.prefix(placed.index, self.rule.window, gradients=needs_kv):
            sent: tuple[Tensor, Tensor] | None = None
            for rows, block in self._seeing(placed, piece):
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

    def _squares(self) -> list[slice]:
        """The rows of each stretch, which see themselves causally."""
        first = self.first_row
        stretches = (stretch for placed in self.slices for stretch in placed.stretches)
        return [slice(s.start - first, s.stop - first) for s in stretches]

    def _rows(self, placed: PlacedSlice) -> slice:
        """The rows of a slice's stretches, which lie behind one another."""
        first, last = placed.stretches[0], placed.stretches[-1]
        return slice(first.start - self.first_row, last.stop - self.first_row)

    def _seeing(self, placed: PlacedSlice, piece: PrefixBlock) -> Iterator[tuple[slice, Block]]:
        """The rows of a slice that see a block of its prefix, and how.

        Of each stretch they are the first ones; the others are past the window.
        """
        for stretch in placed.stretches:
            distance = piece.distance + stretch.position - placed.start
            rows, block = self._first_rows(stretch, distance, piece.k.shape[1])
            if rows.start < rows.stop:  # a kernel may divide by their number
                yield rows, block

    def _seeing_in_chunk(self, placed: PlacedSlice) -> Iterator[tuple[slice, Block, slice]]:
        """The same for the gathered keys of the slice itself that lie before a stretch."""
        for stretch in placed.stretches:
            before = stretch.position - placed.start
            rows, block = self._first_rows(stretch, before, before)
            if rows.start < rows.stop and before:
                yield rows, block, slice(placed.keys[0], placed.keys[0] + before)

    def _first_rows(self, stretch: Stretch, distance: int, num_keys: int) -> tuple[slice, Block]:
        """Those of a stretch that see keys, of which the first one lies `distance` before it."""
        block, start = self.rule.block(distance), stretch.start - self.first_row
        num_seeing = block.visible_rows(stretch.stop - stretch.start, num_keys)
        return slice(start, start + num_seeing), block


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
