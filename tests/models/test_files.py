"""What a model's config.json and its neighbours may not ask for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM

from furlong.errors import ConfigError, UnsupportedModelError, UserError
from furlong.models.build import build_model, check_model, export_model

TINY: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refusal(folder: Path) -> UserError:
    """The error of checking a model and, should that find nothing, of building it."""
    with pytest.raises(UserError) as raised:
        check_model(str(folder), init="pretrained", max_seq_len=32)
        build_model(str(folder))
    return raised.value


QUANTIZED: list[tuple[str, dict[str, Any], bool]] = [
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}, False),
    ("fp8", {"quant_method": "fp8"}, True),
    ("nobody-knows", {"quant_method": "nobody-knows"}, False),
    ("unnamed", {"load_in_8bit": True}, True),
]


@pytest.mark.parametrize(("method", "asked", "inside"), QUANTIZED, ids=lambda x: str(x))
def test_quantized_weights_are_refused_by_name(
    folder: Path, method: str, asked: dict[str, Any], inside: bool
) -> None:
    values: dict[str, Any] = {"quantization_config": asked}
    change(folder, **({"text_config": values} if inside else values))
    (folder / "model.safetensors").write_bytes(b"never read")
    error = refusal(folder)
    assert isinstance(error, UnsupportedModelError)
    assert method in error.given
    assert "QLoRA" in error.required and "bfloat16" in error.change


def test_no_quantization_is_no_quantization(folder: Path) -> None:
    change(folder, quantization_config=None)
    check_model(str(folder), init="pretrained", max_seq_len=32)
    build_model(str(folder))


ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "an activation": ({"hidden_act": "nope"}, "hidden_act = 'nope'"),
    "layers in words": ({"num_hidden_layers": "three"}, "num_hidden_layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
    "a list of sizes": ({"hidden_size": [16]}, "hidden_size"),
    "a negative vocabulary": ({"vocab_size": -5}, "vocab_size = -5"),
    "a vocabulary beyond memory": ({"vocab_size": 10**13}, "parameters"),
    "positions in words": ({"max_position_embeddings": "far"}, "max_position_embeddings"),
    "rope in a list": ({"rope_parameters": [1, 2]}, "config.json"),
    "rope of no type": ({"rope_parameters": {"rope_type": "spiral"}}, "config.json"),
    "a dtype": ({"dtype": "load"}, "dtype = 'load'"),
    "fused modules": ({"fusion_config": {"patch_embeddings": True}}, "fusion_config"),
    "weights elsewhere": ({"transformers_weights": "../x.safetensors"}, "transformers_weights"),
    "tuples": ({"return_dict": False}, "return_dict = False"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states = True"),
    "a billion labels": ({"num_labels": 10**9}, "num_labels = 1000000000"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    "no width": ({"intermediate_size": 0}, "intermediate_size = 0"),
    "rope of no base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        "rope_theta = -1",
    ),
    "rope of a word": ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "factor = 'x'"),
    "what cannot be exported": ({"output_attentions": True}, "output_attentions"),
    "text in text_config": ({"text_config": 7}, "config.json"),
    "a family with kernels": ({"model_type": "rwkv"}, "model type rwkv"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_values_are_told_with_their_key(folder: Path, name: str) -> None:
    values, told = ABSURD[name]
    change(folder, **values)
    error = refusal(folder)
    assert told in error.given
    assert "config.json" in str(error)


@pytest.mark.parametrize(
    "asked",
    [
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation_internal": "evil/kernel", "experts_implementation": "sonicmoe"},
    ],
)
def test_attention_that_a_config_asks_for_is_not_looked_for(
    folder: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    change(folder, **asked)
    check_model(str(folder), init="pretrained", max_seq_len=32)
    for init in ("pretrained", "random"):
        model = build_model(str(folder), init=init)  # type: ignore[arg-type]
        assert model.config._attn_implementation == "sdpa"
        assert model.config._experts_implementation in ("eager", "grouped_mm")
    exported = export_model(model, None, tmp_path / "export", dtype=model.dtype)
    text = (exported / "config.json").read_text()
    assert "evil" not in text
    assert "attn_implementation" not in text


def test_a_family_without_sdpa_is_built_with_eager_attention(tmp_path: Path) -> None:
    GptOssConfig(
        **TINY, num_local_experts=2, num_key_value_heads=1, head_dim=8
    ).save_pretrained(tmp_path)  # fmt: skip
    change(tmp_path, attn_implementation="evil/kernel", experts_implementation="deepgemm")
    model = build_model(str(tmp_path), init="random")
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation in ("eager", "grouped_mm")


@pytest.mark.parametrize("has_config", [True, False])
def test_adapters_in_the_place_of_a_model_are_told(folder: Path, has_config: bool) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not has_config:
        (folder / "config.json").unlink()
    error = refusal(folder)
    assert "adapter" in error.given
    assert "furlong export RUN --merge" in error.change


@pytest.mark.parametrize(
    "text", ['{"max_new_tokens": -5}', "[]", '{"watermarking_config": {"x": 1}}']
)
def test_a_broken_generation_config_is_told(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    error = refusal(folder)
    assert "generation_config.json" in error.given
    assert "remove it" in error.change


def test_a_config_that_is_a_folder_or_a_dangling_link_is_told(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    assert "config.json" in refusal(folder).given
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in refusal(folder).given


@pytest.mark.slow
def test_lora_targets_of_any_kind_are_told(folder: Path) -> None:
    lora: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0}
    for modules in ("(((", ("model.embed_tokens.weight",), "model"):
        with pytest.raises(ConfigError, match="required: all-linear, or names among"):
            build_model(str(folder), lora=lora | {"target_modules": modules})
