"""Attention of one chunk over the places of its slices, on one process of their pool.

Each level (`furlong.plan.rows`) sends its rows to the processes of its place, attends there to all
of them with this process's heads, and takes its own rows back; slices that lie on this process
alone need no exchange, and on one device there are no others. All ways in start first. Half of the
own work hides them, the other half hides the ways back:

    start all ways in, own half, each level from the largest (wait, store K,V, attend, start its way
    back), other own half, wait for all ways back

The backward does the same in the same order. What it returns for a chunk's own K,V is their own
gradient plus what later chunks have sent: the relay of SeCO (Algorithm 1) and ChunkFlow
(Algorithm 2) without hooks and without an extra loss term. What an earlier identical forward has
remembered needs no exchange until the backward, which then sends q, k, v and out beside dout.

    T rows of the process, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.ops.backend import Backend
from furlong.ops.exchange import Exchange
from furlong.ops.layer_kv import AttentionRule, LayerKV
from furlong.ops.level_attention import LevelAttention
from furlong.ops.slice_attention import SliceAttention, store_slices
from furlong.plan.rows import ChunkRows, PlacedSlice

Known = tuple[Tensor, tuple[Tensor, ...]]
"""out (N, T, H) of the process's rows, and the log-sum-exps of own slices and of each level, which
lie where they were computed: (heads of the process, rows there)."""


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
    known: Known | None = None,
) -> tuple[Tensor, Known]:
    """q (N, T, H), k and v (K, T, H) -> out (N, T, H), and it with its log-sum-exps.

    `sinks` (N,) are logits without a value that join every row's softmax (gpt-oss). `exchange` is
    needed where `rows` have a place of several processes. Keys and values that `layer_kv` keeps are
    stored. With `known` of an earlier identical forward nothing is computed, exchanged or stored;
    the backward works as ever.
    """
    call = _Call(rows, layer_kv, rule, backend, exchange, known is not None)
    with torch.no_grad():
        if known is None:
            out, lses, kept = _forward(q, k, v, sinks, call)
        else:
            out, lses = known
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
    """Store what `layer_kv` keeps of k and v (K, T, H), where attention does not run."""
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
    is_known: bool
    """Whether an earlier forward was remembered: the backward has the process's rows alone."""

    def attention(self, slices: Sequence[PlacedSlice], first_row: int = 0) -> SliceAttention:
        return SliceAttention(slices, self.layer_kv, self.rule, self.backend, first_row)

    def levels(self, num_heads: int, num_kv_heads: int) -> list[LevelAttention]:
        return [
            LevelAttention(level, self.exchange, num_heads, num_kv_heads)
            for level in self.rows.exchanged
        ]

    def own_parts(self) -> list[tuple[SliceAttention, slice]]:
        """Own slices with their rows among own ones, halved where they have something to hide."""
        if self.rows.own is None:
            return []
        slices = self.rows.own.slices
        parts = []
        for part in _halves(slices) if self.rows.exchanged else (slices,):
            own = slice(part[0].stretches[0].start, part[-1].stretches[-1].stop)
            parts.append((self.attention(part, own.start), own))
        return parts


def _halves(slices: Sequence[PlacedSlice]) -> list[Sequence[PlacedSlice]]:
    """Slices in two runs of about equal work, or in one if there is but one slice."""
    totals = list(accumulate(placed.num_pairs for placed in slices))
    cut = min(range(len(slices)), key=lambda i: abs(2 * totals[i] - totals[-1])) + 1
    return [half for half in (slices[:cut], slices[cut:]) if half]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """out (N, T, H), the log-sum-exps, and what the backward takes besides.

    That is q, k, v and out of own rows, and of each level what came in and out there.
    """
    levels, parts = call.levels(q.shape[0], k.shape[0]), call.own_parts()
    for level in levels:
        level.start((q,), (k, v))
    if not levels and parts:
        out, lse = _own_forward(q, k, v, sinks, *parts[0])
        return out, (lse,), (q.detach(), k.detach(), v.detach(), out)
    out = _token_major(q, q.shape[1], zeros=not call.rows.num_tokens)
    own = slice(call.rows.own.local[0] if call.rows.own else q.shape[1], None)
    # the rows that travel would stay in memory with a view
    kept = [x.detach()[:, own].clone() for x in (q, k, v)] + [out[:, own]]
    lses, in_levels = [], []
    for number in range(2):
        if number < len(parts):
            attention, rows = parts[number]
            own_q, own_k, own_v, own_out = kept
            own_out[:, rows], lse = _own_forward(own_q, own_k, own_v, sinks, attention, rows)
            lses.append(lse)
        if number == 0:
            in_levels = [x.forward(call.attention(x.level.slices), sinks) for x in levels]
    for level in levels:
        out[:, slice(*level.level.local)] = level.returned_out().transpose(0, 1)
    lses += [lse for _, _, lse in in_levels]
    kept += [x for came_in, level_out, _ in in_levels for x in (came_in, level_out)]
    return out, tuple(lses), tuple(kept)


