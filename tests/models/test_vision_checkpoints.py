"""Text inside checkpoints with a vision tower trains as in the whole model, which stays whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.vision_checkpoints import (
    KINDS,
    NUM_TEXT_IDS,
    open_whole,
    tensors,
    write_checkpoint,
)
from peft import PeftModel
from transformers import LlavaNextConfig

import furlong
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.models.build import build_model, check_model, export_model, merge_adapters
from furlong.models.describe import describe
from furlong.models.placeholders import is_tied
from furlong.models.quantized import packed_linears
from furlong.testing import reference_loss, take_grads, worst_error
from furlong.verify import Float64

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
IDS = torch.arange(3, 23)[None]


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", request.param, max_shard_size="20KB")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def sequences(*lens: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, NUM_TEXT_IDS, (n,), generator=generator) for n in lens]
    return [{"input_ids": one, "labels": one} for one in ids]


def test_gradients_of_text_are_those_of_the_whole_model(checkpoint: Path) -> None:
    batch = sequences(21, 9, 4)
    with Float64():
        whole = open_whole(checkpoint)
        truth_loss, truth = reference_loss(whole, batch), take_grads(whole)
        model = build_model(str(checkpoint), dtype=torch.float64)
        result = furlong.forward_backward(model, batch, furlong.ChunkOptions(size=5))
        given = take_grads(model)
    assert given.keys() == dict(model.named_parameters()).keys()
    assert result.loss == pytest.approx(truth_loss, rel=1e-12)
    assert worst_error(given, truth)[0] < 1e-12


@pytest.mark.parametrize("kind", ["qwen3_vl", "llama4"])
def test_stages_hold_their_part_of_the_text(kind: str, tmp_path: Path) -> None:
    source = str(write_checkpoint(tmp_path / "source", kind))
    batch = sequences(11, 4)
    whole = build_model(source, dtype=torch.float64)
    options = furlong.ChunkOptions(size=5)
    one, truth = furlong.forward_backward(whole, batch, options), take_grads(whole)
    options = furlong.ChunkOptions(size=5, order="layer-first")
    two, given = furlong.forward_backward(whole, batch, options), take_grads(whole)
    assert two.loss == pytest.approx(one.loss, rel=1e-12)
    assert worst_error(given, truth)[0] < 1e-12
    number = whole.config.text_config.num_hidden_layers
    parts = [build_model(source, dtype=torch.float64, layers=r)
             for r in (range(1), range(1, number))]  # fmt: skip
    seen = set()
    for part in parts:
        for name, weight in part.named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)), name
            seen.add(name)
    assert seen == dict(whole.named_parameters()).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_the_text(kind: str, tmp_path: Path) -> None:
    model = build_model(str(write_checkpoint(tmp_path / "source", kind)))
    shape = describe(model.config)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    names = dict(model.named_modules())
    assert len(names[shape.layers_name]) == len(shape.layers)  # type: ignore[arg-type]


def test_what_does_not_train_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "gemma3")
    with pytest.raises(UnsupportedModelError, match="inside another module"):
        furlong.forward_backward(open_whole(source), sequences(4))
    packed = json.loads((source / "config.json").read_text())
    packed["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (source / "config.json").write_text(json.dumps(packed))
    with pytest.raises(ConfigError, match="in 4 bits"):
        build_model(str(source), lora=LORA)
    towers = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    LlavaNextConfig(
        vision_config=towers | {"model_type": "clip_vision_model", "num_attention_heads": 2},
        text_config=towers | {"model_type": "llama", "num_attention_heads": 2, "vocab_size": 96},
    ).save_pretrained(tmp_path / "next")
    with pytest.raises(UnsupportedModelError, match="inside another module"):
        check_model(str(tmp_path / "next"), max_seq_len=8)


def test_tied_weights_go_by_the_key_of_the_whole_model(tmp_path: Path) -> None:
    source = str(write_checkpoint(tmp_path / "source", "gemma3"))
    model = build_model(source, init="random", changes={"tie_word_embeddings": False})
    assert not is_tied(model) and model.lm_head.weight is not model.get_input_embeddings().weight


def change(source: Path, function: Callable[[dict[str, Any]], object]) -> Path:
    """Change the config.json of a folder; return the folder."""
    values = json.loads((source / "config.json").read_text())
    function(values)
    (source / "config.json").write_text(json.dumps(values))
    return source


def test_a_head_in_the_files_is_untied_where_the_config_does_not_say(tmp_path: Path) -> None:
    """As Mistral Small 3.1 has it, whose class ties unless its config says otherwise."""
    source = write_checkpoint(tmp_path / "source", "mistral3")
    change(source, lambda values: values.pop("tie_word_embeddings"))
    for changes in ({}, {"tie_word_embeddings": False}):
        check_model(str(source), init="pretrained", max_seq_len=64, changes=changes)
    model = build_model(str(source))
    assert not is_tied(model)
    head = build_model(str(source), layers=range(1, 2)).lm_head.weight
    assert torch.equal(head, tensors(source)["language_model.lm_head.weight"])
    assert torch.equal(logits(model), logits(open_whole(source, torch.float32)))
    exported = export_model(changed(model), None, tmp_path / "export", dtype=torch.float32)
    assert_carried(source, exported)
    assert torch.equal(logits(open_whole(exported, torch.float32)), logits(model))


def test_a_head_of_a_hub_id_is_looked_for_in_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "models--own--one"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    source = write_checkpoint(home / "snapshots" / ("0" * 40), "mistral3")
    change(source, lambda values: values.pop("tie_word_embeddings"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not is_tied(build_model("own/one"))


def test_files_of_processors_are_those_of_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source", "gemma3")
    model = build_model(str(source))
    assert "preprocessor_config.json" not in capsys.readouterr().out
    with patch("furlong.models.build._PROCESSORS", ()):  # a hub that is not there any more
        export = export_model(model, None, tmp_path / "export", dtype=torch.float32)
    assert (export / "preprocessor_config.json").exists()
    (source / "preprocessor_config.json").unlink()
    build_model(str(source))
    assert "preprocessor_config.json" in capsys.readouterr().out
    build_model(str(source), is_empty=True)
    check_model(str(source), max_seq_len=8, init="pretrained")
    assert not capsys.readouterr().out
    check_model(str(source), max_seq_len=8, init="random")
    assert str(source) in capsys.readouterr().out


def test_an_official_config_of_qwen3_vl_is_copied_and_its_rope_is_written_for_older_releases(
    tmp_path: Path,
) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3_vl")
    scaling = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"}

    def as_published(values: dict[str, Any]) -> None:
        values.pop("dtype")
        text = values["text_config"]
        theta = text.pop("rope_parameters")["rope_theta"]
        text |= {"dtype": "float32", "rope_theta": theta, "rope_scaling": scaling}

    change(source, as_published)
    model = build_model(str(source))
    assert_carried(source, export_model(model, None, tmp_path / "export", dtype=torch.float32))
    rounded = export_model(model, None, tmp_path / "rounded", dtype=torch.bfloat16)
    written = json.loads((rounded / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["text_config"]["rope_scaling"] == scaling


def test_adapters_go_on_without_the_modules_that_they_exclude(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "gemma3")
    first = export_model(
        build_model(str(source), lora=LORA), None, tmp_path / "first", dtype=torch.float32
    )
    file = first / "adapter_config.json"
    values = json.loads(file.read_text())
    own = values["exclude_modules"]
    for excluded, wanted in ((own, own), (["k_proj"], rf"(.*\.)?k_proj|{own}")):
        file.write_text(json.dumps(values | {"exclude_modules": excluded}))
        with patch("furlong.models.build.load_adapter"):
            model = build_model(str(source), lora=LORA | {"adapter": str(first)})
        assert model.peft_config["default"].exclude_modules == wanted
        has_keys = any("k_proj.lora_A" in name for name, _ in model.named_parameters())
        assert has_keys == (excluded == own)


def test_adapters_over_a_changed_config_name_the_class_of_the_whole_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3_5")
    model = build_model(str(source), lora=LORA)
    folder = tmp_path / "adapters"
    export_model(model, None, folder, dtype=torch.float32, has_other_config=True)
    assert "AutoModelForImageTextToText.from_pretrained" in (folder / "README.md").read_text()


def changed(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.1 * torch.randn_like(parameter)
                ) if "lora" in name else parameter.mul_(1.5)
    return model


def assert_carried(source: Path, export: Path, *, only: str = "") -> None:
    """All tensors have their names, those beside the text their bytes; other files are there."""
    before, after = tensors(source), tensors(export)
    assert after.keys() == before.keys()
    text = ("language_model", "lm_head", *[only] * bool(only))
    beside = [name for name in before if not any(part in name for part in text)]
    assert len(beside) > 5
    for name in beside:
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name])
    for name in ("config.json", "preprocessor_config.json"):
        assert (export / name).read_bytes() == (source / name).read_bytes()


def test_an_export_is_the_checkpoint_with_other_text_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = changed(build_model(str(checkpoint)))
    export = export_model(model, None, tmp_path / "export", dtype=torch.float32)
    assert_carried(checkpoint, export)
    whole = open_whole(export, torch.float32)
    for name, weight in model.named_parameters():
        assert torch.equal(whole.get_parameter(name), weight), name
    assert torch.equal(logits(whole), logits(model))
    assert not torch.equal(logits(whole), logits(open_whole(checkpoint, torch.float32)))


def test_adapters_load_on_the_checkpoint_and_merge_into_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = changed(build_model(str(checkpoint), lora=LORA))
    adapters = export_model(model, None, tmp_path / "adapters", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(open_whole(checkpoint, torch.float32), adapters)
    adapted = {name for name, _ in loaded.named_parameters() if "lora" in name}
    assert adapted == {name for name, _ in model.named_parameters() if "lora" in name}
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    expected = logits(model)
    merged = export_model(merge_adapters(model), None, tmp_path / "merged", dtype=torch.float32)
    assert_carried(checkpoint, merged)
    torch.testing.assert_close(
        logits(open_whole(merged, torch.float32)), expected, rtol=1e-4, atol=1e-4
    )


def test_adapters_over_four_bits_merge_into_the_checkpoint(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3_vl")
    packed = changed(build_model(str(source), quantize="nf4", lora=LORA))
    assert all(".language_model." in name for name in packed_linears(packed))
    adapters = {n: p for n, p in packed.named_parameters() if p.requires_grad}
    model = build_model(str(source), quantize="nf4", lora=LORA, unpacked=True)
    model.load_state_dict(adapters, strict=False)
    expected = logits(model)
    merged = export_model(merge_adapters(model), None, tmp_path / "merged", dtype=torch.float32)
    assert_carried(source, merged)
    torch.testing.assert_close(
        logits(open_whole(merged, torch.float32)), expected, rtol=1e-4, atol=1e-4
    )


def test_a_changed_config_is_written_for_older_releases_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "mistral3")
    rope = {"rope_type": "yarn", "factor": 4.0}
    model = build_model(str(source), rope=rope, max_seq_len=512)
    export = export_model(model, None, tmp_path / "export", dtype=torch.bfloat16)
    written = json.loads((export / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["text_config"]["rope_scaling"]["factor"] == 4.0
    assert "rope_theta" in written["text_config"] and "rope_scaling" not in written
    before, after = tensors(source), tensors(export)
    assert {x.dtype for n, x in after.items() if n.startswith("language_model")} == {torch.bfloat16}
    assert torch.equal(
        before["vision_tower.patch_conv.weight"], after["vision_tower.patch_conv.weight"]
    )
    assert open_whole(export).config.text_config.rope_parameters["factor"] == 4.0
