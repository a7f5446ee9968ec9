"""Cross-entropy over tiles of labelled tokens, so that logits exist for one tile at a time.

Which rows have a label is known beforehand, and the sum stays on the device: nothing here waits for
the device. A chunk without labels never touches the head.

T tokens of the chunk, R rows of it that have a label, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100
_MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
_MIN_TILE_TOKENS, _MAX_TILE_TOKENS = {"cpu": 128}, {"cpu": 256}
"""A tile on a CPU has 128 to 256 rows: fewer cost time, more cost memory and save none.

One thread, float32, trained head, milliseconds per token of tiles of 64 / 128 / 256 / 1,024 rows
(and MiB of a tile of 128 / 1,024 rows, of which at least three exist at a time):

    V 4,096,   D 384: 0.16 / 0.15 / 0.14 / 0.13  (2 / 16)    D 896: 0.32 / 0.31 / 0.26 / 0.25
    V 32,000,  D 384: 1.5 / 1.1 / 1.0 / 1.0      (16 / 125)  D 896: 3.3 / 2.5 / 2.5 / 2.1
    V 151,936, D 384: 7.8 / 6.5 / 5.5 / -        (74 / 594)  D 896: 16.7 / 13.5 / 12.8 / -
"""


def tile_tokens(vocab_size: int, device: torch.device) -> int:
    """Tokens per tile so that a tile's logits stay small beside a chunk's activations."""
    tokens = _MAX_LOGITS.get(device.type, 2**25) // vocab_size
    tokens = max(tokens, _MIN_TILE_TOKENS.get(device.type, 64))
    return min(tokens, _MAX_TILE_TOKENS.get(device.type, tokens))


def labelled_rows(labels: Tensor) -> Tensor:
    """Indices (R,) int64 of the labels (T,) that are one; called where they lie on the CPU."""
    return torch.nonzero(labels != IGNORE_INDEX).flatten()


def tiled_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    rows: Tensor,
    max_tile_tokens: int,
    grad_scale: float,
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk and the gradient of `grad_scale * loss` by the hidden states.

    `head` maps (t, D) to logits (t, V); `hidden` (T, D); `labels` (T,), already shifted; `rows`
    (R,), on the same device, are those with a label: the others never reach the head. The gradient
    is added to the head's parameters and returned by the hidden states (T, D). The loss is a
    float64 scalar on the device, computed in float32, or in float64 for float64 logits.
    """
    grad = torch.zeros_like(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for tile in _tiles(rows, max_tile_tokens):
        tile_hidden = hidden.detach()[tile].requires_grad_()  # (t, D)
        with torch.enable_grad():
            loss = cross_entropy(_wide(head(tile_hidden)), labels[tile], reduction="sum")
            (loss * grad_scale).backward()  # type: ignore[no-untyped-call]
        assert tile_hidden.grad is not None
        grad[tile] = tile_hidden.grad
        total += loss.detach()
    return total, grad


def token_losses(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    rows: Tensor,
    max_tile_tokens: int,
) -> Tensor:
    """The loss of every token (T,), float64, 0 where there is no label; without gradients.

    Arguments as in `tiled_loss`.
    """
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for tile in _tiles(rows, max_tile_tokens):
            logits = _wide(head(hidden[tile]))  # (t, V)
            losses[tile] = cross_entropy(logits, labels[tile], reduction="none").double()
    return losses


def _tiles(rows: Tensor, max_tile_tokens: int) -> tuple[Tensor, ...]:
    return rows.split(max_tile_tokens) if len(rows) else ()  # split makes one tile of no rows


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
