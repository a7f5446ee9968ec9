"""Head and loss of a chunk: sums that stay on the device, tiles, and losses of single tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from torch.nn.functional import cross_entropy

from furlong.errors import ConfigError
from furlong.models.decoder import HFDecoder
from furlong.plan.plan import Chunk, ChunkPlan, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.batch import batch_of, chunk_targets, shift_labels
from furlong.runtime.head import LossHead

LENS = [7, 4]
CHUNK = Chunk((Slice(0, 2, 7), Slice(1, 0, 4)))


@pytest.fixture
def subject():
    """A model's head, the targets of a chunk, final hidden states (T, D)."""
    model = HFDecoder(build("granite"))
    own = batch_of(shift_labels(batch(LENS, masked=[range(4)])))
    rows = rows_of(CHUNK, 0, sp_size=1, q_heads=1, kv_heads=1)
    targets = chunk_targets(rows, own, model.device)
    hidden = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    plan = ChunkPlan(tuple(LENS), (CHUNK,), (3,), ((),))
    return model, partial(LossHead, model, plan, own), targets, hidden


def test_losses_of_tokens_lie_where_the_plan_says(subject):
    model, make, targets, hidden = subject
    head = make()
    with torch.no_grad():
        head.evaluate(hidden, targets)
        each = torch.zeros(9, dtype=torch.float64)
        logits = model.logits(hidden)[targets.labelled_rows]
        each[targets.labelled_rows] = cross_entropy(logits, targets.labels, reduction="none")
    first, second = head.token_losses
    torch.testing.assert_close(first[2:], each[:5])
    torch.testing.assert_close(second, each[5:])
    assert not first[:2].any() and not second[-1:].any() and each[:1] == 0
    assert float(head.loss_sum) == pytest.approx(float(each.sum()), rel=1e-12)


def test_a_head_that_leads_to_no_trained_parameter_is_refused(subject):
    model, make, targets, hidden = subject
    model.base.requires_grad_(False)
    with pytest.raises(ConfigError, match="depends on no parameter that requires a gradient"):
        make().gradient(hidden.detach(), targets, 1.0, 1)
    model.base.get_output_embeddings().weight.requires_grad_(True)
    make().gradient(hidden.detach(), targets, 1.0, 1)
    assert model.base.get_output_embeddings().weight.grad.any()
