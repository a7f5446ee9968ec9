"""Any plan of a batch gives the same loss and the same gradients as the model's own forward."""

import functools

import pytest
from cases import Case, covering_array, product
from gradients import reference_loss, take_grads, worst_relative_error
from tiny_families import bound, build

import furlong


@functools.lru_cache(maxsize=4)
def model_and_truth(family: str, batch_name: str, tied: bool):
    model = build(family, tie_word_embeddings=tied)
    sequences = Case(family, batch_name, 1, 0, "kv", tied).sequences()
    loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def check(case: Case) -> None:
    model, sequences, loss, truth = model_and_truth(case.family, case.batch_name, case.tied)
    result = furlong.forward_backward(model, sequences, case.options)
    assert abs(result.loss - loss) <= max(1e-12, bound(case.family)) * loss
    assert worst_relative_error(take_grads(model), truth) <= bound(case.family)


@pytest.mark.parametrize("case", sorted(covering_array(), key=str), ids=str)
def test_covering_array(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted((c for c in product() if not c.tied), key=str), ids=str)
def test_full_product(case):
    """Of untied heads; tied ones, which the chunks do not touch, are in the covering array."""
    check(case)


def test_covering_array_holds_every_pair():
    dials = ("family", "batch_name", "size", "num_retained", "keep", "tied")

    def pairs(cases):
        return {
            (a, getattr(c, a), b, getattr(c, b))
            for c in cases
            for i, a in enumerate(dials)
            for b in dials[i + 1 :]
        }

    chosen = covering_array()
    assert pairs(chosen) == pairs(product())
    assert len(chosen) < len(product()) / 20


def test_the_matrix_sees_a_wrong_gradient(monkeypatch):
    """The check can fail: without the relay the loss is right and the gradients are wrong."""
    model, sequences, loss, truth = model_and_truth("llama", "split", False)
    furlong.Engine(model)  # the start-up check, which would refuse it
    monkeypatch.setattr("furlong.runtime.cell._LayerView.relayed", lambda *_: None)
    options = furlong.ChunkOptions(size=8)
    assert furlong.forward_backward(model, sequences, options).loss == pytest.approx(
        loss, rel=1e-12
    )
    assert worst_relative_error(take_grads(model), truth) > 1e-2
