"""The head by tiles against cross-entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.errors import ConfigError
from furlong.ops.loss import IGNORE_INDEX, TiledHead, label_losses, labelled_rows

HIDDEN = torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([3, 1, -100, -100, 4, 0, 2, -100, 1, 1, -100])
ROWS = labelled_rows(LABELS)


def make_head():
    torch.manual_seed(1)
    return nn.Linear(6, 5, dtype=torch.float64)


def both_ways(head, hidden, rows, labels, num_tile_tokens, cotangents=None):
    """The losses (R,), once more with the gradient (T, D) where theirs are `cotangents`."""
    tiled = TiledHead(head, label_losses, num_tile_tokens)
    cotangents = torch.ones(len(rows)) if cotangents is None else cotangents
    losses = tiled.forward(hidden, rows, labels, {})
    gradient, again = tiled.backward(hidden, rows, labels, {}, cotangents)
    assert not gradient.requires_grad and not again.requires_grad
    if losses is None:
        assert not len(again)
    else:
        assert torch.equal(losses, again) and not losses.requires_grad
    return again, gradient


@pytest.mark.parametrize(
    ("rows", "labels"),
    [(ROWS, LABELS[ROWS]), (torch.tensor([2, 2, 5, 2]), torch.tensor([3, 1, 4, 1]))],
    ids=["labelled rows", "a row that several tokens follow"],
)
@pytest.mark.parametrize("num_tile_tokens", [1, 3, 100])
def test_tiles_give_the_losses_and_both_gradients(rows, labels, num_tile_tokens):
    head, hidden = make_head(), HIDDEN.clone().requires_grad_()
    expected = cross_entropy(head(hidden[rows]), labels, reduction="none")
    cotangents = torch.linspace(0.25, -1, len(rows), dtype=torch.float64)
    expected.backward(cotangents)
    own, seen = make_head(), []

    def watched(tile):
        seen.append(len(tile))
        return own(tile)

    losses, grad = both_ways(watched, HIDDEN, rows, labels, num_tile_tokens, cotangents)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(own.weight.grad, head.weight.grad, rtol=1e-13, atol=1e-15)
    assert sum(seen) == 2 * len(rows) and max(seen) <= num_tile_tokens  # the labelled rows alone


def test_losses_of_half_precision_logits_are_float32():
    logits = (8 * HIDDEN[:, :5]).bfloat16()
    expected = cross_entropy(logits[ROWS].float(), LABELS[ROWS], reduction="none")
    losses, _ = both_ways(lambda x: x[:, :5], (8 * HIDDEN).bfloat16(), ROWS, LABELS[ROWS], 100)
    assert torch.equal(losses, expected)


def refuse(tile):
    raise AssertionError(f"the head was called with {len(tile)} rows")


def test_a_chunk_without_labels_never_touches_the_head():
    rows = labelled_rows(torch.full_like(LABELS, IGNORE_INDEX))
    _, grad = both_ways(refuse, HIDDEN, rows, rows, 3)
    assert torch.all(grad == 0) and grad.shape == HIDDEN.shape


class NoHostReads(TorchDispatchMode):
    """Refuses what makes the host wait for a device: values read, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal"}
        assert func.overloadpacket.__name__ not in waits, func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    tiled, labels = TiledHead(make_head(), label_losses, 3), LABELS[ROWS]
    with pytest.raises(AssertionError), NoHostReads():
        labelled_rows(LABELS)  # the check can fail
    with NoHostReads():
        tiled.forward(HIDDEN, ROWS, labels, {})
        tiled.backward(HIDDEN, ROWS, labels, {}, torch.ones(len(ROWS)))


def test_a_loss_without_a_graph_is_refused():
    def detached(logits, labels, extras):
        return label_losses(logits, labels, extras).detach()

    tiled = TiledHead(make_head(), detached, 3, source="token_loss")
    assert tiled.forward(HIDDEN, ROWS, LABELS[ROWS], {}) is not None  # it asks for no gradient
    with pytest.raises(ConfigError, match="token_loss"):
        tiled.backward(HIDDEN, ROWS, LABELS[ROWS], {}, torch.ones(len(ROWS)))
