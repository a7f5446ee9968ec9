"""States of recurrent layers: caches by which they pass, scans that take none, their gradients.

transformers' layers read and write states through the cache that their decoder was given. An
`EmptyCache` goes through the decoder in its place and remembers nothing: keys and values go through
`AttentionInterface`. A mixer (`models.mixers`) gets a `SliceCache` of its own for each slice. Both
answer whatever a forward asks of a cache.

Two computations keep their states elsewhere. RecurrentGemma's block writes them on itself, and
forgets the tokens before a slice that its convolution joins: `rg_lru` computes the same from the
cache of a slice. A selective scan (Mamba) starts without a state, but is linear in it: `with_state`
adds what one is worth. With decays a_t = exp(A dt_t)

    h_t = a_t h_(t-1) + dt_t B_t u_t,    y_t = (C_t h_t + D u_t) silu(z_t),

so a state h_0 adds C_t (a_1 ... a_t) h_0 silu(z_t) to y_t, whatever has computed the rest.

From chunk to chunk a state goes as SeCO's K,V do. In the graph of a slice the state that enters is
a leaf, and its gradient is sent to the chunk before (`arrive`); the state that leaves is an output,
whose gradient is what the chunk behind has sent (`depart`). Both happen inside the backward of the
cell, so that checkpoints and retained graphs need nothing of their own.

    C channels, K tokens that a convolution joins, T tokens of the slice, D width of the model,
    W width of a block, b batch, d channels and n size of a selective scan's state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu, softplus
from transformers import DynamicCache

StateKey = tuple[str, int]
"""Kind of a state ("conv", "recurrent" or "linear"), and its number in its layer."""
States = dict[StateKey, Tensor]


class EmptyCache(DynamicCache):  # type: ignore[misc]
    """An empty cache of no tokens, whatever is written into it."""

    layer: int | None = None
    """The layer whose keys and values came through last: shared blocks serve several."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return True


class SliceCache(EmptyCache):
    """The states of one mixer for one slice: `before` as they enter it, `after` as they leave it.

    A slice of one token is shown none: the mixer would take its decoding path, which writes in
    place, has no gradient in its kernels and clamps nothing. Its convolution's state is joined all
    the same when the token is written, and its scan begins with the recurrent one, `initial`.
    """

    def __init__(self, before: Mapping[StateKey, Tensor], num_tokens: int) -> None:
        super().__init__()
        self.before, self._hides = before, num_tokens == 1
        self.after: States = {}
        self.initial: Tensor | None = None

    def touch(self, layer: int) -> None:
        """Note that the states of a layer are read or written."""

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self.touch(layer)
        # further convolutions of a layer join their state themselves
        return None if self._hides and not state_idx else self.before.get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """x (1, C, T) -> (1, C, K + T), the state in front of it where there is one."""
        self.touch(layer)
        before, x = self.before.get(("conv", state_idx)), conv_states
        full = x if before is None else torch.cat([before, x], -1)
        width = x.shape[-1] if conv_kernel_size is None else conv_kernel_size
        missing = max(0, width - full.shape[-1])
        self.after["conv", state_idx] = pad(full, (missing, 0))[..., -width:]
        return full

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self.touch(layer)
        before = self.initial = self.before.get(("recurrent", state_idx))
        return None if self._hides else before

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.touch(layer_idx)
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer: int) -> Tensor | None:
        self.touch(layer)
        return self.before.get(("linear", 0))

    def set_linear_cache(self, layer: int, linear_cache: Tensor) -> None:
        self.touch(layer)
        self.after["linear", 0] = linear_cache


def rg_lru_blocks(decoder: nn.Module) -> dict[nn.Module, int]:
    """The recurrent blocks of a decoder, with their layers."""
    layers = getattr(decoder, "layers", ())
    blocks = ((getattr(layer, "temporal_block", None), i) for i, layer in enumerate(layers))
    return {block: i for block, i in blocks if block is not None and is_rg_lru(block)}


def is_rg_lru(module: nn.Module) -> bool:
    return type(module).__name__ == "RecurrentGemmaRecurrentBlock"


