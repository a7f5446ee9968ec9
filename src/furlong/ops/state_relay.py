"""The relay of recurrent states: SeCO's relay of K,V with a state in their place.

A layer that remembers earlier tokens in a state (linear attention, a state space, a convolution)
hands it from a slice to the next one of its sequence. In the graph of a slice the state that enters
is a leaf, and its gradient is sent to the chunk before; the state that leaves is an output, whose
gradient is what the chunk behind has sent. Both happen inside the backward of the cell, so that
checkpoints and retained graphs need nothing of their own.

    T tokens of a slice, D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

StateKey = tuple[str, int]
"""Kind of a state ("conv", "recurrent" or "linear"), and its number in its layer."""
States = dict[StateKey, Tensor]
Gradients = Sequence[Tensor | None]
"""In the order of the states."""


def arrive(
    x: Tensor, states: Mapping[StateKey, Tensor], send: Callable[[Gradients], None]
) -> tuple[Tensor, States]:
    """x (1, T, D) and the states that enter its slice, whose gradients go to `send`."""
    if not torch.is_grad_enabled() or not states:
        return x, dict(states)
    # an input that takes gradients makes the states' own be computed, also where x has none
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    out, *entered = _Arrive.apply(anchor, send, x, *states.values())  # type: ignore[no-untyped-call]
    return out, dict(zip(states, entered, strict=True))


def depart(y: Tensor, states: Sequence[Tensor], relayed: Callable[[], Gradients | None]) -> Tensor:
    """y (1, T, D) of a slice; with its gradient the states that leave get what `relayed` tells."""
    if not torch.is_grad_enabled() or not y.requires_grad:
        return y
    return _Depart.apply(relayed, y, *states)  # type: ignore[no-any-return, no-untyped-call]


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, send: Callable[[Gradients], None], x: Tensor, *states: Tensor
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
        ctx: Any, relayed: Callable[[], Gradients | None], y: Tensor, *states: Tensor
    ) -> Tensor:
        ctx.relayed, ctx.num_states = relayed, len(states)
        return y.view_as(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, dy, *(ctx.relayed() or (None,) * ctx.num_states)
