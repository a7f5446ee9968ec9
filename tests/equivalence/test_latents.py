"""Latents in the place of keys and values: what they take, and gradients that go through them."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.attention_families import TWINS, VOCAB_SIZE, twin_of
from helpers.gradients import batch, reference_loss, take_grads, worst_relative_error
from peft import LoraConfig, get_peft_model
from torch.nn.functional import mse_loss

import furlong
from furlong.kv.store import KVStore
from furlong.models.causal_lm import CausalLM
from furlong.ops.choose import ProbedBackend
from furlong.planners.spaco import EXACT, Factors, sample_backwards
from furlong.runtime.checks.self_check import self_check

BOUND = 1e-9
LATENT = [name for name, (_, own) in TWINS.items() if "kv_lora_rank" in own]
WALKS = {
    "host": furlong.ChunkOptions(size=16, keep="kv", tier="host"),
    "disk": furlong.ChunkOptions(size=7, keep="attention", tier="disk", num_retained=1),
    "layer-first": furlong.ChunkOptions(size=16, keep="input", order="layer-first", stage_layers=1),
    "layer-first, remembered": furlong.ChunkOptions(
        size=16, keep="attention", order="layer-first", stage_layers=3, tier={"kv": "host"}
    ),
    "recomputed layers": furlong.ChunkOptions(
        size=16, keep="all", num_retained=2, recompute_layers=2
    ),
    "recomputed layers, remembered": furlong.ChunkOptions(
        size=16, keep="attention", recompute_layers=4
    ),
}


def assert_equal_gradients(model: Any, options: furlong.ChunkOptions, lens=(70, 33, 9)) -> None:
    sequences = batch(lens, vocab_size=VOCAB_SIZE, masked=[range(10)])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    result = furlong.forward_backward(
        model, sequences, options, storage=furlong.Storage(poison=True)
    )
    assert result.loss == pytest.approx(loss, rel=BOUND)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


@pytest.mark.parametrize("walk", WALKS)
def test_walks_and_tiers(walk, monkeypatch):
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 8)
    monkeypatch.setattr("furlong.ops.latent_kv._MIN_TOKENS", 3)
    assert_equal_gradients(twin_of("deepseek_v3"), WALKS[walk])


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
    assert_equal_gradients(twin_of("deepseek_v3", kv_lora_rank=31), WALKS["host"])


@pytest.mark.parametrize(
    "targets",
    [["kv_b_proj"], ["kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"], "all-linear"],
    ids=["expansion", "projections to latents", "all"],
)
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
    with pytest.warns(UserWarning, match="dropout"):
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


def test_the_start_up_check_adds_to_no_gradient():
    model = twin_of("deepseek_v3")
    assert self_check(CausalLM(model), ProbedBackend()) <= 1e-12
    assert all(parameter.grad is None for parameter in model.parameters())


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


def test_sampled_draws_give_the_gradient_on_average():
    size, chances = 8, [0.5, 0.8, 0.3, 0.6]
    model = twin_of("deepseek_v3", num_hidden_layers=2)
    sequences = batch([size * len(chances) - 3], vocab_size=VOCAB_SIZE)
    reference_loss(model, sequences)
    truth = take_grads(model)
    engine = furlong.Engine(model)
    options = furlong.ChunkOptions(size=size, keep="kv", hybrid=False)
    whole = engine.plan([len(sequences[0]["input_ids"])], options)
    mean: dict[str, torch.Tensor] = {}
    for included in itertools.product((False, True), repeat=len(chances)):
        each = [p if is_in else 1 - p for p, is_in in zip(chances, included, strict=True)]
        drawn = itertools.compress(enumerate(chances), included)
        factors = {i: Factors(1 / p, 1 / p) for i, p in drawn} or {0: Factors(0.0, 0.0)}
        engine.run(sample_backwards(whole, factors), sequences)
        for name, grad in take_grads(model).items():
            mean[name] = mean.get(name, 0) + math.prod(each) * grad
    assert worst_relative_error(mean, truth) <= BOUND


def test_everything_drawn_is_the_whole_gradient():
    model = twin_of("deepseek_v3", num_hidden_layers=2)
    sequences = batch([29], vocab_size=VOCAB_SIZE)
    reference_loss(model, sequences)
    truth = take_grads(model)
    engine = furlong.Engine(model)
    whole = engine.plan([29], furlong.ChunkOptions(size=8, hybrid=False))
    engine.run(sample_backwards(whole, dict.fromkeys(range(4), EXACT)), sequences)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("walk", WALKS)
def test_every_family(name, walk, monkeypatch):
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 8)
    assert_equal_gradients(twin_of(name), WALKS[walk])
