"""RoPE of another length: written into the config as transformers reads it, exact in chunks."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import VOCAB_SIZE
from ruamel.yaml import YAML
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
)

import furlong
from furlong.errors import ConfigError, DataError
from furlong.models.build import build_model, export_model
from furlong.models.rope import apply_rope, check_length, goes_beyond, num_positions
from furlong.testing import reference_loss, take_grads, worst_relative_error

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = 32
LONGROPE = {
    "rope_type": "longrope", "short_factor": (1.0, 1.1, 1.2, 1.3),
    "long_factor": (2.0, 3.0, 4.0, 5.0),
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "another base": {"rope_type": "default", "rope_theta": 5e5},
}


def llama(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": SHORT, "rope_parameters": {"rope_theta": 2e4},
    }  # fmt: skip
    return LlamaConfig(**settings | changes)


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_beyond_the_models_positions_are_exact(tmp_path: Path, name: str) -> None:
    llama().save_pretrained(tmp_path / "short")
    model = build_model(
        str(tmp_path / "short"), init="random", dtype=torch.float64,
        rope=CHANGES[name], max_seq_len=4 * SHORT,
    )  # fmt: skip
    unchanged = build_model(str(tmp_path / "short"), init="random", dtype=torch.float64)
    sequences = batch([4 * SHORT, 40])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    options = furlong.ChunkOptions(size=20)
    result = furlong.forward_backward(model, sequences, options, max_seq_len=4 * SHORT)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12
    assert abs(reference_loss(unchanged, sequences, backward=False) - loss) > 1e-6

    folder = export_model(model, None, tmp_path / "export", dtype=torch.float64)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.max_position_embeddings == 4 * SHORT
    assert reference_loss(loaded, sequences, backward=False) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("rope", [None, CHANGES["yarn"], LLAMA3], ids=["own", "yarn", "llama3"])
def test_a_loss_without_gradients_goes_beyond_the_positions(
    tmp_path: Path, rope: dict[str, Any] | None
) -> None:
    llama().save_pretrained(tmp_path)
    model = build_model(str(tmp_path), init="random", dtype=torch.float64, rope=rope)
    config, sequences = model.config.to_dict(), batch([9 * SHORT, 40])
    truth = reference_loss(model, sequences, backward=False)
    options = furlong.ChunkOptions(size=20)
    engine = furlong.Engine(model, max_seq_len=9 * SHORT)
    given = engine.forward_backward(sequences, options, backward=False)
    assert given.loss == pytest.approx(truth, rel=1e-12)
    assert model.config.to_dict() == config
    with pytest.raises(DataError, match=f"at most {num_positions(model.config)}"):
        engine.forward_backward(sequences, options)


def test_positions_of_another_kind_end_where_the_config_says() -> None:
    dynamic, longrope = llama(), llama()
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 2e4, "factor": 2.0}
    apply_rope(longrope, LONGROPE, max_seq_len=SHORT)
    table = GPT2Config(n_positions=SHORT, n_embd=32, n_head=4, n_layer=2)
    assert not any(map(goes_beyond, (dynamic, longrope, table)))


def test_what_is_not_given_stays_the_models() -> None:
    config = llama()
    apply_rope(config, {"rope_type": "yarn", "factor": 2.5, "beta_fast": None})
    assert config.rope_parameters == {
        "rope_type": "yarn", "rope_theta": 2e4, "factor": 2.5,
        "original_max_position_embeddings": SHORT,
    }  # fmt: skip
    assert num_positions(config) == 80
    # A second change starts from the length before the first one.
    apply_rope(config, LLAMA3 | {"factor": 8.0})
    assert config.rope_parameters["original_max_position_embeddings"] == SHORT
    assert num_positions(config) == 8 * SHORT and "beta_fast" not in config.rope_parameters
    apply_rope(config, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})
    assert config.rope_parameters["rope_theta"] == 1e6


def test_layers_with_a_window_keep_their_own() -> None:
    config = Gemma3TextConfig(max_position_embeddings=SHORT)
    local = dict(config.rope_parameters["sliding_attention"])
    apply_rope(config, {"rope_type": "linear", "factor": 8.0})
    assert config.rope_parameters["sliding_attention"] == local
    assert config.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert num_positions(config) == 8 * SHORT


def test_linear_positions_are_those_after_the_scaling() -> None:
    """Gemma 3 has 131,072 positions with the factor 8."""
    for rope_type in ("linear", "yarn"):
        config = Gemma3TextConfig(
            max_position_embeddings=8 * SHORT, rope_scaling={"rope_type": "linear", "factor": 8.0}
        )
        apply_rope(config, {"rope_type": rope_type, "factor": 16.0})
        assert num_positions(config) == 16 * SHORT


def test_an_attention_factor_that_follows_from_the_factor_follows_the_new_one() -> None:
    """OLMo 3's config writes it out."""
    for own, kept in ((0.1 * math.log(4) + 1, False), (1.5, True)):
        config = scaled("yarn", **YARN, attention_factor=own)
        apply_rope(config, {"rope_type": "yarn", "factor": 4.0})
        assert config.rope_parameters["attention_factor"] == own
        apply_rope(config, {"rope_type": "yarn", "factor": 8.0})
        assert ("attention_factor" in config.rope_parameters) == kept
        apply_rope(config, {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.25})
        assert config.rope_parameters["attention_factor"] == 1.25


