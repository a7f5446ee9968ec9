"""Cross-entropy over tiles of labelled tokens, so that logits exist for one tile at a time.

Which rows have a label is known beforehand, and the sum stays on the device: nothing here waits for
the device. A chunk without labels never touches the head.

T tokens of the chunk, R rows of it that have a label, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100
_MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
_MIN_TILE_TOKENS, _MAX_TILE_TOKENS = {"cpu": 128}, {"cpu": 256}
"""A tile on a CPU has 128 to 256 rows: fewer cost time, more cost memory and save little.

One thread, float32, a trained head; milliseconds per token and MiB of peak above the start (the
tile's logits about three times, and the V x D gradient that autograd makes per tile):

    rows                  64           128           256          1,024
    V 4,096    D 384   0.16   33    0.15   35    0.14   45    0.13   78
    V 4,096    D 896   0.32   58    0.31   51    0.26   59    0.25   90
    V 32,000   D 384    1.5  121     1.1  192     1.0  287     1.0  381
    V 32,000   D 896    3.3  191     2.5  258     2.5  367     2.1  387
    V 151,936  D 384    7.8  264     6.5  301     5.5  451
    V 151,936  D 896   16.7  561    13.5  600    12.8  668
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

    `head` maps (t, D) to logits (t, V); `hidden` (T, D); `labels` (R,), already shifted; `rows`
    (R,), on the same device, has the row of each label: others never reach the head, and one that
    several tokens follow does with each. The gradient is added to the head's parameters and
    returned by the hidden states (T, D). The loss is a float64 scalar on the device, computed in
    float32, or in float64 for float64 logits.
    """
    grad = torch.zeros_like(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for tile, its_labels in _labelled_tiles(rows, labels, max_tile_tokens):
        tile_hidden = hidden.detach()[tile].requires_grad_()  # (t, D)
        with torch.enable_grad():
            loss = cross_entropy(wide(head(tile_hidden)), its_labels, reduction="sum")
            (loss * grad_scale).backward()  # type: ignore[no-untyped-call]
        assert tile_hidden.grad is not None
        grad.index_add_(0, tile, tile_hidden.grad)
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
    """The loss of every row (T,), float64, 0 where there is no label; without gradients.

    Arguments as in `tiled_loss`.
    """
    losses = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for tile, its_labels in _labelled_tiles(rows, labels, max_tile_tokens):
            logits = wide(head(hidden[tile]))  # (t, V)
            each = cross_entropy(logits, its_labels, reduction="none").double()
            losses.index_add_(0, tile, each)
    return losses


def tiles(rows: Tensor, max_tile_tokens: int) -> tuple[Tensor, ...]:
    """Rows (R,) in tiles of at most so many."""
    return rows.split(max_tile_tokens) if len(rows) else ()  # split makes one tile of no rows


def _labelled_tiles(
    rows: Tensor, labels: Tensor, max_tile_tokens: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Tiles of rows (R,), each with its labels."""
    return zip(tiles(rows, max_tile_tokens), tiles(labels, max_tile_tokens), strict=True)


def wide(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()
