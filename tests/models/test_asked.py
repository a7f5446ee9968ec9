"""A key that is refused by its name elsewhere is asked of a tiny model first."""

from typing import Any

import pytest
import torch
from helpers.tiny_families import build, build_other
from transformers import AutoConfig, AutoModelForCausalLM

import furlong
from furlong.models.asked import Answers, answers_of, positions_of
from furlong.models.decoder import HFDecoder
from furlong.testing import reference_loss, take_grads

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STATIC = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24,
    "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
NONE = Answers(sees_later=False, depends_on_length=False, adds_loss=False)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("hunyuan_v1_dense", {"rope_parameters": STATIC}),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("gemma4_text", GEMMA4 | {"use_bidirectional_attention": "vision"}),
        ("hy_v3", EXPERTS | {"output_router_logits": True, "expert_hidden_dim": 32}),
    ],
)
def test_a_key_without_an_effect_is_no_reason(family: str, keys: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **SIZES | keys)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    assert answers_of(model) == NONE
    ids = torch.randint(3, 64, (40,))
    sequences = [{"input_ids": ids, "labels": ids.clone()}]
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    options = furlong.ChunkOptions(size=16, keep="kv")
    result = furlong.forward_backward(model, sequences, options, max_seq_len=40)
    assert result.loss == pytest.approx(loss, rel=2e-6)
    for name, grad in take_grads(model).items():
        assert torch.allclose(grad, truth[name], rtol=1e-5, atol=2e-6 * float(truth[name].norm()))


def test_effects_are_seen() -> None:
    gemma4 = AutoConfig.for_model(
        "gemma4_text", **SIZES | GEMMA4 | {"use_bidirectional_attention": "all"}
    )
    assert answers_of(AutoModelForCausalLM.from_config(gemma4)).sees_later
    assert answers_of(build_other("doge", is_moe=True, output_router_logits=True)).adds_loss
    balanced = answers_of(build("mixtral", output_router_logits=True))
    assert balanced.adds_router_loss and not balanced.adds_loss
    few = build("llama", rope_parameters=DYNAMIC, max_position_embeddings=16)
    assert answers_of(few).depends_on_length


@pytest.mark.parametrize(
    ("family", "keys", "kind"),
    [
        ("llama", {}, "rotary"),
        ("gpt2", {}, "table"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "table"),
        ("nemotron_h", {}, "none"),
        ("smollm3", {"no_rope_layers": [0, 0]}, "none"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "rotary"),
    ],
)
def test_how_positions_are_told_apart(family: str, keys: dict[str, Any], kind: str) -> None:
    sizes = SIZES if family != "gpt2" else {k: v for k, v in SIZES.items() if k != "head_dim"}
    assert positions_of(AutoConfig.for_model(family, **sizes | keys)) == kind


def test_a_decoder_without_positions_takes_more_of_them() -> None:
    """Granite 4's and SmolLM3's without RoPE, whose configs hold RoPE parameters."""
    config = AutoConfig.for_model("smollm3", **SIZES | {"no_rope_layers": [0, 0]})
    model = AutoModelForCausalLM.from_config(config)
    assert HFDecoder(model, max_seq_len=999).longest_tokens == 999
    assert HFDecoder(build("llama"), max_seq_len=999).longest_tokens == 256
