"""Cross-entropy over tiles of labelled tokens, so that logits exist for one tile at a time.

T tokens of the chunk, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100
_MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
_MIN_TILE_TOKENS = 64


def tile_tokens(vocab_size: int, device: torch.device) -> int:
    """Tokens per tile so that a tile's logits stay small beside a chunk's activations."""
    return max(_MIN_TILE_TOKENS, _MAX_LOGITS.get(device.type, 2**25) // vocab_size)


def tiled_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    max_tile_tokens: int,
    grad_scale: float | None = None,
) -> tuple[float, Tensor | None]:
    """The summed loss of a chunk and, with `grad_scale`, its gradient by the hidden states.

    `head` maps (t, D) to logits (t, V); `hidden` (T, D); `labels` (T,), already shifted,
    IGNORE_INDEX where there is none: those positions never reach the head. With `grad_scale` the
    gradient of `grad_scale * loss` is added to the head's parameters and returned by the hidden
    states (T, D). The loss itself is computed in float32, or in float64 for float64 logits.
    """
    rows = torch.nonzero(labels != IGNORE_INDEX).flatten()
    grad = None if grad_scale is None else torch.zeros_like(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for tile in rows.split(max_tile_tokens):
        tile_hidden = hidden.detach()[tile]  # (t, D)
        if grad is None or grad_scale is None:
            with torch.no_grad():
                total += _summed(head(tile_hidden), labels[tile])
            continue
        tile_hidden.requires_grad_()
        with torch.enable_grad():
            loss = _summed(head(tile_hidden), labels[tile])
            (loss * grad_scale).backward()  # type: ignore[no-untyped-call]
        assert tile_hidden.grad is not None
        grad[tile] = tile_hidden.grad
        total += loss.detach()
    return float(total), grad


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, labels, reduction="sum")
