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

from furlong.ops.backend import Backend, Block, merge_

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
    """The store as one layer of one cell sees it: reads from it and sends to it."""

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        """The blocks that a slice's tokens see, in any order.

        Whoever asks for the next block is done with this one: it keeps no tensor of it and, with
        `gradients`, has added this one's.
        """
        ...

    def relayed(self, slice_index: int) -> Relayed | None:
        """Gradients of a slice's own keys and values from later chunks, None if there are none."""
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
    own = rule.block(0)
    if len(slices) == 1:
        out, lse = backend.forward(q, k, v, own)
    else:
        out, lse = backend.packed_forward(q, k, v, slices, own)
    for index, rows in enumerate(slices):
        wide: Tensor | None = None  # merged in lse's dtype, rounded once
        for piece in layer_kv.prefix(index, rule.window, gradients=False):
            block = rule.block(piece.distance)
            seeing = _seeing_rows(block, rows, piece)
            partial = backend.forward(q[:, seeing], piece.k, piece.v, block)
            if wide is None:
                wide = out[:, rows].to(lse.dtype)
            merge_(wide[:, : seeing.stop - seeing.start], lse[:, seeing], *partial)
            del piece, partial  # done with, before the next is asked for
        if wide is not None and wide.dtype != out.dtype:
            out[:, rows] = wide
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
        out = (out * torch.exp(lse - with_sinks)[..., None]).to(q.dtype)
        lse = with_sinks
    return out, lse


def _seeing_rows(block: Block, rows: slice, piece: PrefixBlock) -> slice:
    """The first of a slice's rows, which see a key of the block; the others are past the window."""
    seen = block.visible_rows(rows.stop - rows.start, piece.k.shape[1])
    return slice(rows.start, rows.start + seen)


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
        own, whole = call.rule.block(0), (dout, q, k, v, out, lse)
        if len(call.slices) == 1:
            dq, dk, dv = call.backend.backward(*whole, own)
        else:
            dq, dk, dv = call.backend.packed_backward(*whole, call.slices, own)
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
    dout, q, out, lse = whole
    wide: Tensor | None = None  # summed in lse's dtype, rounded once
    for piece in call.layer_kv.prefix(index, call.rule.window, gradients=gradients):
        block = call.rule.block(piece.distance)
        seeing = _seeing_rows(block, rows, piece)
        dq_part, dk, dv = call.backend.backward(
            dout[:, seeing], q[:, seeing], piece.k, piece.v, out[:, seeing], lse[:, seeing], block
        )
        if wide is None:
            wide = dq[:, rows].to(lse.dtype)
        wide[:, : seeing.stop - seeing.start] += dq_part
        if gradients:
            piece.add_grad(dk, dv)
        del piece, dq_part, dk, dv  # done with, before the next is asked for
    if wide is not None and wide.dtype != dq.dtype:
        dq[:, rows] = wide
