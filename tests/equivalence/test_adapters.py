"""LoRA, longrope, dropout, other families: equal to the model's own forward, or refused."""

import warnings

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from peft import LoraConfig, get_peft_model

import furlong
from furlong.errors import UnsupportedModelError
from furlong.testing import reference_loss, take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8)


def assert_equal_gradients(model, sequences, options=OPTIONS, bound=1e-12, **arguments):
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    result = furlong.forward_backward(model, sequences, options, **arguments)
    assert result.loss == pytest.approx(loss, rel=bound)
    assert worst_relative_error(take_grads(model), truth) <= bound


@pytest.mark.parametrize(("targets", "keep"), [(["q_proj"], "attention"), ("all-linear", "kv")])
def test_lora(targets, keep):
    base = build("qwen2")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start, which would hide lora_A's gradient
                parameter.normal_()
    model = model.double()
    options = furlong.ChunkOptions(size=8, keep=keep)
    assert_equal_gradients(model, batch([21, 4, 17]), options)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_only_the_head_is_trained():
    model = build("llama")
    model.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    assert_equal_gradients(model, batch([21, 4]))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16,
}  # fmt: skip


def longrope_model():
    return build(
        "phi3", max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters=dict(LONGROPE),
    )  # fmt: skip


def test_longrope_beyond_the_original_length():
    model = longrope_model()
    assert_equal_gradients(model, batch([40]), max_seq_len=40)
    losses = [
        furlong.forward_backward(model, batch([12]), OPTIONS, backward=False, max_seq_len=n).loss
        for n in (40, 16)
    ]
    assert abs(losses[0] - losses[1]) > 1e-3, "the two sets of factors must differ to be told apart"


@pytest.mark.parametrize("max_seq_len", [16, 40])
def test_longrope_layer_first(max_seq_len):
    """Every stage has the factors of the run, also the last one of a short sequence."""
    options = furlong.ChunkOptions(size=5, keep="input", order="layer-first")
    assert_equal_gradients(longrope_model(), batch([max_seq_len]), options, max_seq_len=max_seq_len)


def test_longrope_factors_belong_to_the_run_and_not_to_the_call():
    """A short sequence gets the long factors when the run has longer ones, in every chunking."""
    model = longrope_model()
    short = batch([12])
    losses = [
        furlong.forward_backward(
            model, short, furlong.ChunkOptions(size=size), backward=False, max_seq_len=length
        ).loss
        for size, length in ((64, 64), (5, 64), (64, 16))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and abs(losses[0] - losses[2]) > 1e-6


def test_longrope_asks_for_the_length_of_the_run():
    with pytest.raises(UnsupportedModelError, match="pass max_seq_len"):
        furlong.forward_backward(longrope_model(), batch([12]), OPTIONS)


def test_dropout_is_silent_in_evaluation():
    model = build("phi3", resid_pdrop=0.3).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        furlong.forward_backward(model, batch([24]), OPTIONS)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_of_the_model_is_set_aside(use_reentrant):
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_equal_gradients(model, batch([21, 4]))
    layer_first = furlong.ChunkOptions(size=8, order="layer-first", recompute_layers=1)
    assert_equal_gradients(model, batch([21, 4]), layer_first)
    assert model.is_gradient_checkpointing
