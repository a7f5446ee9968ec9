"""A model's folder: what its config.json and neighbours may not ask for, and files of weights that
are missing, cut off, unreadable or of another kind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data.tiny_tokenizers import word_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from furlong.errors import ConfigError, UnsupportedModelError, UserError
from furlong.models.build import (
    INDEX,
    WEIGHTS,
    build_model,
    check_model,
    export_model,
    merge_adapters,
)

LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
UP = "model.layers.1.mlp.up_proj.weight"
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
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}, False),
    ("awq", {"quant_method": "awq"}, True),
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
    assert "load_in_4bit" in error.required and "bfloat16" in error.change


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
    "fused modules": ({"fusion_config": {"patch_embeddings": True}}, "fusion_config"),
    "weights elsewhere": ({"transformers_weights": "../x.safetensors"}, "transformers_weights"),
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
    assert "model.lora.adapter" in error.change


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


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in several files."""
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / INDEX).exists()
    return folder


def test_whole_weights_pass(sharded: Path) -> None:
    check_model(str(sharded), init="pretrained", max_seq_len=32)
    build_model(str(sharded))


def replaced(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The file of weights is another one."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        write(folder / WEIGHTS)

    return damage


def with_pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "training_args.bin").write_bytes(b"")
    assert "is a pickle" not in str(refusal(folder)), "it holds no weights"
    (folder / "pytorch_model.bin").write_bytes(b"")


def cut_off(keep_bytes: int) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(folder / WEIGHTS, keep_bytes)


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        weights[UP] = weights[UP].to(dtype)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


CUT_OFF = f"{WEIGHTS}, which is cut off"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "pickles": (with_pickles, "pytorch_model.bin is a pickle", "save_pretrained"),
    "another name": (
        lambda folder: (folder / WEIGHTS).rename(folder / "consolidated.safetensors"),
        "consolidated.safetensors", "save_pretrained",
    ),
    **{f"{n} bytes": (cut_off(n), CUT_OFF, "once more") for n in (0, 100, 3000)},
    "a pickle of that name": (
        replaced(lambda file: torch.save({"a": torch.ones(2)}, file)), "no safetensors file", "",
    ),
    **{
        str(dtype): (in_dtype(dtype), f"{UP} is of dtype", "bfloat16")
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64)
    },
    "a pointer": (
        replaced(lambda file: file.write_text("version https://git-lfs.github.com/spec/v1")),
        "Git LFS", "git lfs pull",
    ),
    "a link to nowhere": (replaced(lambda file: file.symlink_to("no")), "No such file", ""),
    "a link to itself": (replaced(lambda file: file.symlink_to(WEIGHTS)), WEIGHTS, ""),
    "a pipe": (replaced(os.mkfifo), "a pipe or a device", ""),
    "a folder": (replaced(Path.mkdir), "Is a directory", ""),
    "a distributed checkpoint": (
        lambda folder: (folder / WEIGHTS).rename(folder / "shard-00001-model-00001.safetensors"),
        "shard-00001-model", "save_pretrained",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_the_file_is_told(folder: Path, name: str) -> None:
    damage, told, mend = DAMAGED[name]
    damage(folder)
    error = refusal(folder)
    assert told in error.given and mend in error.change


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "pytorch_model.bin"}}', '{"weight_map": {"a": "../x.safetensors"}}',
    ],
)  # fmt: skip
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded).given


def test_shards_that_are_cut_off_or_missing_are_told(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    assert shards[1].name in refusal(sharded).given
    shards[1].unlink()
    shards[2].unlink()
    told = refusal(sharded).given
    assert f"without 2 of the {len(shards)} files" in told and shards[1].name in told


def test_tensors_that_are_left_out_are_told(folder: Path, capsys: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    more = weights | {"extra.weight": torch.zeros(3), "mask": torch.ones(2, dtype=torch.bool)}
    save_file(more, folder / WEIGHTS, metadata={"format": "pt"})
    build_model(str(folder))
    assert "2 tensors are no weights of the model and are left out" in capsys.readouterr().out


def test_weights_of_another_config_are_told(folder: Path) -> None:
    change(folder, num_hidden_layers=3)
    with pytest.raises(ConfigError, match="lacks 9 weights"):
        build_model(str(folder))


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}, {}, [2, 1]),
        (None, {"pad_token_id": -1, "eos_token_id": 2}, [2, 1]),
        ({"eos_token_id": [2, 1], "temperature": 0.9}, {}, [2, 1]),
    ],
)
def test_a_flawed_generation_config_is_exported_with_the_eos_of_the_tokenizer(
    folder: Path, generation: dict[str, Any] | None, config: dict[str, Any], ends: list[int],
    is_adapter: bool, tmp_path: Path,
) -> None:  # fmt: skip
    """Llama 2 and Vicuna publish the first one, copies of LLaMA-1 the second one."""
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    change(folder, **config)
    check_model(str(folder), init="pretrained", max_seq_len=32)
    model = build_model(str(folder), lora=LORA if is_adapter else None)
    model = merge_adapters(model) if is_adapter else model
    export_model(model, word_tokenizer(), tmp_path / "export", dtype=torch.float32)
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert written["eos_token_id"] == ends
    assert generation is None or written.items() >= {**generation, "eos_token_id": ends}.items()
    build_model(str(tmp_path / "export"))


@pytest.mark.parametrize(
    ("family", "keys", "older"),
    [
        ("llama", {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
         {"rope_theta": 5e5, "rope_scaling": {
             "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
        ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 2e4, "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}},
         {"rope_theta": 2e4, "rope_scaling": {
             "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
         {"rope_theta": 1e6}),
        ("phi", {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("gemma3_text", {"head_dim": 8, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
         {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)  # fmt: skip
def test_an_export_has_its_rope_under_the_keys_of_transformers_4_too(
    family: str, keys: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **TINY, **keys)
    export_model(
        AutoModelForCausalLM.from_config(config), None, tmp_path / "out", dtype=torch.float32
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written.get(key) for key in older} == older
    again = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert {key: own for key, own in again.items() if key != "type"} == config.rope_parameters


def test_a_head_beside_embeddings_that_the_config_ties_is_refused(folder: Path) -> None:
    change(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="two different weights"):
        build_model(str(folder))
    changes = {"tie_word_embeddings": False}
    check_model(str(folder), init="pretrained", max_seq_len=32, changes=changes)
    assert not build_model(str(folder), changes=changes).config.tie_word_embeddings
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError):
        check_model(str(folder), init="pretrained", max_seq_len=32, changes=changes)


@pytest.mark.parametrize("doubled", [True, False])
def test_a_head_of_a_config_that_does_not_say_is_tied_if_it_equals_the_embeddings(
    doubled: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=32, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = load_file(tmp_path / WEIGHTS)
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + (0.0 if doubled else 1.0)
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    check_model(str(tmp_path), init="pretrained", max_seq_len=32)
    model = build_model(str(tmp_path))
    assert (model.lm_head.weight is model.transformer.wte.weight) == doubled
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_config_of_text_alone_may_name_no_other(folder: Path, tmp_path: Path) -> None:
    change(folder, text_config=None)
    model = build_model(str(folder))
    export_model(model, None, tmp_path / "out", dtype=torch.float32)
    assert "rope_theta" in json.loads((tmp_path / "out" / "config.json").read_text())
