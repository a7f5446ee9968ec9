"""Attention of one chunk: its own slices, and the stored keys before each of them.

    out = merge over blocks of softmax(q k^T) v

Own slices are causal and see nothing of one another; the prefix of a slice is read block by block
from the store, in any order. Partial results are merged by log-sum-exp; the backward uses the
merged output and log-sum-exp for every block, as flash attention does. It adds the prefix's dK,dV
to the store and returns, for the chunk's own K,V, their own gradient plus what later chunks have
sent: the relay of SeCO (Algorithm 1) and ChunkFlow (Algorithm 2) without hooks and without an extra
loss term.

    T tokens of the chunk, N query heads, K key-value heads, H head dim, S keys of a prefix block
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.ops.backend import Backend, Block, lse_dtype

Relayed = tuple[int, Tensor, Tensor]
"""First row within the slice, and the dK,dV (K, rows, H) that later chunks sent from there on."""


class PrefixBlock(Protocol):
    """Some stored keys and values before a slice, valid until the next block is asked for."""

    @property
    def k(self) -> Tensor: ...  # (K, S, H)
    @property
    def v(self) -> Tensor: ...  # (K, S, H)
    @property
    def distance(self) -> int:
        """Position of the slice's first token minus that of the block's first key."""
        ...

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients that wait for this block's own chunk."""
        ...


class LayerKV(Protocol):
    """What one layer of one cell reads from the store and sends to it."""

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        """The blocks that a slice's tokens see, in any order.

        Whoever asks for the next block is done with this one: it keeps no tensor of it and, with
        `gradients`, has added this one's.
        """
        ...

    def relayed(self, slice_index: int) -> Relayed | None:
        """What later chunks have sent to a slice's own keys and values, None if nothing."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer's attention forms its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def block(self, distance: int) -> Block:
        return Block(distance, self.scale, self.window, self.softcap)


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slices: Sequence[slice],
    layer_kv: LayerKV,
    rule: AttentionRule,
    backend: Backend,
    sinks: Tensor | None = None,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """q (N, T, H), k and v (K, T, H) -> out (N, T, H) and its log-sum-exp (N, T).

    `slices` are the rows of the chunk's slices. `sinks` (N,) are logits without a value that join
    every row's softmax (gpt-oss). With `known` = (out, lse) of an
    earlier identical forward nothing is computed; the backward works as ever.
    """
    if known is None:
        with torch.no_grad():
            known = _forward(q, k, v, slices, layer_kv, rule, backend, sinks)
    out, lse = known
    call = _Call(tuple(slices), layer_kv, rule, backend)
    return _ChunkAttention.apply(q, k, v, sinks, out, lse, call), lse  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Call:
    slices: tuple[slice, ...]
    layer_kv: LayerKV
    rule: AttentionRule
    backend: Backend


def _forward(
    q: Tensor, k: Tensor, v: Tensor, slices: Sequence[slice],
    layer_kv: LayerKV, rule: AttentionRule, backend: Backend, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if len(slices) == 1:
        out, lse = backend.forward(q, k, v, rule.block(0))
    else:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
        for rows in slices:
            out[:, rows], lse[:, rows] = backend.forward(
                q[:, rows], k[:, rows], v[:, rows], rule.block(0)
            )
    for index, rows in enumerate(slices):
        merged: tuple[Tensor, Tensor] | None = None
        for piece in layer_kv.prefix(index, rule.window, gradients=False):
            if merged is None:
                merged = out[:, rows].to(lse.dtype), lse[:, rows]
            partial = backend.forward(q[:, rows], piece.k, piece.v, rule.block(piece.distance))
            merged = merge(*merged, *partial)
            del piece, partial  # done with, before the next is asked for
        if merged is not None:
            out[:, rows], lse[:, rows] = merged
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
        out = (out * torch.exp(lse - with_sinks)[..., None]).to(q.dtype)
        lse = with_sinks
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from each set's output and log-sum-exp.

    out (N, T, H), lse (N, T); computed in lse's dtype. At least one of the two must see a key.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a.to(lse.dtype) * torch.exp(lse_a - lse)[..., None]
    return out.addcmul_(out_b.to(lse.dtype), torch.exp(lse_b - lse)[..., None]), lse


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        out: Tensor, lse: Tensor, call: _Call,
    ) -> Tensor:  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out.view_as(out)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        backend, rule = call.backend, call.rule
        if len(call.slices) == 1:
            dq, dk, dv = backend.backward(dout, q, k, v, out, lse, rule.block(0))
        else:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            for rows in call.slices:
                dq[:, rows], dk[:, rows], dv[:, rows] = backend.backward(
                    dout[:, rows], q[:, rows], k[:, rows], v[:, rows], out[:, rows], lse[:, rows],
                    rule.block(0),
                )  # fmt: skip
        needs_kv = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        for index, rows in enumerate(call.slices):
            _prefix_backward(call, index, (dout, q, out, lse), dq, needs_kv)
            sent = call.layer_kv.relayed(index) if needs_kv else None
            if sent is not None:
                first, dk_relayed, dv_relayed = sent
                kept = slice(rows.start + first, rows.start + first + dk_relayed.shape[1])
                dk[:, kept] += dk_relayed
                dv[:, kept] += dv_relayed
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # (N, T)
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            dsinks = -(share * delta).sum(-1).to(sinks.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _prefix_backward(
    call: _Call, index: int, whole: tuple[Tensor, ...], dq: Tensor, gradients: bool
) -> None:
    """Add to dq what a slice's prefix gives, and to the prefix what the slice sends.

    `whole` is the chunk's dout, q, out (N, T, H) and lse (N, T).
    """
    rows = call.slices[index]
    dout, q, out, lse = (x[:, rows] for x in whole)
    dq_prefix: Tensor | None = None  # summed in lse's dtype, rounded once
    for piece in call.layer_kv.prefix(index, call.rule.window, gradients=gradients):
        dq_part, dk, dv = call.backend.backward(
            dout, q, piece.k, piece.v, out, lse, call.rule.block(piece.distance)
        )
        dq_prefix = dq_part.to(lse.dtype) if dq_prefix is None else dq_prefix.add_(dq_part)
        if gradients:
            piece.add_grad(dk, dv)
        del piece, dq_part, dk, dv  # done with, before the next is asked for
    if dq_prefix is not None:
        dq[:, rows] += dq_prefix
