"""ModelShape: parameter counts are transformers' own, windows are those that its layers use."""

import json
from pathlib import Path

import pytest
from helpers import tiny_families
from helpers.tiny_families import WINDOW, config_of, own_settings

from furlong.cost.shape import MODELS, ModelShape, model_shape
from furlong.errors import ConfigError
from furlong.families import FAMILIES

TINY = tiny_families.FAMILIES | tiny_families.OTHERS

GROUPED = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
VARIANTS = {
    "cohere without norms": {"use_qk_norm": False},
    "gpt_neox without bias": {"attention_bias": False},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "llama wide heads": {"head_dim": 24},
    "mixtral with windows": {"sliding_window": WINDOW},
    "phi3 with windows": {"sliding_window": WINDOW},
    "qwen2 late windows": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    },
    "qwen3_moe with a dense layer": {"mlp_only_layers": [1]},
    "stablelm with norms and biases": {"qk_layernorm": True, "use_qkv_bias": True},
}  # fmt: skip
ROWS = [name for name in FAMILIES if name in TINY]
CONFIGS = {name: {} for name in ROWS} | VARIANTS


def settings(name):
    """Settings beside those of every tiny model; layer types are the family's own."""
    own = own_settings(name.split()[0])
    return {**GROUPED, **own, "layer_types": None, **CONFIGS[name]}


def config(name):
    return config_of(name.split()[0], **settings(name))


def transformers_model(name):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_transformers_own(name):
    model = transformers_model(name)
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.exact
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert sum(shape.layer_parameters(i) for i in range(shape.num_layers)) == sum(
        p.numel() for n, p in model.named_parameters() if ".layers." in n
    )


@pytest.mark.parametrize("name", [n for n in CONFIGS if "moe" not in n and "oss" not in n])
def test_a_config_file_without_defaults_says_the_same(name):
    """What save_pretrained leaves out of config.json is a default that the table knows."""
    model = transformers_model(name)
    shortened = model.config.to_diff_dict()
    full = ModelShape.from_config(model.config.to_dict())
    assert ModelShape.from_config(json.loads(json.dumps(shortened))) == full


@pytest.mark.parametrize("name", [n for n in CONFIGS if "sliding_window" in settings(n)])
def test_windows_are_those_of_the_layers(name):
    values = transformers_model(name).config.to_dict()
    types = values.pop("layer_types", None)
    shape = ModelShape.from_config(values)
    if types is not None:
        expected = tuple(WINDOW if "sliding" in kind else None for kind in types)
        assert shape.windows == expected
        assert ModelShape.from_config(values | {"layer_types": types}).windows == expected
    else:
        assert shape.windows == (WINDOW,) * shape.num_layers
    assert any(shape.windows)


def test_published_counts():
    billions = {
        "Qwen2.5-0.5B": 0.494, "Qwen2.5-7B": 7.616, "Qwen2.5-14B": 14.770, "Qwen2.5-32B": 32.764,
        "Qwen2.5-72B": 72.706, "Llama-2-7B": 6.738, "Llama-2-13B": 13.016, "Llama-3-8B": 8.030,
    }  # fmt: skip
    for name, count in billions.items():
        assert model_shape(name).num_parameters / 1e9 == pytest.approx(count, abs=6e-4), name
    assert all(model_shape(name).exact for name in MODELS)


def test_active_parameters_leave_idle_experts_out():
    shape = ModelShape.from_config(config("mixtral").to_dict())
    expert = 3 * 48 * 80
    assert shape.num_parameters - shape.num_active_parameters == 7 * 2 * expert
    assert shape.layer_active_parameters(0) == shape.mixers[0].matrices + 2 * expert + 48 * 4


def test_stages_sum_to_the_model_and_copy_a_tied_head():
    untied, tied = (
        ModelShape.from_config(config(name).to_dict()) for name in ("llama", "llama tied")
    )
    for stages in ((7,), (1, 6), (2, 4, 1)):
        for shape in (untied, tied):
            total = sum(shape.stage_parameters(stages, s) for s in range(len(stages)))
            copied = shape.tied_head and len(stages) > 1
            assert total == shape.num_parameters + copied * shape.embedding_parameters


def test_text_config_and_unknown_family():
    inner = GROUPED | {"model_type": "llama"}
    nested = ModelShape.from_config({"model_type": "something", "text_config": inner})
    assert nested == ModelShape.from_config(inner)
    unknown = ModelShape.from_config(GROUPED | {"model_type": "unheard_of"})
    assert not unknown.exact
    assert unknown.num_parameters == ModelShape.from_config(inner).num_parameters


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("{", "line 1"),
        ("[]", "list"),
        ('{"model_type": "llama"}', "no hidden_size"),
        ('{"hidden_size": 8, "num_attention_heads": "8"}', "num_attention_heads = '8'"),
    ],
)
def test_bad_files_are_refused_in_four_parts(tmp_path: Path, text, given):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        ModelShape.from_file(tmp_path)
    assert given in error.value.given
    assert str(tmp_path) in error.value.source + error.value.given


def test_a_missing_file_and_an_unknown_preset_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        ModelShape.from_file(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"did you mean Qwen2\.5-7B\?"):
        model_shape("qwen2.5-7")
