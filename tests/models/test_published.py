"""Checkpoints that are published in MXFP4 and FP8 train as the bfloat16 ones that they mean."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_families import twin_of
from helpers.published import fp8, mxfp4, publish
from helpers.tiny_families import config_of
from helpers.vision_checkpoints import open_whole, tensors, write_checkpoint
from peft import PeftModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Mxfp4Config,
)

import furlong
from furlong.errors import ConfigError
from furlong.models.build import build_model, check_model, export_model, merge_adapters
from furlong.testing import take_grads

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
IDS = torch.arange(3, 43)
BLOCKS = {"blocks": (16, 16), "experts": (16, 24)}
"""Sizes of blocks: whole ones; and ones of which the last lack rows or columns, as in DeepSeek-V3's
files, of which transformers raises, or takes them for smaller ones."""
KINDS = ["mxfp4", "blocks", "experts", "static"]


def is_linear(name: str) -> bool:
    """Whether a text decoder's linear layer has the weight, as FP8 checkpoints quantize them."""
    is_beside = any(part in name for part in ("vision", "projector"))
    return name.endswith(("proj.weight", "with_mqa.weight")) and not is_beside


def published(folder: Path, kind: str) -> Path:
    """Write a checkpoint of the kind, packed and in floats; return the folder of both."""
    source, sizes = folder / "source", {"tie_word_embeddings": False}
    if kind == "static":
        write_checkpoint(source, "mistral3")
        asked = FineGrainedFP8Config(weight_block_size=None, activation_scheme="static")
        return publish(source, folder, partial(fp8, block=None), is_linear, asked.to_dict())
    if kind == "experts":
        twin_of("deepseek_v3").config.save_pretrained(folder / "config")
    else:
        family = {"mxfp4": "gpt_oss", "blocks": "qwen3"}[kind]
        sizes |= {"hidden_size": 64, "intermediate_size": 64} if kind == "mxfp4" else {}
        config_of(family, **sizes).save_pretrained(folder / "config")
    with torch.random.fork_rng(devices=[]):
        model = build_model(str(folder / "config"), init="random", dtype=torch.float32)
    export_model(model, None, source, dtype=torch.float32)
    if kind == "mxfp4":
        asked = Mxfp4Config(modules_to_not_convert=["lm_head"]).to_dict()
        packs = lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj"))  # noqa: E731
        return publish(source, folder, mxfp4, packs, asked)
    block = BLOCKS[kind]
    asked = FineGrainedFP8Config(weight_block_size=block)
    return publish(source, folder, partial(fp8, block=block), is_linear, asked.to_dict())


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    folder = published(tmp_path, request.param)
    return str(folder / "packed"), str(folder / "floats")


def trained(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    batch = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS[:7], "labels": IDS[:7]}]
    result = furlong.forward_backward(model, batch, furlong.ChunkOptions(size=16))
    return result.loss, take_grads(model)


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_gradients_are_those_of_the_floats_to_the_bit(
    both: tuple[str, str], lora: dict[str, Any] | None
) -> None:
    check_model(both[0], init="pretrained", max_seq_len=64, has_adapters=lora is not None)
    dtype = torch.float32 if lora is None else torch.bfloat16
    models = [build_model(source, dtype=dtype, lora=lora) for source in both]
    parameters = [dict(model.named_parameters()) for model in models]
    assert parameters[0].keys() == parameters[1].keys()
    for name, weight in parameters[0].items():
        other = parameters[1][name]
        assert weight.dtype == other.dtype and torch.equal(weight, other), name
    (loss, grads), (other_loss, others) = map(trained, models)
    assert loss == other_loss
    assert grads.keys() == others.keys() and grads
    assert all(torch.equal(grads[name], others[name]) for name in grads)


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    """FP8 where blocks are whole, which transformers asks for, and a scale for a weight; MXFP4."""
    for kind in ("mxfp4", "static", "blocks"):
        folder = published(tmp_path / kind, kind)
        opened = open_whole if kind == "static" else AutoModelForCausalLM.from_pretrained
        whole = opened(folder / "packed", dtype=torch.bfloat16)
        model = build_model(str(folder / "packed"), dtype=torch.bfloat16, lora=LORA)
        for name, weight in model.get_base_model().named_parameters():
            if "lora_" not in name:
                assert torch.equal(weight, whole.get_parameter(name.replace(".base_layer", "")))


