"""Rows of new tokens in embedding and head: how they begin, and their exact gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_families import config_of
from helpers.vision_checkpoints import write_checkpoint
from peft import PeftModel

import furlong
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.models.build import build_model, export_model, merge_adapters, read_config
from furlong.models.new_tokens import require_one_place
from furlong.testing import reference_loss, take_grads, worst_error
from furlong.verify import Float64

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
SAVED = LORA | {"modules_to_save": ["embed_tokens"]}
NUM_KNOWN, NEW = 90, range(90, 101)


def source_of(folder: Path, family: str, **changes: Any) -> str:
    """Write a checkpoint with 96 rows, of which the tokens have 90."""
    if family in ("qwen3_vl", "mistral3"):
        return str(write_checkpoint(folder / "source", family, max_shard_size="20KB"))
    config_of(family, vocab_size=96, **changes).save_pretrained(folder / "config")
    model = build_model(str(folder / "config"), init="random")
    return str(export_model(model, None, folder / "source", dtype=torch.float32))


def batch() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, NEW.stop, (n,), generator=generator) for n in (21, 9, 4)]
    return [{"input_ids": one, "labels": one} for one in ids]


CASES = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "scaled": ("gemma2", {"tie_word_embeddings": True}),
    "vision": ("qwen3_vl", {}),
    "vision, untied": ("mistral3", {}),
}


@pytest.mark.parametrize("lora", [None, LORA, SAVED], ids=["whole", "adapters", "saved"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_mean_and_their_gradients_exact(
    tmp_path: Path, case: str, lora: dict[str, Any] | None
) -> None:
    family, changes = CASES[case]
    source = source_of(tmp_path, family, **changes)
    with Float64():
        _check_rows(source, lora, is_tied="untied" not in case)


def test_a_tied_head_that_is_trained_whole_is_the_embedding_too(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen3", tie_word_embeddings=True)
    with Float64():
        _check_rows(source, LORA | {"modules_to_save": ["lm_head"]}, is_tied=True)


def _check_rows(source: str, lora: dict[str, Any] | None, *, is_tied: bool) -> None:
    known = build_model(source, dtype=torch.float64).get_input_embeddings().weight.detach()
    model = build_model(source, dtype=torch.float64, lora=lora, new_rows=NEW)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert end.weight.shape[0] == NEW.stop
    rows = model.get_input_embeddings().weight.detach()
    assert torch.equal(rows[:NUM_KNOWN], known[:NUM_KNOWN])
    mean = known[:NUM_KNOWN].mean(0).float().double()  # as the file's dtype has it
    torch.testing.assert_close(rows[NUM_KNOWN:], mean.expand(len(NEW), -1), rtol=1e-6, atol=1e-8)
    truth_loss, truth = reference_loss(model, batch()), take_grads(model)
    result = furlong.forward_backward(model, batch(), furlong.ChunkOptions(size=5))
    given = take_grads(model)
    assert result.loss == pytest.approx(truth_loss, rel=1e-12)
    assert worst_error(given, truth)[0] < 1e-12
    if lora is LORA:
        assert sum("trainable_tokens_delta" in name for name in given) == 2 - is_tied


@pytest.mark.parametrize("lora", [LORA, SAVED], ids=["adapters", "saved"])
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_the_rows_on_a_resized_base(
    tmp_path: Path, case: str, lora: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    family, changes = CASES[case]
    source = source_of(tmp_path, family, **changes)
    model = build_model(source, lora=lora, new_rows=NEW)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    export_model(model, None, tmp_path / "adapter", dtype=torch.float32)
    told = f"resize_token_embeddings({NEW.stop})"
    assert told in capsys.readouterr().out
    assert told in (tmp_path / "adapter" / "README.md").read_text()
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert lora is SAVED or size < 100_000
    base = build_model(source)
    base.resize_token_embeddings(NEW.stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(80, NEW.stop)[None]
    with torch.no_grad():
        truth = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(adapted.eval()(input_ids=ids).logits, truth)
        merged = merge_adapters(model)
        torch.testing.assert_close(merged(input_ids=ids).logits, truth, rtol=1e-4, atol=1e-5)
    export_model(merged, None, tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        again = build_model(str(tmp_path / "merged")).eval()(input_ids=ids).logits
    torch.testing.assert_close(again, truth, rtol=1e-4, atol=1e-5)


def test_stages_and_spare_rows(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", tie_word_embeddings=False)
    whole = build_model(source, new_rows=NEW)
    number = whole.config.num_hidden_layers
    for layers in (range(1), range(1, number)):
        for name, weight in build_model(source, layers=layers, new_rows=NEW).named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)), name
    spare = build_model(source, new_rows=range(90, 93)).get_input_embeddings().weight
    assert spare.shape[0] == 96
    torch.testing.assert_close(spare[90:93], whole.get_input_embeddings().weight[90:93])
    assert torch.equal(spare[93:], build_model(source).get_input_embeddings().weight[93:])


def test_what_has_no_new_rows(tmp_path: Path) -> None:
    config_of("phi").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="bias"):
        build_model(str(tmp_path), init="random", lora=LORA, new_rows=NEW)
    ends = LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}
    build_model(str(tmp_path), init="random", lora=ends, new_rows=NEW)
    write_checkpoint(tmp_path / "gemma4", "gemma4")
    with pytest.raises(UnsupportedModelError, match="layers"):
        read_config(str(tmp_path / "gemma4"), new_rows=NEW)
    for divides, layers in ((True, None), (False, range(1))):
        with pytest.raises(ConfigError, match="adapters"):
            require_one_place(("norm", "lm_head"), divides=divides, layers=layers)
        require_one_place(("model.embed_tokens", "lm_head"), divides=divides, layers=layers)
