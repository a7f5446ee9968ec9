"""The small config is of the same kind: class, pattern, ratios, RoPE; only numbers shrink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from furlong.errors import UnsupportedModelError
from furlong.models.shrink import LONGEST_TOKENS, SHORTEST_TOKENS, WINDOW, shrink_config

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
}  # fmt: skip


def shrink(name: str, *, max_seq_len: int = 4096, **settings: Any) -> Any:
    return shrink_config(getattr(transformers, name)(**settings), max_seq_len=max_seq_len)


def test_sizes_shrink_and_ratios_stay() -> None:
    small = shrink(
        "Qwen2Config", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
        num_hidden_layers=28, intermediate_size=18944, tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6,
                         "original_max_position_embeddings": 32768},
    )  # fmt: skip
    assert type(small) is transformers.Qwen2Config
    assert (small.num_attention_heads, small.num_key_value_heads) == (14, 2)
    assert small.hidden_size // small.num_attention_heads == 8
    assert small.intermediate_size == pytest.approx(112 * 18944 / 3584, abs=8)
    assert small.num_hidden_layers == len(small.layer_types) == 3
    assert small.tie_word_embeddings
    assert small.rope_parameters["rope_type"] == "yarn"


def test_a_head_dim_of_its_own_stays_one() -> None:
    small = shrink(
        "Qwen3Config", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    assert small.head_dim * small.num_attention_heads == 2 * small.hidden_size


def test_the_pattern_of_layers_is_shown_once_and_the_window_is_short() -> None:
    small = shrink("Gemma3TextConfig", num_hidden_layers=26)
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert small.sliding_window == WINDOW < LONGEST_TOKENS
    assert set(small.rope_parameters) == {"sliding_attention", "full_attention"}
    small = shrink("SmolLM3Config", num_hidden_layers=36)
    assert len(small.no_rope_layers) == small.num_hidden_layers
    assert shrink("MistralConfig", sliding_window=None).sliding_window is None
    # Phi-3.5-MoE publishes a window as long as its positions, which masks nothing
    spans = shrink("MistralConfig", sliding_window=131072, max_position_embeddings=131072)
    assert spans.sliding_window > LONGEST_TOKENS


def test_keys_of_single_layers_become_small_with_their_layers() -> None:
    """Full attention of Gemma 4 has wider heads, and its class sets the type of the last layer."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    small = shrink(
        "Gemma4TextConfig", num_hidden_layers=30, layer_types=kinds, global_head_dim=512,
        head_dim=256, num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2,
        num_kv_shared_layers=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    )  # fmt: skip
    assert small.layer_types == [*kinds[:6], "full_attention"]
    assert [small.per_layer_config[n].head_dim for n in (0, 5, 6)] == [8, 16, 16]
    model = transformers.AutoModelForCausalLM.from_config(small)
    assert model(torch.arange(5, 15)[None], use_cache=False).logits.isfinite().all()


def test_softcaps_sinks_and_experts_stay() -> None:
    small = shrink("Gemma2Config", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (small.attn_logit_softcapping, small.final_logit_softcapping) == (50.0, 30.0)
    small = shrink("MixtralConfig", num_local_experts=8, num_experts_per_tok=2)
    assert (small.num_local_experts, small.num_experts_per_tok) == (4, 2)
    assert shrink("GPTNeoXConfig").rope_parameters["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(("max_seq_len", "is_long"), [(131072, True), (4096, False)])
def test_longrope_keeps_its_choice(max_seq_len: int, is_long: bool) -> None:
    small = shrink(
        "Phi3Config", hidden_size=3072, num_attention_heads=32, max_position_embeddings=131072,
        original_max_position_embeddings=4096, rope_parameters=LONGROPE, pad_token_id=0,
        max_seq_len=max_seq_len,
    )  # fmt: skip
    parameters = small.rope_parameters
    assert len(parameters["long_factor"]) == len(parameters["short_factor"]) == 4
    original = parameters["original_max_position_embeddings"]
    assert (original < SHORTEST_TOKENS) if is_long else (original > LONGEST_TOKENS)
    assert small.max_position_embeddings / original == 32


def test_dropout_is_off_but_attention_dropout_is_told_by_the_engine() -> None:
    small = shrink("Phi3Config", resid_pdrop=0.1, attention_dropout=0.2, pad_token_id=0)
    assert (small.resid_pdrop, small.attention_dropout) == (0.0, 0.2)


_LONG = ["linear_attention"] * 9 + ["full_attention"] + ["linear_attention"] * 10
_OTHERS = ("full_attention", "moe")
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": _LONG, "num_hidden_layers": 20},
    "nemotron_h": {"layers_block_type": [*("linear_attention", "mlp") * 9, *_OTHERS]},
    "mamba": {}, "mamba2": {}, "falcon_mamba": {}, "zamba": {}, "zamba2": {}, "jamba": {},
    "falcon_h1": {}, "qwen3_next": {}, "qwen3_5_text": {}, "qwen3_5_moe_text": {},
    "olmo_hybrid": {}, "kimi_linear": {"linear_attn_config": {"head_dim": 128, "num_heads": 32}},
    "bailing_hybrid": {}, "lfm3": {}, "minimax": {}, "recurrent_gemma": {},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 4, "num_hidden_layers": 12},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 4, "num_hidden_layers": 12},
}  # fmt: skip


@pytest.mark.parametrize("all_layers", [False, True])
@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.few(14)
def test_models_with_recurrent_layers_become_small_and_run(
    model_type: str, all_layers: bool
) -> None:
    whole = transformers.AutoConfig.for_model(model_type, **HYBRIDS[model_type])
    small = shrink_config(whole, max_seq_len=4096, all_layers=all_layers)
    types, kinds = getattr(small, "layer_types", None), getattr(whole, "layer_types", None)
    assert types is None or set(types) == set(kinds or ())
    if all_layers:
        assert small.num_hidden_layers == whole.num_hidden_layers
    else:
        assert small.num_hidden_layers <= 8
        model = transformers.AutoModelForCausalLM.from_config(small)
        assert sum(p.numel() for p in model.parameters()) < 1_000_000
        ids = torch.arange(4, 24)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        lacking = [name for name, p in model.named_parameters() if p.grad is None]
        assert not [name for name in lacking if "expert" not in name], lacking


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_embeddings_of_each_layer_become_small(model_type: str) -> None:
    """The start-up check draws them in float64 in memory: those of Gemma 3n would take 19 GB."""
    whole = transformers.AutoConfig.for_model(model_type)
    small = shrink_config(whole, max_seq_len=4096, all_layers=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    assert any("per_layer" in name for name, _ in model.named_parameters())


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="names no num_hidden_layers"):
        shrink("ResNetConfig")


def test_of_a_model_with_vision_the_text_is_made_small() -> None:
    whole, small = transformers.Gemma3Config(), shrink("Gemma3Config")
    assert small.vision_config.to_dict() == whole.vision_config.to_dict()
    assert small.text_config.hidden_size < whole.text_config.hidden_size
    assert whole.text_config.to_dict() == transformers.Gemma3Config().text_config.to_dict()


def test_heads_of_a_state_space_that_nothing_reads() -> None:
    """LFM2's files name num_heads, and no expansion."""
    config = transformers.Lfm2Config(num_heads=24)
    assert shrink_config(config, max_seq_len=64).hidden_size < config.hidden_size