def test_new_rows_join_the_floats(tmp_path: Path) -> None:
    """Also in a model without values, as an export is made of."""
    folder = published(tmp_path, "blocks")
    sources = [str(folder / name) for name in ("packed", "floats")]
    num_rows = build_model(sources[1]).get_input_embeddings().weight.shape[0]
    new = range(num_rows, num_rows + 2)
    first, other = (build_model(source, new_rows=new).state_dict() for source in sources)
    assert all(torch.equal(first[name], other[name]) for name in other)
    empty = build_model(sources[0], new_rows=new, is_empty=True)
    export_model(empty, None, tmp_path / "export", dtype=torch.bfloat16, weights=first)
    assert tensors(tmp_path / "export")["model.embed_tokens.weight"].shape[0] == new.stop


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS[None]).logits


def opened(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    has_images = "vision_config" in json.loads((Path(folder) / "config.json").read_text())
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype)


def test_exports_are_not_quantized(
    both: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for number, source in enumerate(both):
        model = build_model(source)
        told.append(capsys.readouterr().out)
        assert all(one.is_meta for one in build_model(source, is_empty=True).parameters())
        assert "exports" not in capsys.readouterr().out
        export_model(model, None, tmp_path / f"export-{number}", dtype=torch.bfloat16)
    assert ("not quantized" in told[0], "not quantized" in told[1]) == (True, False)
    first, other = (tensors(tmp_path / f"export-{number}") for number in range(2))
    assert first.keys() == other.keys() == tensors(Path(both[1])).keys()
    assert all(torch.equal(first[name], other[name]) for name in first)
    config = json.loads((tmp_path / "export-0" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    model = build_model(both[0], is_empty=True)  # as a run is exported later
    weights = {name: x.bfloat16() for name, x in build_model(both[0]).state_dict().items()}
    export_model(model, None, tmp_path / "later", dtype=torch.bfloat16, weights=weights)
    assert tensors(tmp_path / "later").keys() == first.keys()
    ids = opened(tmp_path / "later"), opened(both[1])
    assert torch.equal(logits(ids[0]), logits(ids[1]))


def test_adapters_load_with_peft_on_the_quantized_checkpoint_and_merge(
    both: tuple[str, str], tmp_path: Path
) -> None:
    model = build_model(both[0], lora=LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    folder = export_model(
        model, None, tmp_path / "adapters", dtype=torch.float32, has_other_config=True
    )
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == both[0]
    # of a changed config, too: without it codes would be read as weights
    assert "quantization_config" in json.loads((folder / "base" / "config.json").read_text())
    expected = logits(model)
    base = opened(both["deepseek" in type(model.get_base_model()).__module__], torch.bfloat16)
    loaded = PeftModel.from_pretrained(base.float(), folder)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    merged = export_model(merge_adapters(model), None, tmp_path / "merged", dtype=torch.float32)
    assert tensors(merged).keys() == tensors(Path(both[1])).keys()
    torch.testing.assert_close(logits(opened(merged)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mxfp4", "experts"])
def test_a_stage_reads_its_layers_alone(kind: str, tmp_path: Path) -> None:
    folder = published(tmp_path, kind)
    whole = build_model(str(folder / "floats"), dtype=torch.bfloat16)
    seen = set()
    for layers in (range(1), range(1, whole.config.num_hidden_layers)):
        for name, weight in build_model(str(folder / "packed"), layers=layers).named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)), name
            seen.add(name)
    assert seen == dict(whole.named_parameters()).keys()


def test_four_bits_over_them_are_those_over_the_floats(tmp_path: Path) -> None:
    folder = published(tmp_path, "blocks")
    ours, others = (
        build_model(str(folder / kind), quantize="nf4", lora=LORA).state_dict()
        for kind in ("packed", "floats")
    )
    assert ours.keys() == others.keys() and any(x.dtype == torch.uint8 for x in ours.values())
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_what_would_be_read_wrongly_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "one", "blocks")
    file = folder / "packed" / "model.safetensors"
    held = tensors(folder / "packed")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for scales, told in ((held[name][1:], "scales of shape"), (None, "without")):
        save_file({n: x for n, x in (held | {name: scales}).items() if x is not None}, file)
        with pytest.raises(ConfigError, match=told):
            build_model(str(folder / "packed"))
    write_checkpoint(tmp_path / "source", "mistral3")
    asked = FineGrainedFP8Config(weight_block_size=None, activation_scheme="static").to_dict()
    packs = lambda name: name.endswith("q_proj.weight")  # noqa: E731
    folder = publish(tmp_path / "source", tmp_path / "two", partial(fp8, block=None), packs, asked)
    with pytest.raises(ConfigError, match="vision_tower"):
        build_model(str(folder / "packed"))
