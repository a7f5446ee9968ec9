"""Multi-head latent attention (MLA) in chunks: the store keeps latents in place of keys and values.

Keys and values of all heads are linear in a latent that is many times narrower (DeepSeek). A slice
stores its latents, and later chunks expand them part by part as they read them. The backward of an
expansion adds to the latents' gradients, which are stored until the backward of the latents' own
chunk, and at once to the gradients of the expansion's weights.

The store holds each latent as two halves, in the places of a key and a value.

    T rows of the chunk, S rows of a stored block, W width of a latent (everything stored for a
    token); K key-value heads and H head dim of expanded keys and values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from furlong.ops.attention import AttentionRule, LaterGrads, LayerKV, PrefixBlock
from furlong.ops.backends.base import lse_dtype
from furlong.plan.rows import Level

Expansion = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Latents (S, W) -> keys and values (K, S, H)."""

_WHOLE = AttentionRule(1.0)
_MIN_TOKENS = 1024


def store_latents(x: Tensor, own: Level, layer_kv: LayerKV) -> Tensor:
    """Store the latents x (T, W) of local slices that `layer_kv` keeps, and return x as a graph
    node: its backward adds the gradients that later chunks have sent.

    `own`: the level of the slices that this process holds alone.
    """
    rows = x.detach()[slice(*own.local)]
    for placed in own.slices:
        if layer_kv.keeps(placed.index):
            layer_kv.write(placed.index, *_halves(rows[slice(*placed.keys)]), _WHOLE)
    return _Relay.apply(x, own, layer_kv)  # type: ignore[no-any-return, no-untyped-call]


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Level, layer_kv: LayerKV) -> Tensor:
        ctx.own, ctx.layer_kv = own, layer_kv
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        dx = dx.clone()
        for placed in ctx.own.slices:
            sent = ctx.layer_kv.later_grads(placed.index)
            if sent is None:
                continue
            first, *halves = sent
            latents = _joined(*halves)[:, : dx.shape[1]]
            start = ctx.own.local[0] + placed.keys[0] + first
            rows = dx[start : start + len(latents)]
            rows.copy_(rows.to(latents.dtype) + latents)
        return dx, None, None


@dataclass(frozen=True, slots=True)
class LatentKV:
    """Implements `LayerKV` over stored latents, for slices that this process holds alone. The
    store has keys and values of all other slices."""

    stored: LayerKV
    own: frozenset[int]
    """Numbers of the slices whose latents are stored."""
    expand: Expansion
    width: int
    """Width W of a latent."""
    max_tokens: int
    """Most tokens that are expanded at once."""
    adds_gradients: bool
    """Whether the backward adds to the gradients of the expansion's weights."""

    def keeps(self, slice_index: int) -> bool:
        return slice_index not in self.own and self.stored.keeps(slice_index)

    def write(self, slice_index: int, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
        self.stored.write(slice_index, k, v, rule)

    def prefix(
        self, slice_index: int, window: int | None, *, gradients: bool
    ) -> Iterator[PrefixBlock]:
        blocks = self.stored.prefix(slice_index, window, gradients=gradients)
        if slice_index not in self.own:
            yield from blocks
            return
        for block in blocks:
            yield from self._expanded(block, gradients)
            del block  # the contract of `LayerKV.prefix`

    def later_grads(self, slice_index: int) -> LaterGrads | None:
        return None if slice_index in self.own else self.stored.later_grads(slice_index)

    def _expanded(self, block: PrefixBlock, gradients: bool) -> Iterator[PrefixBlock]:
        latents = _joined(block.k, block.v)[:, : self.width]
        grad = latents.new_zeros(latents.shape, dtype=lse_dtype(latents.dtype))
        most = max(self.max_tokens, _MIN_TOKENS)
        for start in range(0, len(latents), most):
            rows = slice(start, start + most)
            part = latents[rows].detach().requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                k, v = self.expand(part)
            yield _ExpandedBlock(
                k, v, block.distance - start, part, grad[rows], self.adds_gradients
            )
            del k, v, part
        if gradients:
            block.add_grad(*_halves(grad))


@dataclass(frozen=True, slots=True)
class _ExpandedBlock:
    """Implements `PrefixBlock` by K,V expanded from latents, to which gradients flow back."""

    expanded_k: Tensor
    expanded_v: Tensor
    distance: int
    latents: Tensor
    grad: Tensor
    """Gradients (S, W) of the latents, to which `add_grad` adds."""
    adds_gradients: bool

    @property
    def k(self) -> Tensor:
        return self.expanded_k.detach()

    @property
    def v(self) -> Tensor:
        return self.expanded_v.detach()

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        outputs = self.expanded_k, self.expanded_v
        given = dk.to(self.expanded_k.dtype), dv.to(self.expanded_v.dtype)
        if self.adds_gradients:
            torch.autograd.backward(outputs, given)
            assert self.latents.grad is not None
            self.grad.add_(self.latents.grad)
        else:
            self.grad.add_(torch.autograd.grad(outputs, self.latents, given)[0])


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split latents (S, W) into two halves (1, S, W / 2), which the store takes as k and v."""
    width = -(-x.shape[1] // 2)
    x = x if x.shape[1] == 2 * width else pad(x, (0, 1))
    return x[None, :, :width], x[None, :, width:]


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Join two halves (1, S, W / 2) to latents (S, W)."""
    return torch.cat((a[0], b[0]), -1)
