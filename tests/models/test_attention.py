"""Attention as models call it: what is not known is an error, widths may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import hybrids
from helpers.attention_families import twin_of
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE, build
from transformers import AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.models.attention import attention, bound
from furlong.models.decoder import HFDecoder
from furlong.ops.backends.select import ProbedBackend
from furlong.plan.passes import NOTHING
from furlong.runtime.check import self_check
from furlong.testing import reference_loss, take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8)


class NoCell:
    """Fails the test if attention goes on in spite of what it was given."""

    def attend(self, *_: Any) -> torch.Tensor:
        raise AssertionError("attended")


def call(**given: Any) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    with bound([module], NoCell(), NOTHING, torch.arange(3)):
        attention(module, q, k, k, given.pop("attention_mask", None), **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"is_causal": False}, "is_causal=False"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "the keyword position_bias"),
        ({"indices": torch.zeros(1, 3, 2)}, "the keyword indices"),
    ],
)
def test_what_is_not_known_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        call(**given)


@pytest.mark.parametrize("given", [{"position_ids": torch.arange(3)}, {"position_bias": None}])
def test_what_says_nothing_of_attention_passes(given: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="attended"):
        call(**given)


def test_attention_dropout_of_a_module_alone_is_refused() -> None:
    """No config names it: the call has it."""
    model = build("llama")
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(UnsupportedModelError, match=r"passes attention dropout 0\.5"):
        furlong.forward_backward(model, batch([21]), OPTIONS)


def test_values_wider_than_keys() -> None:
    """Keys that are wider than values are those of every model with latents (test_twins)."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=4, qk_rope_head_dim=4,
        v_head_dim=24, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    model.set_experts_implementation("eager")
    sequences = batch([29, 4])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    result = furlong.forward_backward(
        model, sequences, furlong.ChunkOptions(size=8, keep="attention")
    )
    assert result.loss == pytest.approx(loss, rel=2e-6)
    assert worst_relative_error(take_grads(model), truth) <= 2e-6


@pytest.mark.parametrize("takes", ["decoder", "attention"])
def test_a_cache_goes_by_the_name_that_the_release_gives_it(
    takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases to 5.23 say past_key_values; later ones read that only where there is no cache."""
    model: Any = hybrids.build("lfm2") if takes == "decoder" else twin_of("llama4")
    kind = type(model.model if takes == "decoder" else model.model.layers[0].self_attn)
    plain = kind.forward

    def forward(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        return plain(self, *args, **{**kwargs, "past_key_values": cache})

    monkeypatch.setattr(kind, "forward", forward)
    decoder = HFDecoder(model)
    assert bool(decoder.probed.mixers) == (takes == "decoder")
    assert self_check(decoder, ProbedBackend()) <= 1e-6
