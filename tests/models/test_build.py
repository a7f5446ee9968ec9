"""Models in and out of folders."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.hybrids import HYBRIDS
from helpers.tiny_families import config_of
from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, Qwen2Config

import furlong
from furlong.config.schema import LoraConfig
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.models.build import (
    add_adapters,
    build_model,
    export_model,
    merge_adapters,
    model_of_config,
)
from furlong.models.shrink import shrink_config
from furlong.testing import reference_loss, take_grads, worst_relative_error

IDS = torch.arange(12)[None]
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def config_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "config-only"
    Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=request.param,
    ).save_pretrained(folder)
    return folder


def logits(model: Any, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval().to(dtype)(IDS).logits
    return output


def test_random_weights_follow_the_seed_and_leave_the_global_generator(config_folder: Path) -> None:
    state = torch.random.get_rng_state()
    one, two, other = (
        build_model(str(config_folder), init="random", seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_export_gives_the_same_logits(
    config_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build_model(str(config_folder), init="random", dtype=dtype)
    trained_dtype = torch.promote_types(dtype, torch.float32)
    assert {p.dtype for p in model.parameters()} == {trained_dtype}
    folder = export_model(model, None, tmp_path / "export", dtype=dtype)
    assert [file.name for file in tmp_path.glob("*.tmp")] == []
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded, dtype), logits(model, dtype))
    again = build_model(str(folder), dtype=dtype)
    assert again.training
    assert {p.dtype for p in again.parameters()} == {trained_dtype}
    with pytest.raises(ConfigError, match="exists"):
        export_model(model, None, folder, dtype=dtype)


def test_no_bar_is_shown_while_a_model_is_written(
    config_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = build_model(str(config_folder), init="random")
    export_model(model, None, tmp_path / "export", dtype=torch.float32)
    assert "shards" not in capsys.readouterr().err


def test_adapters_are_wide_and_their_base_is_frozen(config_folder: Path, tmp_path: Path) -> None:

    base = build_model(str(config_folder), init="random")
    folder = export_model(base, None, tmp_path / "base", dtype=torch.bfloat16)
    model = build_model(str(folder), dtype=torch.bfloat16, lora=LORA)
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapter = export_model(model, None, tmp_path / "adapter", dtype=torch.bfloat16)
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert torch.equal(logits(loaded, torch.float32), logits(model, torch.float32))


def test_what_cannot_be_built_is_told(config_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        build_model("./nowhere")
    with pytest.raises(ConfigError, match=r"without config\.json"):
        build_model(str(tmp_path))
    with pytest.raises(ConfigError, match="required: weights"):
        build_model(str(config_folder))
    with pytest.raises(ConfigError, match=r"required: all-linear, or names among[\s\S]*q_proj"):
        build_model(str(config_folder), init="random", lora=LORA | {"target_modules": ["nope"]})
    BertConfig().save_pretrained(tmp_path / "vision")
    (tmp_path / "vision" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnsupportedModelError, match="model type vit"):
        build_model(str(tmp_path / "vision"), init="random")


def test_all_linear_layers_are_those_that_peft_adapts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("mamba2", **HYBRIDS["mamba2"]).save_pretrained(tmp_path)
    model = build_model(str(tmp_path), init="random", lora=LORA)
    assert all(".in_proj." in name for name in trained_names(model))
    assert "no adapters in out_proj" in capsys.readouterr().out


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen2_moe",
     "qwen3_5_moe_text", "granitemoe", "phimoe", "llama4_text", "afmoe", "zaya"],
)  # fmt: skip
def test_all_linear_is_every_linear_layer_but_head_and_router(family: str) -> None:
    config = shrink_config(AutoConfig.for_model(family), max_seq_len=64)
    model = model_of_config(config, family, dtype=torch.bfloat16)
    wanted = sum(
        LORA["rank"] * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not re.search(r"lm_head|\.(gate|router)\b", name)
    )
    adapted = add_adapters(model, LORA)
    assert wanted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("modules", ["all-linear", ["shared_experts.gate_proj", "mlp.down_proj"]])
def test_adapters_beside_experts_are_read_again_by_peft(tmp_path: Path, modules: Any) -> None:
    """peft takes the names of a dense or shared MLP for those of experts in this family."""
    config = shrink_config(AutoConfig.for_model("deepseek_v3"), max_seq_len=64)
    config.save_pretrained(tmp_path / "c")
    base = build_model(str(tmp_path / "c"), init="random")
    folder = export_model(base, None, tmp_path / "base", dtype=torch.float32)
    lora = LORA | {"target_modules": modules, "dropout": 0.2}
    model = build_model(str(folder), lora=lora)
    names = trained_names(model)
    assert any(".shared_experts.gate_proj." in name for name in names)
    assert any(".mlp.down_proj." in name for name in names)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    saved = export_model(model, None, tmp_path / "saved", dtype=torch.float32)
    wanted = logits(model, torch.float32)
    theirs = AutoPeftModelForCausalLM.from_pretrained(saved)
    torch.testing.assert_close(logits(theirs, torch.float32), wanted)
    again = build_model(str(folder), lora=LoraConfig(adapter=str(saved)).model_dump())
    assert trained_names(again) == names
    assert torch.equal(logits(again, torch.float32), wanted)


def test_a_name_that_fits_no_module_is_told_beside_others(config_folder: Path) -> None:
    lora = LORA | {"target_modules": ["q_proj", "v_porj"]}
    for layers in (None, range(1)):
        with pytest.raises(ConfigError, match="q_proj, v_porj: v_porj fits none") as caught:
            build_model(str(config_folder), init="random", lora=lora, layers=layers)
        assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj" in caught.value.required


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_merged_adapters_of_one_of_two_tied_weights_are_those_that_were_trained(
    config_folder: Path, tmp_path: Path, modules: list[str]
) -> None:
    base = build_model(str(config_folder), init="random")
    folder = export_model(base, None, tmp_path / "base", dtype=torch.float32)
    model = build_model(str(folder), lora=LORA | {"target_modules": modules})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    wanted = logits(model, torch.float32)
    assert (wanted - logits(base, torch.float32)).norm() > wanted.norm() / 10
    merged = export_model(merge_adapters(model), None, tmp_path / "merged", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits(loaded, torch.float32), wanted)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen2", {"modules_to_save": ["embed_tokens"], "target_modules": r".*\.(q|down)_proj"}),
        ("qwen2", {"modules_to_save": ["embed_tokens", "lm_head"], "rslora": True}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    ],
)
def test_adapters_of_all_kinds_are_exact_and_are_gone_on_from(
    tmp_path: Path, model_type: str, more: dict[str, Any]
) -> None:
    config_of(model_type, tie_word_embeddings=model_type == "qwen2").save_pretrained(tmp_path / "c")
    base = build_model(str(tmp_path / "c"), init="random")
    folder = export_model(base, None, tmp_path / "base", dtype=torch.float32)
    given = {"rank": 2, "alpha": 4.0, **more}
    model = build_model(str(folder), dtype=torch.float64, lora=LoraConfig(**given).model_dump())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sequences = batch([21, 4, 17])
    loss = reference_loss(model, sequences)
    truth = take_grads(model)
    options = furlong.ChunkOptions(size=8, keep="input")
    assert furlong.forward_backward(model, sequences, options).loss == pytest.approx(loss)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12
    ends = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert (ends[0] is ends[1]) == (model_type == "qwen2")  # a copy of one is one of both
    saved = export_model(model, None, tmp_path / "saved", dtype=torch.float64)
    config = saved / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"init_lora_weights": "gaussian"})
    )
    lora = LoraConfig(adapter=str(saved), rank=2)
    again = build_model(str(folder), dtype=torch.float64, lora=lora.model_dump())
    assert torch.equal(logits(again, torch.float64), logits(model, torch.float64))
    assert trained_names(again) == trained_names(model)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank = 3 .*r is 2"):
        LoraConfig(adapter=str(saved), rank=3)
    config_of(model_type, num_hidden_layers=4).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="does not know"):
        build_model(str(tmp_path / "other"), init="random", lora=lora.model_dump())


def trained_names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("adapter_config.json", None, "without adapter_config.json"),
        ("adapter_config.json", {"peft_type": "IA3"}, "adapters of type IA3"),
        ("adapter_config.json", {"peft_type": "LORA", "bias": "all"}, "bias = 'all'"),
        ("adapter_config.json", {"peft_type": "LORA", "init_lora_weights": "pissa"}, "pissa"),
        ("adapter_config.json", [], "adapter_config.json"),
        ("adapter_model.safetensors", None, "without adapter_model.safetensors"),
        ("adapter_model.safetensors", {}, "adapter_model.safetensors"),
    ],
)
def test_adapters_that_cannot_be_gone_on_from_are_told(
    config_folder: Path, tmp_path: Path, file: str, values: Any, told: str
) -> None:
    model = build_model(str(config_folder), init="random", lora=LORA)
    saved = export_model(model, None, tmp_path / "saved", dtype=torch.float32)
    (saved / file).unlink()
    if values is not None:
        (saved / file).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        lora = LoraConfig(adapter=str(saved)).model_dump()
        build_model(str(config_folder), init="random", lora=lora)
    assert "model.lora.adapter" in caught.value.source


def test_adapters_whose_embeddings_are_apart_from_a_tied_head_are_told(tmp_path: Path) -> None:
    """As peft itself trains them: one weight for both would lose one of two that it saved."""
    config_of("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "config")
    saved = tmp_path / "saved"
    lora = LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}
    model = build_model(str(tmp_path / "config"), init="random", lora=lora)
    export_model(model, None, saved, dtype=torch.float32)
    theirs = json.loads((saved / "adapter_config.json").read_text())
    theirs["ensure_weight_tying"] = False
    (saved / "adapter_config.json").write_text(json.dumps(theirs))
    lora = LoraConfig(adapter=str(saved)).model_dump()
    with pytest.raises(ConfigError, match="apart from a head") as caught:
        build_model(str(tmp_path / "config"), init="random", lora=lora)
    assert caught.value.source == "model.lora.adapter"


@pytest.mark.parametrize("key", ["modules_to_save", "target_parameters"])
def test_names_that_fit_nothing_are_told(config_folder: Path, key: str) -> None:
    lora = LoraConfig(**{key: ["embed_token"]}).model_dump()
    with pytest.raises(ConfigError, match=f"{key} = embed_token"):
        build_model(str(config_folder), init="random", lora=lora)


def test_experts_compute_in_float64(tmp_path: Path) -> None:
    config_of("mixtral", num_local_experts=4).save_pretrained(tmp_path)
    model = build_model(str(tmp_path), init="random", dtype=torch.float64)
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.dtype == torch.float64
