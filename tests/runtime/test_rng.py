"""Whatever a forward draws in train mode is drawn again by its recompute."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE, build
from transformers import AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.runtime.rng import RNGState, independent_draws, replayed

CPU = torch.device("cpu")


def starcoder2() -> transformers.PreTrainedModel:
    """Its residual dropout is functional: no module of it can be found."""
    config = transformers.Starcoder2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        residual_dropout=0.3, embedding_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().train()


MODELS = {
    "functional dropout": starcoder2,
    "router jitter": lambda: build("mixtral", router_jitter_noise=0.3),
    "dropout modules": lambda: build("phi3", resid_pdrop=0.3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", ["kv", "attention", "input"])
@pytest.mark.few(4)
def test_a_recompute_draws_what_the_forward_drew(name: str, keep: str) -> None:
    model = MODELS[name]()
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def note(mlp: torch.nn.Module, inputs: tuple[torch.Tensor], output: object) -> None:
        """The input of the last layer's MLP depends on what was drawn before it."""
        seen.setdefault(tuple(current), []).append(inputs[0].detach().clone())

    current: list[int] = []
    embed = model.get_input_embeddings()
    embed.register_forward_pre_hook(
        lambda m, ids: current.__setitem__(slice(None), ids[0][0].tolist())
    )
    model.model.layers[1].mlp.register_forward_hook(note)
    options = furlong.ChunkOptions(size=8, keep=keep, num_retained=0)
    furlong.forward_backward(model, batch([3]), options)  # the start-up check
    seen.clear()
    assert furlong.forward_backward(model, batch([24]), options).has_drawn
    twice = [runs for runs in seen.values() if len(runs) > 1]
    assert len(twice) == 2
    assert all(torch.equal(runs[0], other) for runs in twice for other in runs[1:])


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_layers_that_are_skipped_at_random_are_refused(keep: str) -> None:
    """The start-up check sees the model in evaluation mode, where none is skipped."""
    config = transformers.BioGptConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, layerdrop=0.5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, activation_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BioGptForCausalLM(config).train()
    options = furlong.ChunkOptions(size=8, keep=keep)
    with pytest.raises(UnsupportedModelError, match=r"times in a forward of 3 layers[\s\S]*drop"):
        for _ in range(8):
            furlong.forward_backward(model, batch([29]), options)
    assert furlong.forward_backward(model.eval(), batch([29]), options).loss > 0


def test_after_an_error_the_generators_go_on_where_they_were() -> None:
    state = RNGState.read(CPU)
    torch.rand(3)
    now = RNGState.read(CPU)
    with pytest.raises(ZeroDivisionError), replayed(state, CPU):
        assert RNGState.read(CPU).equals(state)
        _ = 1 / 0
    assert RNGState.read(CPU).equals(now) and not now.equals(state)


def test_a_call_draws_nothing_of_its_own() -> None:
    model = build("llama")
    before = torch.get_rng_state()
    furlong.forward_backward(model, batch([24]), furlong.ChunkOptions(size=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_independent_draws_seed_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.default_generator.manual_seed(3)
    draws = []
    for process in (0, 1, 0):
        torch.default_generator.manual_seed(3)
        with independent_draws(process, CPU):
            draws.append(float(torch.rand(())))
    assert draws[0] == draws[2] != draws[1] and not seeded
