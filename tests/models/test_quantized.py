"""Weights in 4 bits under adapters: gradients are those of the weights that the codes stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import batch
from helpers.covering import Design
from helpers.tiny_families import config_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import furlong
from furlong.config.schema import ModelConfig
from furlong.cost.memory import PARTS, PlanMemory
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.models import quantized
from furlong.models.build import build_model, check_model, export_model, merge_adapters
from furlong.models.describe import describe
from furlong.models.quantized import library, packed_linears, scales_of
from furlong.planners.orders import plan_on_device
from furlong.planners.setup import training_of
from furlong.testing import reference_loss, take_grads, total_relative_error
from furlong.train.checkpoints import base_fingerprint

bitsandbytes = library("the tests")
LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
REPACKS = bitsandbytes.functional.has_avx512bf16()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases. Its rows are blocks of 64: others cannot be repacked."""
    path = tmp_path_factory.mktemp("base")
    config_of("qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained(
        path / "config"
    )
    model = build_model(str(path / "config"), init="random")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return export_model(model, None, path / "model", dtype=torch.float32)


def built(folder: Path, *, quantize: Any = "nf4", **others: Any) -> Any:
    """A model under adapters that do something."""
    model = build_model(str(folder), **({"lora": LORA, "quantize": quantize} | others))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model


ASKED = {"nf4": "nf4", "fp4": "fp4", "single": {"type": "nf4", "double": False}}
DIALS = Design(
    {
        "quantize": list(ASKED),
        "keep": ["attention", "input", "kv", "all"],
        "order": ["chunk-first", "layer-first"],
        "num_retained": [1, 0],
        "size": [5, 64],
    }
)


def test_gradients_are_those_of_the_dequantized_weights_cut_and_packed(folder: Path) -> None:
    sequences = batch([13, 4, 9])
    truths: dict[str, Any] = {}
    for row in DIALS.array(2):
        options = {name: row[name] for name in ("keep", "order", "num_retained", "size")}
        if (key := row["quantize"]) not in truths:
            asked = ASKED[key]
            whole = built(folder, quantize=asked, unpacked=True).double()
            assert packed_linears(whole) == {}
            loss = reference_loss(whole, sequences)
            model = built(folder, quantize=asked)
            assert len(packed_linears(model)) == 7 * 2
            truths[key] = loss, take_grads(whole), model, furlong.Engine(model)
        loss, truth, model, engine = truths[key]
        with torch.no_grad():  # an evaluation, which must change nothing of what follows
            model.eval()
            engine.forward_backward(sequences, furlong.ChunkOptions(**options), backward=False)
            model(input_ids=sequences[0]["input_ids"][None])
            model.train()
        found = engine.forward_backward(sequences, furlong.ChunkOptions(**options))
        assert found.loss == pytest.approx(loss, rel=1e-6), row
        assert total_relative_error(take_grads(model), truth) <= 1e-6, row


def test_what_would_repack_the_weights_is_off(folder: Path) -> None:
    model = built(folder)
    assert not any(one.support_avx512bf16_for_cpu for one in packed_linears(model).values())


def test_scales_are_in_the_checksum(folder: Path) -> None:
    model = built(folder)
    before = base_fingerprint(model)
    next(iter(packed_linears(model).values())).weight.quant_state.offset += 1
    assert base_fingerprint(model) != before


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_a_model_that_is_in_4_bits_already_is_the_same_model(
    folder: Path, tmp_path: Path, storage: torch.dtype
) -> None:
    asked = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=asked, device_map={"": "cpu"}, dtype=torch.float32
    )
    loaded.save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    model = built(tmp_path, quantize=None)
    assert torch.equal(model(ids).logits, built(folder)(ids).logits)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.uint8}
    whole = merge_adapters(built(tmp_path, quantize=None, unpacked=True))
    written = export_model(whole, None, tmp_path / "merged", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(written)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"without model\.lora"):
        build_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"with model\.quantize"):
        built(tmp_path)
    assert not packed_linears(build_model(str(tmp_path), init="random"))


def test_weights_the_other_way_round_are_refused(tmp_path: Path) -> None:
    config_of("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Conv1D"):
        check_model(str(tmp_path), quantize="nf4", has_adapters=True, max_seq_len=32)


def test_a_linear_layer_without_its_gradient_is_refused(folder: Path) -> None:
    sequences = batch([21])
    model = built(folder)
    linear = packed_linears(model)["base_model.model.model.layers.1.mlp.up_proj.base_layer"]
    own = linear.forward
    linear.forward = lambda x: own(x.detach()) + 0 * x.sum()
    with pytest.raises(UnsupportedModelError, match=r"gradients at [\w.]*layers\.1\.mlp\.up_proj"):
        furlong.forward_backward(model, sequences)
    if REPACKS:
        model = built(folder)
        for linear in packed_linears(model).values():
            linear.support_avx512bf16_for_cpu = True
        with torch.no_grad():
            model.eval()(sequences[0]["input_ids"][None])
        with pytest.raises(UnsupportedModelError, match="was repacked by an evaluation"):
            furlong.forward_backward(model.train(), sequences)


def test_the_package_that_gets_code_from_a_hub_is_not_there_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setitem(sys.modules, "kernels", sys)
    monkeypatch.setattr(
        quantized, "import_module", lambda name: seen.append((name, sys.modules["kernels"]))
    )
    with pytest.raises(KeyError):
        library("train.optimizer")
    assert seen == [("bitsandbytes", None)] and sys.modules["kernels"] is sys
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"from: +train\.optimizer"):
        library("train.optimizer")


@pytest.mark.parametrize(
    ("quantize", "saved"), [("nf4", []), ("single", ["embed_tokens"]), ("nf4", ["lm_head"])]
)
def test_bytes_of_weights_are_those_that_are_predicted(
    tmp_path: Path, quantize: str, saved: list[str]
) -> None:
    config = config_of(
        "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=1, vocab_size=1000,
        tie_word_embeddings=saved == ["embed_tokens"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "config")
    base = build_model(str(tmp_path / "config"), init="random", dtype=torch.bfloat16)
    folder = export_model(base, None, tmp_path / "model", dtype=torch.bfloat16)
    asked = ModelConfig(
        name=str(folder), quantize=ASKED[quantize], lora={"modules_to_save": saved, "rank": 8}
    )
    model = build_model(
        asked.name, dtype=torch.bfloat16, quantize=asked.quantize, lora=asked.lora.model_dump()
    )
    held = sum(p.nbytes + sum(x.nbytes for x in scales_of(p)) for p in model.parameters())
    held += sum(2 * p.numel() for p in model.parameters() if p.requires_grad)  # in a step
    given = training_of(asked).weights(describe(config), (1,), frozenset((0,))).state
    assert given.weights == pytest.approx(held, rel=0.02)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert given.gradients == 4 * trained
    plan, peaks = plan_on_device([64], furlong.ChunkOptions(size=64), num_layers=1), []
    for rules in (training_of(asked), training_of(asked.model_copy(update={"quantize": None}))):
        curve = PlanMemory(describe(config), rules, 0).curve(plan, 0)
        peaks.append(int(curve.device[0, PARTS.index("buffers")]))  # of its forward
    assert peaks[0] - peaks[1] == 2 * 512 * 1024  # the largest weight, while it is multiplied with