def test_frequencies_of_a_part_of_each_head_stay() -> None:
    """Gemma 4's heads have other sizes in layers with full attention, too."""
    with pytest.raises(ConfigError, match="type proportional") as error:
        apply_rope(AutoConfig.for_model("gemma4_text"), CHANGES["yarn"])
    assert error.value.change == "remove model.rope"


def test_phi3_keeps_its_original_length_beside_its_rope() -> None:
    config = Phi3Config(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=64,
        original_max_position_embeddings=16, pad_token_id=0,
        rope_parameters={**LONGROPE, "rope_theta": 1e4,
                         "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )  # fmt: skip
    apply_rope(config, LONGROPE | {"factor": 8.0})
    assert config.rope_parameters["original_max_position_embeddings"] == 16
    assert num_positions(config) == 128


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "linear"}, "Missing required keys"),
        ({"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}, "Unrecognized keys"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor field must be greater"),
        (LONGROPE | {"long_factor": (1.0,)}, "long_factor field must have length 4"),
    ],
)
def test_what_transformers_complains_of_is_an_error(rope: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        apply_rope(llama(), rope, max_seq_len=4 * SHORT)


def test_a_model_without_rope_is_told_so() -> None:
    with pytest.raises(ConfigError, match="gpt2, which has no RoPE"):
        apply_rope(GPT2Config(), {"rope_type": "yarn", "factor": 2.0})


def test_more_tokens_than_positions_are_refused() -> None:
    config = llama()
    check_length(config, SHORT, has_rope=False)
    with pytest.raises(ConfigError, match=r"rope_type: yarn, factor: 4"):
        check_length(config, 3 * SHORT + 1, has_rope=False)
    apply_rope(config, CHANGES["yarn"])
    check_length(config, 4 * SHORT, has_rope=True)
    with pytest.raises(ConfigError, match=r"raise model.rope.factor to 5"):
        check_length(config, 4 * SHORT + 1, has_rope=True)


def scaled(rope_type: str, positions: int = 4 * SHORT, **keys: Any) -> LlamaConfig:
    config = llama()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 2e4, **keys}
    config.max_position_embeddings = positions
    return config


YARN = {"factor": 4.0, "original_max_position_embeddings": SHORT}


@pytest.mark.parametrize("rope_type", ["yarn", "llama3", "longrope"])
def test_keys_of_the_models_type_stay(rope_type: str) -> None:
    own = {
        "yarn": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
        "llama3": LLAMA3 | YARN,
        "longrope": {k: list(v) if isinstance(v, tuple) else v for k, v in LONGROPE.items()} | YARN,
    }[rope_type]
    config = scaled(rope_type, **{k: v for k, v in own.items() if k != "rope_type"})
    before = dict(config.rope_parameters)
    apply_rope(config, {"rope_type": rope_type, "factor": 4.0})
    assert config.rope_parameters == before and num_positions(config) == 4 * SHORT
    apply_rope(config, {"rope_type": rope_type, "factor": 8.0})
    assert config.rope_parameters == before | {"factor": 8.0}
    assert num_positions(config) == 8 * SHORT


def test_more_positions_than_the_factor_tells_of_grow_with_it() -> None:
    """Llama 3.1 has 16 times its original length with the factor 8."""
    config = scaled("llama3", 16 * SHORT, **{k: v for k, v in LLAMA3.items() if k != "rope_type"},
                    original_max_position_embeddings=SHORT)  # fmt: skip
    config.rope_parameters["factor"] = 8.0
    apply_rope(config, {"rope_type": "llama3", "factor": 16})
    assert num_positions(config) == 32 * SHORT