def _own_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: SliceAttention, rows: slice
) -> tuple[Tensor, Tensor]:
    """Store k and v and attend to `rows` of own slices."""
    q, k, v = (_rows(x, rows) for x in (q, k, v))
    store_slices(attention.slices, k, v, attention.layer_kv, attention.rule, attention.first_row)
    return attention.forward(q, k, v, sinks, None)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x if rows == slice(0, x.shape[1]) else x[:, rows]


def _token_major(like: Tensor, num_rows: int, *, zeros: bool) -> Tensor:
    """A tensor (N, rows, H) that lies as the model reads it, row by row; `like` (N, any, H)."""
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
        dsinks = _SinkGradients(sinks if ctx.needs_input_grad[3] else None)
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dq, dk, dv = _backward(dout, kept, ctx.call, dsinks, needs_kv)
        return dq, dk, dv, dsinks.total(), None, None, *(None for _ in kept)


class _SinkGradients:
    """Gradients of a layer's sinks (N,), to which the own heads and rows of a process add."""

    def __init__(self, sinks: Tensor | None) -> None:
        self._sinks = sinks
        self._total: Tensor | None = None

    def add(self, dout: Tensor, out: Tensor, lse: Tensor, heads: slice = slice(None)) -> None:
        """dout, out (n, T, H) and lse (n, T) of some heads."""
        if self._sinks is None:
            return
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        share = torch.exp(self._sinks[heads].to(lse.dtype)[:, None] - lse)
        if self._total is None:
            self._total = torch.zeros_like(self._sinks, dtype=lse.dtype)
        self._total[heads] -= (share * delta).sum(-1)

    def total(self) -> Tensor | None:
        if self._sinks is None:
            return None
        return torch.zeros_like(self._sinks) if self._total is None else self._total.to(self._sinks)


def _backward(
    dout: Tensor, kept: Sequence[Tensor], call: _Call, dsinks: _SinkGradients, needs_kv: bool
) -> list[Tensor]:
    """dq (N, T, H), dk and dv (K, T, H); `kept` as `_forward` returns it, behind log-sum-exps."""
    parts, num_levels = call.own_parts(), len(call.rows.exchanged)
    lses, (q, k, v, out, *in_levels) = kept[: (n := len(parts) + num_levels)], kept[n:]
    if not num_levels and parts:
        dq, dk, dv = parts[0][0].backward(dout, q, k, v, out, lses[0], None, needs_kv=needs_kv)
        dsinks.add(dout, out, lses[0])
        return [dq, dk.to(k.dtype), dv.to(v.dtype)]
    levels = call.levels(q.shape[0], k.shape[0])
    for level in levels:
        level.start((dout, out, q) if call.is_known else (dout,), (k, v) if call.is_known else ())
    num_rows, is_empty = dout.shape[1], not call.rows.num_tokens
    grads = [_token_major(x, num_rows, zeros=is_empty) for x in (q, k, v)]
    own = slice(*call.rows.own.local) if call.rows.own else slice(num_rows, num_rows)
    if call.is_known:
        q, k, v, out = (x[:, own] for x in (q, k, v, out))
    for number in range(2):
        if number < len(parts):
            attention, rows = parts[number]
            given = dout[:, own], q, k, v, out
            dout_, q_, k_, v_, out_ = (x[:, rows] for x in given)
            found = attention.backward(
                dout_, q_, k_, v_, out_, lses[number], None, needs_kv=needs_kv
            )
            dsinks.add(dout_, out_, lses[number])
            for grad, part in zip(grads, found, strict=True):
                grad[:, own][:, rows] = part
        if number == 0:
            for i, level in enumerate(levels):
                before = None if call.is_known else (in_levels[2 * i], in_levels[2 * i + 1])
                attention, lse = call.attention(level.level.slices), lses[len(parts) + i]
                both = level.backward(attention, lse, before, needs_kv=needs_kv)
                dsinks.add(*both, lse, level.heads)
    for level in levels:
        for grad, part in zip(grads, level.returned_gradients(), strict=True):
            grad[:, slice(*level.level.local)] = part.transpose(0, 1)
    return grads
