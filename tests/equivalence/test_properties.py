"""What holds for every batch besides the gradients' values: isolation, normalisation, precision."""

import pytest
import torch
from helpers.batches import batch
from helpers.cases import UNLIKE
from helpers.tiny_families import VOCAB_SIZE, build

import furlong
from furlong.errors import DataError
from furlong.testing import (
    num_labels,
    reference_loss,
    take_grads,
    total_relative_error,
)

OPTIONS = furlong.ChunkOptions(size=8)
LAYER_FIRST = furlong.ChunkOptions(size=8, keep="input", order="layer-first")
ON_DISK = furlong.ChunkOptions(size=8, keep="attention", order="layer-first", offload="disk")


@pytest.mark.parametrize("options", [OPTIONS, ON_DISK], ids=["chunk-first", "layer-first on disk"])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "mixtral"])
@pytest.mark.few(2)
def test_changing_one_token_moves_no_bit_elsewhere(family, options):
    """Only the long sequence has labels: all gradients are its own, so none may move by one bit."""
    model = build(family, torch.float32)
    long, short, other = batch([21, 4, 6])
    for sequence in (short, other):
        sequence["labels"][:] = -100
    results = []
    for _ in range(2):
        loss = furlong.forward_backward(model, [short, long, other], options).loss
        results.append((loss, take_grads(model)))
        short["input_ids"][1] = (short["input_ids"][1] + 1) % VOCAB_SIZE
    (loss_a, grads_a), (loss_b, grads_b) = results
    moved = [n for n in grads_a if not torch.equal(grads_a[n], grads_b[n])]
    assert loss_a == loss_b and not moved


@pytest.mark.parametrize(
    ("family", "dials"),
    [
        ("gemma3_text", {"keep": "input"}),
        ("gpt_oss", {"keep": "attention"}),
        ("gpt_oss", {"order": "layer-first"}),
        ("gemma3_text", {"order": "layer-first", "stage_layers": 2, "offload": "cpu"}),
    ],
    ids=str,
)
@pytest.mark.few(2)
def test_evaluation_gives_the_same_loss_of_every_token_in_either_order(family, dials):
    model = build(family)
    sequences = batch([21, 4, 6, 17])
    whole = furlong.forward_backward(
        model, sequences, furlong.ChunkOptions(size=64), backward=False
    )
    options = furlong.ChunkOptions(size=8, **dials)
    result = furlong.forward_backward(model, sequences, options, backward=False)
    for given, truth in zip(result.token_losses, whole.token_losses, strict=True):
        torch.testing.assert_close(given, truth, rtol=2e-6, atol=1e-9)
    assert {record.text[0] for record in result.timeline.records} == {"F"}
    assert all(p.grad is None for p in model.parameters())
    trained = furlong.forward_backward(model, sequences, options)
    assert result.loss == pytest.approx(trained.loss, rel=1e-12)
    assert result.num_valid_tokens == trained.num_valid_tokens == num_labels(sequences)


def test_a_batch_without_labels_needs_a_divisor():
    model = build("llama")
    sequences = batch([9], masked=[range(9)])
    with pytest.raises(DataError, match="no token with a label"):
        furlong.forward_backward(model, sequences, OPTIONS)
    result = furlong.forward_backward(model, sequences, OPTIONS, num_valid_tokens=5)
    assert result.loss == 0 and all(not g.any() for g in take_grads(model).values())


@pytest.mark.parametrize("family", UNLIKE)
@pytest.mark.few(2)
def test_float32_is_as_good_as_transformers_own(family):
    sequences = batch([61, 9, 30, 2])
    exact = build(family, torch.float64)
    reference_loss(exact, sequences)
    truth = take_grads(exact)
    model = build(family, torch.float32)
    model.load_state_dict(exact.state_dict())
    reference_loss(model, sequences)
    theirs = take_grads(model)
    furlong.forward_backward(model, sequences, OPTIONS)
    mine = take_grads(model)
    assert total_relative_error(mine, truth) <= 2e-5
    for name, gradient in truth.items():
        own_error = (mine[name] - gradient).norm()
        assert own_error <= 3 * (theirs[name] - gradient).norm() + 1e-7 * gradient.norm(), name


def rounded_pair(seed: int):
    """A float32 model whose weights bfloat16 can hold, and its bfloat16 twin.

    Only parameters are rounded, as when a model is loaded in bfloat16: rounding the rotary
    frequencies too would give the twin an error that no user has.
    """
    pair = [build("qwen2", torch.float32, seed=seed, max_position_embeddings=512) for _ in range(2)]
    for wide, narrow in zip(*(model.parameters() for model in pair), strict=True):
        narrow.data = narrow.data.bfloat16()
        wide.data = narrow.data.float()
    return pair


@pytest.mark.slow
def test_bfloat16_errs_no_more_than_transformers_own():
    """Float32 weights computing in bfloat16, against a bfloat16 model's unchunked backward.

    A single ratio scatters by a fifth either way, so errors are pooled over seeds.
    """
    theirs = 0.0
    mine = dict.fromkeys((1, 16, 64), 0.0)
    for seed in range(8):
        sequences = batch([512], seed=seed)
        exact, rounded = rounded_pair(seed)
        reference_loss(exact, sequences)
        truth = take_grads(exact)
        reference_loss(rounded, sequences)
        theirs += total_relative_error(take_grads(rounded), truth)
        for num_chunks in mine:
            options = furlong.ChunkOptions(size=512 // num_chunks)
            furlong.forward_backward(exact, sequences, options, compute_dtype=torch.bfloat16)
            assert all(p.grad.dtype == p.dtype == torch.float32 for p in exact.parameters())
            mine[num_chunks] += total_relative_error(take_grads(exact), truth)
    assert {n: error / theirs for n, error in mine.items() if error > 1.1 * theirs} == {}


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.few(1)
def test_bfloat16_errs_no_more_layer_first(keep):
    """Hidden states between stages, and their gradients, have the dtype that they have anyway."""
    sequences = batch([80])
    model = rounded_pair(0)[0]
    chosen = {"size": 16, "keep": keep, "num_retained": 0}
    found = []
    for dials in ({}, {"order": "layer-first"}, {"order": "layer-first", "offload": "disk"}):
        options = furlong.ChunkOptions(**chosen, **dials)
        furlong.forward_backward(model, sequences, options, compute_dtype=torch.bfloat16)
        found.append(take_grads(model))
    chunk_first, layer_first, on_disk = found
    assert all(torch.equal(layer_first[n], on_disk[n]) for n in layer_first)
    assert total_relative_error(layer_first, chunk_first) <= 1e-6


def test_a_bfloat16_model_gets_gradients_rounded_once():
    sequences = batch([64])
    model = build("qwen2").bfloat16()
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=1))
    many = take_grads(model)
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=64))
    one = take_grads(model)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert total_relative_error(many, one) < 0.03
