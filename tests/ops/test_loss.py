"""The tiled loss against cross-entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.ops.loss import (
    IGNORE_INDEX,
    labelled_rows,
    tile_tokens,
    tiled_loss,
    token_losses,
)

HIDDEN = torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([3, 1, -100, -100, 4, 0, 2, -100, 1, 1, -100])
ROWS = labelled_rows(LABELS)


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
        watched, HIDDEN, LABELS[ROWS], rows=ROWS, max_tile_tokens=max_tile_tokens, grad_scale=0.25
    )
    assert loss.dtype == torch.float64 and loss.shape == () and not loss.requires_grad
    assert float(loss) == pytest.approx(float(expected), rel=1e-14)
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(own.weight.grad, head.weight.grad, rtol=1e-13, atol=1e-15)
    assert sum(seen) == 7 and max(seen) <= max_tile_tokens  # the labelled rows alone


def test_the_loss_of_every_token():
    head = make_head()
    expected = cross_entropy(head(HIDDEN), LABELS, ignore_index=IGNORE_INDEX, reduction="none")
    given = token_losses(head, HIDDEN, LABELS[ROWS], rows=ROWS, max_tile_tokens=3)
    torch.testing.assert_close(given, expected.detach())
    assert not given.requires_grad and float(given[2]) == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = (8 * HIDDEN[:, :5]).bfloat16()
    expected = cross_entropy(logits.float(), LABELS, ignore_index=IGNORE_INDEX, reduction="sum")
    loss, _ = tiled_loss(
        lambda tile: tile[:, :5], (8 * HIDDEN).bfloat16(), LABELS[ROWS], rows=ROWS,
        max_tile_tokens=100, grad_scale=1.0,
    )  # fmt: skip
    assert float(loss) == float(expected)


def refuse(tile):
    raise AssertionError(f"the head was called with {len(tile)} rows")


def test_a_chunk_without_labels_never_touches_the_head():
    labels = torch.full_like(LABELS, IGNORE_INDEX)
    rows = labelled_rows(labels)
    loss, grad = tiled_loss(refuse, HIDDEN, rows, rows=rows, max_tile_tokens=3, grad_scale=1.0)
    assert float(loss) == 0 and torch.all(grad == 0) and grad.shape == HIDDEN.shape
    losses = token_losses(refuse, HIDDEN, rows, rows=rows, max_tile_tokens=3)
    assert losses.shape == labels.shape and torch.all(losses == 0)


class NoHostReads(TorchDispatchMode):
    """Refuses what makes the host wait for a device: values read, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = {"_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal"}
        assert func.overloadpacket.__name__ not in waits, func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    head = make_head()
    with pytest.raises(AssertionError), NoHostReads():
        labelled_rows(LABELS)  # the check can fail
    labels = LABELS[ROWS]
    with NoHostReads():
        tiled_loss(head, HIDDEN, labels, rows=ROWS, max_tile_tokens=3, grad_scale=1.0)
        token_losses(head, HIDDEN, labels, rows=ROWS, max_tile_tokens=3)


@pytest.mark.parametrize(
    "vocab_size, on_cpu, on_cuda",
    [(64, 256, 2**21), (4096, 256, 2**15), (32_000, 131, 4194), (151_936, 128, 883)],
)
def test_rows_of_a_tile(vocab_size, on_cpu, on_cuda):
    assert tile_tokens(vocab_size, torch.device("cpu")) == on_cpu
    assert tile_tokens(vocab_size, torch.device("cuda")) == on_cuda


@pytest.mark.parametrize("max_tile_tokens", [1, 2, 100])
def test_a_row_that_several_tokens_follow_counts_with_each(max_tile_tokens):
    """The last token of a prompt, before the first ones of its answers."""
    rows, labels = torch.tensor([2, 2, 5, 2]), torch.tensor([3, 1, 4, 1])
    head, hidden = make_head(), HIDDEN.clone().requires_grad_()
    expected = cross_entropy(head(hidden[rows]), labels, reduction="sum")
    expected.backward()
    loss, grad = tiled_loss(
        make_head(), HIDDEN, labels, rows=rows, max_tile_tokens=max_tile_tokens, grad_scale=1.0
    )
    torch.testing.assert_close(grad, hidden.grad, rtol=1e-13, atol=1e-15)
    losses = token_losses(head, HIDDEN, labels, rows=rows, max_tile_tokens=max_tile_tokens)
    assert float(losses.sum()) == pytest.approx(float(loss), rel=1e-13)
    assert set(losses.nonzero().flatten().tolist()) == {2, 5}
