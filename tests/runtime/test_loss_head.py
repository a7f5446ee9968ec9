"""Head and loss of a chunk: sums that stay on the device, tiles, and losses of single tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import batch
from helpers.tiny_families import build
from torch.nn.functional import cross_entropy

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.cells.chunk_inputs import chunk_inputs
from furlong.runtime.cells.loss_head import LossHead
from furlong.runtime.inputs import shift_labels

LENS = [7, 4]
CHUNK = Chunk((Slice(0, 2, 7), Slice(1, 0, 4)))


@pytest.fixture
def subject():
    """A model, the inputs of a chunk, final hidden states (T, D)."""
    model = CausalLM(build("granite"))
    sequences = shift_labels(batch(LENS, masked=[range(4)]))
    rows = rows_of(CHUNK, 0, sp_size=1, q_heads=1, kv_heads=1)
    inputs = chunk_inputs(rows, sequences, model.device)
    hidden = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    return model, inputs, hidden


@pytest.mark.parametrize("num_tile_tokens", [1, 3, 100])
def test_the_gradient_is_that_of_the_whole_head(subject, num_tile_tokens, monkeypatch):
    monkeypatch.setattr("furlong.runtime.cells.loss_head.tile_tokens", lambda *_: num_tile_tokens)
    model, inputs, hidden = subject
    logits = model.logits(hidden)
    loss = cross_entropy(logits[inputs.labelled_rows], inputs.labels, reduction="sum")
    (0.25 * loss).backward()
    loss = loss.detach()
    weight = model.base.get_output_embeddings().weight
    truths, weight.grad = (hidden.grad.clone(), weight.grad), None
    head = LossHead(model)
    gradient = head.gradient(hidden, inputs, 1.0, 4)
    torch.testing.assert_close(gradient, truths[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weight.grad, truths[1], rtol=1e-12, atol=1e-14)
    assert float(head.loss_sum) == pytest.approx(float(loss), rel=1e-12)
    head.gradient(hidden, inputs, 1.0, 4)
    assert float(head.loss_sum) == pytest.approx(2 * float(loss), rel=1e-12)


def test_losses_of_tokens_lie_where_the_plan_says(subject):
    model, inputs, hidden = subject
    head = LossHead(model, LENS)
    with torch.no_grad():
        head.evaluate(hidden, inputs)
        each = torch.zeros(9, dtype=torch.float64)
        logits = model.logits(hidden)[inputs.labelled_rows]
        each[inputs.labelled_rows] = cross_entropy(logits, inputs.labels, reduction="none")
    first, second = head.token_losses
    torch.testing.assert_close(first[2:], each[:5])
    torch.testing.assert_close(second, each[5:])
    assert not first[:2].any() and not second[-1:].any() and each[:1] == 0
    assert float(head.loss_sum) == pytest.approx(float(each.sum()), rel=1e-12)


def test_a_head_that_leads_to_no_trained_parameter_is_refused(subject):
    model, inputs, hidden = subject
    model.base.requires_grad_(False)
    with pytest.raises(ConfigError, match="depends on no parameter that requires a gradient"):
        LossHead(model).gradient(hidden.detach(), inputs, 1.0, 1)
    model.base.get_output_embeddings().weight.requires_grad_(True)
    LossHead(model).gradient(hidden.detach(), inputs, 1.0, 1)
    assert model.base.get_output_embeddings().weight.grad.any()
