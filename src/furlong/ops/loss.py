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
    grad_scale: float,
) -> tuple[float, Tensor]:
    """The summed loss of a chunk and the gradient of `grad_scale * loss` by the hidden states.

    `head` maps (t, D) to logits (t, V); `hidden` (T, D); `labels` (T,), already shifted,
    IGNORE_INDEX where there is none: those positions never reach the head. The gradient is added to
    the head's parameters and returned by the hidden states (T, D). The loss itself is computed in
    float32, or in float64 for float64 logits.
    """
    rows = torch.nonzero(labels != IGNORE_INDEX).flatten()
    grad = torch.zeros_like(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    tiles = rows.split(max_tile_tokens) if len(rows) else ()  # split makes one tile of no rows
    for tile in tiles:
        tile_hidden = hidden.detach()[tile].requires_grad_()  # (t, D)
        with torch.enable_grad():
            loss = cross_entropy(_wide(head(tile_hidden)), labels[tile], reduction="sum")
            (loss * grad_scale).backward()  # type: ignore[no-untyped-call]
        assert tile_hidden.grad is not None
        grad[tile] = tile_hidden.grad
        total += loss.detach()
    return float(total), grad


def token_losses(
    head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, *, max_tile_tokens: int
) -> Tensor:
    """The loss of every token (T,), float64, 0 where there is no label; without gradients.

    Arguments as in `tiled_loss`.
    """
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for tile in torch.nonzero(labels != IGNORE_INDEX).flatten().split(max_tile_tokens):
            logits = _wide(head(hidden[tile]))  # (t, V)
            losses[tile] = cross_entropy(logits, labels[tile], reduction="none").double()
    return losses


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
