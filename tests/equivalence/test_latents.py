"""Latents in the place of keys and values: what they take, and gradients that go through them."""

from typing import Any

import pytest
import torch
from helpers.attention_families import VOCAB_SIZE, twin_of
from helpers.batches import batch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import mse_loss

import furlong
from furlong.kv.store import KVStore
from furlong.testing import reference_loss, take_grads, worst_relative_error

BOUND = 1e-9
HOST = furlong.ChunkOptions(size=16, keep="kv", offload="cpu")


def assert_equal_gradients(model: Any, options: furlong.ChunkOptions, lens=(70, 33, 9)) -> None:
    sequences = batch(lens, vocab_size=VOCAB_SIZE, masked=[range(10)])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    result = furlong.forward_backward(
        model, sequences, options, storage=furlong.Storage(poison=True)
    )
    assert result.loss == pytest.approx(loss, rel=BOUND)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


class Watched:
    """Bytes that the store takes of its arena, with each write and each gradient sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[int] = []
        plain = KVStore.write

        def write(store: KVStore, *given: Any) -> None:
            plain(store, *given)
            self.taken.append(store.arena.taken_bytes)

        monkeypatch.setattr(KVStore, "write", write)


def test_what_a_token_takes_is_what_deepseek_v3_publishes(monkeypatch):
    """Of its widths, 512 and 64 behind 128 heads of 192 and 128, a token and layer stores 576
    numbers."""
    widths = {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    model = twin_of("deepseek_v3", num_hidden_layers=2, **widths).to(torch.bfloat16)
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 64)
    watched = Watched(monkeypatch)
    engine = furlong.Engine(model)
    engine.forward_backward(batch([20], vocab_size=VOCAB_SIZE), furlong.ChunkOptions(size=16))
    watched.taken.clear()
    options = furlong.ChunkOptions(size=64, keep="kv")
    engine.forward_backward(batch([256], vocab_size=VOCAB_SIZE), options)
    per_token = max(watched.taken) / (2 * 192)  # the last chunk's are read by none
    assert per_token == 576 * 2


def test_an_odd_width():
    """A latent is stored in two halves."""
    assert_equal_gradients(twin_of("deepseek_v3", kv_lora_rank=31), HOST)


@pytest.mark.parametrize("targets", [["kv_b_proj"], "all-linear"], ids=["expansion", "all"])
def test_lora(targets):
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(twin_of("deepseek_v3"), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert_equal_gradients(model.double(), furlong.ChunkOptions(size=7, keep="kv"))


def test_an_adapter_that_drops_behind_the_latents_stores_keys_and_values(monkeypatch):
    """Expanded again, its draw would be another."""
    model = get_peft_model(
        twin_of("deepseek_v3"), LoraConfig(r=4, target_modules=["kv_b_proj"], lora_dropout=0.5)
    ).double()
    seen: list[int] = []
    plain = KVStore.write

    def write(store: KVStore, seq_id: int, layer: int, piece: int, k: torch.Tensor, *more: Any):
        seen.append(k.shape[0])
        plain(store, seq_id, layer, piece, k, *more)

    monkeypatch.setattr(KVStore, "write", write)
    engine = furlong.Engine(model)
    sequences, options = batch([40], vocab_size=VOCAB_SIZE), furlong.ChunkOptions(size=16)
    engine.forward_backward(sequences, options)
    model.eval()
    dropping = seen.copy()
    seen.clear()
    engine.forward_backward(sequences, options)
    assert set(dropping[-8:]) == {4} and set(seen[-8:]) == {1}


def test_frozen_below_the_expansion():
    """Latents need no gradient then; the expansion's weights have one, of every chunk."""
    model = twin_of("deepseek_v3")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.requires_grad_(True)
    assert_equal_gradients(model, furlong.ChunkOptions(size=7, keep="kv"))


@pytest.mark.parametrize("gradients", ["returned", "added"])
def test_hidden_states_with_a_graph(gradients):
    """Gradients that are returned take autograd's own way: those of the expansion, too."""
    model = twin_of("deepseek_v3")
    sequences = batch([50], vocab_size=VOCAB_SIZE)
    ids = sequences[0]["input_ids"][None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    target = torch.randn_like(hidden)
    mse_loss(hidden, target).backward()
    truth = take_grads(model)
    (given,) = furlong.Engine(model).hidden_states(
        sequences, furlong.ChunkOptions(size=16, keep="kv"), gradients=gradients
    )
    mse_loss(given, target).backward()
    assert worst_relative_error(take_grads(model), truth) <= BOUND