def reached(config: Any, wanted: int, source: str | None = None) -> list[dict[str, Any]]:
    """The values of model.rope that the refusal names; each passes."""
    with pytest.raises(ConfigError) as error:
        check_length(config, wanted, has_rope=False, source=source)
    named = re.findall(r"\{rope_type[^}]*\}", error.value.change)
    ropes = [YAML(typ="safe").load(text) for text in named]
    for rope in ropes:
        changed = deepcopy(config)
        apply_rope(changed, rope, max_seq_len=wanted)
        check_length(changed, wanted, has_rope=True)
    return ropes


def test_the_type_of_the_model_reaches_further(tmp_path: Path) -> None:
    def of(rope_type: str, factor: float) -> dict[str, Any]:
        return {"rope_type": rope_type, "factor": factor}

    assert reached(scaled("default", SHORT), 70) == [of("yarn", 3)]
    assert reached(scaled("yarn", **YARN), 150) == [of("yarn", 5)]
    assert reached(scaled("yarn", SHORT, **YARN), 100) == [of("yarn", 4)]
    llama3 = LLAMA3 | YARN | {"factor": 8.0}
    del llama3["rope_type"]
    assert reached(scaled("llama3", 16 * SHORT, **llama3), 32 * SHORT) == [of("llama3", 16)]
    # Vicuna counts the positions before its scaling, Together those behind it
    before = {"original_max_position_embeddings": SHORT}
    both = [of("linear", 16), of("linear", 4) | before]
    assert reached(scaled("linear", SHORT, factor=4.0), 128) == both
    assert reached(scaled("linear", SHORT, factor=4.0), 250)[1] == of("linear", 8) | before
    vicuna = scaled("linear", SHORT, factor=4.0)
    vicuna.max_sequence_length = 128
    assert reached(vicuna, 128) == [of("linear", 4)]
    command_r = scaled("default", SHORT)
    command_r.model_max_length = 512
    assert reached(command_r, 512) == [{"rope_type": "default"}]
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    both = [of("yarn", 16), {"rope_type": "default"}]
    assert reached(scaled("default", SHORT), 512, str(tmp_path)) == both
    linear = reached(scaled("linear", SHORT, factor=4.0), 99, str(tmp_path))
    assert linear == [of("linear", 4) | before]


def test_what_transformers_would_refuse_is_not_named() -> None:
    """Phi-3 of 4K positions knows longrope alone, whose factors nobody can guess."""
    config = Phi3Config(hidden_size=32, num_attention_heads=4, max_position_embeddings=SHORT,
                        num_hidden_layers=2, pad_token_id=0, vocab_size=64)  # fmt: skip
    assert reached(config, 40) == []


def test_a_model_without_a_head_dim_is_built_with_yarn() -> None:
    config = AutoConfig.for_model("mixtral", hidden_size=32, num_attention_heads=4,
                                  num_hidden_layers=1, max_position_embeddings=SHORT)  # fmt: skip
    apply_rope(config, CHANGES["yarn"])
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)


def test_a_static_base_by_the_name_of_dynamic_stays_itself() -> None:
    config = AutoConfig.for_model(
        "hunyuan_v1_dense", hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64, pad_token_id=0,
        max_position_embeddings=SHORT,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
    )  # fmt: skip
    (rope,) = reached(config, 40)
    model = AutoModelForCausalLM.from_config(config).double()
    apply_rope(config := deepcopy(config), rope, max_seq_len=40)
    other = AutoModelForCausalLM.from_config(config).double()
    other.load_state_dict(model.state_dict())
    ids = torch.arange(3, 43)[None]
    assert torch.allclose(model(input_ids=ids).logits, other(input_ids=ids).logits, rtol=1e-5)


def test_a_larger_factor_that_is_asked_for_is_large_enough() -> None:
    for rope in (CHANGES["linear"], CHANGES["yarn"], LLAMA3):
        config = scaled("linear", factor=2.0)
        apply_rope(config, rope)
        with pytest.raises(ConfigError) as error:
            check_length(config, 999, has_rope=True)
        config = scaled("linear", factor=2.0)
        apply_rope(config, rope | {"factor": float(error.value.change.rpartition(" ")[2])})
        check_length(config, 999, has_rope=True)


def test_positions_of_a_table_have_no_rope() -> None:
    assert reached(GPT2Config(n_positions=SHORT, n_embd=32, n_head=4, n_layer=2), 40) == []


def test_a_model_without_positions_has_no_end_of_them() -> None:
    jamba = AutoConfig.for_model(
        "jamba", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SHORT, num_experts=2, mamba_d_state=4,
        mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1,
    )  # fmt: skip
    check_length(jamba, 9 * SHORT, has_rope=False)
    assert num_positions(jamba) is None
    with pytest.raises(ConfigError, match=r"remove model\.rope"):
        apply_rope(jamba, CHANGES["yarn"])