def rg_lru(block: Any, x: Tensor, position_ids: Tensor, cache: SliceCache) -> tuple[Tensor, None]:
    """x (1, T, D) -> (1, T, D), from the states of a cache; positions tell where a sequence begins,
    and nothing enters there."""
    num_tokens = x.shape[1]
    gate = block.act_fn(block.linear_y(x))
    branch = block.linear_x(x).transpose(1, 2)  # (1, W, T)
    full = cache.update_conv_state(branch, 0, conv_kernel_size=block.conv1d_width)
    branch = block.conv_1d(full)[..., : full.shape[-1]][..., -num_tokens:]
    recurrence = block.rg_lru
    recurrence.recurrent_states = cache.before.get(("recurrent", 0))
    try:
        scanned = recurrence(branch.transpose(1, 2), position_ids)
        cache.update_recurrent_state(recurrence.recurrent_states, 0)
    finally:
        recurrence.recurrent_states = None
    return block.linear_out(scanned * gate), None


_TILE_ELEMENTS = 2**22


def with_state(
    y: Tensor, last: Tensor, before: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """y (b, d, T) and the last state (b, d, n) of a scan that had begun with `before` (b, d, n).

    `given`: the arguments of the scan by name.
    """
    steps, a, c, z = given["dt"], given["A"], given["C"], given.get("z")
    if given.get("delta_bias") is not None:
        steps = steps + given["delta_bias"].to(steps.dtype)[..., None]
    if given.get("delta_softplus"):
        steps = softplus(steps)
    wide = torch.promote_types(torch.promote_types(y.dtype, torch.float32), before.dtype)
    total, h = steps.to(wide).cumsum(-1), before.to(wide)  # (b, d, T), (b, d, n)
    num_tokens = max(1, _TILE_ELEMENTS // (h.numel() or 1))
    parts = []
    for own, read in zip(
        total.split(num_tokens, -1), c.to(wide).split(num_tokens, -1), strict=True
    ):
        decay = torch.exp(a.to(wide)[None, :, None, :] * own[..., None])  # (b, d, t, n)
        parts.append(torch.einsum("bdtn,bdn,bnt->bdt", decay, h, read))
    more = torch.cat(parts, -1)
    if z is not None:
        more = more * silu(z.to(wide))
    decayed = torch.exp(a.to(wide)[None] * total[..., -1:]) * h
    return (y + more.to(y.dtype)), (last + decayed.to(last.dtype))


def arrive(
    x: Tensor,
    states: Mapping[StateKey, Tensor],
    send: Callable[[Mapping[StateKey, Tensor | None]], None],
) -> tuple[Tensor, States]:
    """x (1, T, D) and the states that enter its slice, whose gradients go to `send`."""
    if not torch.is_grad_enabled() or not states:
        return x, dict(states)
    # an input that takes gradients makes the states' own be computed, also where x has none
    anchor = torch.empty(0, device=x.device, requires_grad=True)

    def back(grads: Sequence[Tensor | None]) -> None:
        send(dict(zip(states, grads, strict=True)))

    out, *entered = _Arrive.apply(anchor, back, x, *states.values())  # type: ignore[no-untyped-call]
    return out, dict(zip(states, entered, strict=True))


def depart(
    y: Tensor, states: Sequence[Tensor], later_grads: Callable[[], Sequence[Tensor | None]]
) -> Tensor:
    """y (1, T, D) of a slice; with its gradient the states that leave get what `later_grads`
    tells."""
    if not torch.is_grad_enabled() or not y.requires_grad:
        return y
    return _Depart.apply(later_grads, y, *states)  # type: ignore[no-any-return, no-untyped-call]


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, send: Callable[..., None], x: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.send = send
        return x.view_as(x), *(state.view_as(state) for state in states)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dx: Tensor | None, *dstates: Tensor | None) -> tuple[Any, ...]:
        ctx.send(dstates)
        return None, None, dx, *(None for _ in dstates)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, later_grads: Callable[[], Sequence[Tensor | None]], y: Tensor, *states: Tensor
    ) -> Tensor:
        ctx.later_grads = later_grads
        return y.view_as(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, dy, *ctx.later_grads()
