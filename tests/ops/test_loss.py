"""The tiled loss against cross-entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from furlong.ops.loss import IGNORE_INDEX, tiled_loss, token_losses

HIDDEN = torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([3, 1, -100, -100, 4, 0, 2, -100, 1, 1, -100])


def make_head():
    torch.manual_seed(1)
    return nn.Linear(6, 5, dtype=torch.float64)


@pytest.mark.parametrize("max_tile_tokens", [1, 3, 100])
def test_tiles_give_the_loss_and_both_gradients(max_tile_tokens):
    head, hidden = make_head(), HIDDEN.clone().requires_grad_()
    expected = cross_entropy(head(hidden), LABELS, ignore_index=IGNORE_INDEX, reduction="sum")
    (0.25 * expected).backward()
    expected = expected.detach()
    own, seen = make_head(), []

    def watched(tile):
        seen.append(len(tile))
        return own(tile)

    loss, grad = tiled_loss(
        watched, HIDDEN, LABELS, max_tile_tokens=max_tile_tokens, grad_scale=0.25
    )
    assert loss == pytest.approx(float(expected), rel=1e-14)
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(own.weight.grad, head.weight.grad, rtol=1e-13, atol=1e-15)
    assert sum(seen) == 7 and max(seen) <= max_tile_tokens  # the labelled rows alone


def test_the_loss_of_every_token():
    head = make_head()
    expected = cross_entropy(head(HIDDEN), LABELS, ignore_index=IGNORE_INDEX, reduction="none")
    given = token_losses(head, HIDDEN, LABELS, max_tile_tokens=3)
    torch.testing.assert_close(given, expected.detach())
    assert not given.requires_grad and float(given[2]) == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = (8 * HIDDEN[:, :5]).bfloat16()
    expected = cross_entropy(logits.float(), LABELS, ignore_index=IGNORE_INDEX, reduction="sum")
    loss, _ = tiled_loss(
        lambda tile: tile[:, :5], (8 * HIDDEN).bfloat16(), LABELS,
        max_tile_tokens=100, grad_scale=1.0,
    )  # fmt: skip
    assert loss == float(expected)
