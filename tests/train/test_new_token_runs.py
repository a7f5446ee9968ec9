"""Runs with new tokens, through the command line: rows that are added, trained and exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TEXTS, TinyRun, run_command, signal_after
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main
from furlong.config.adapter import ADAPTER_WEIGHTS

TOKENS = ("<tool>", "</tool>")
NEW = f"--model.new_tokens=[{', '.join(TOKENS)}]"
IDS = torch.arange(3, 20)[None]


def without_spare_rows(run: TinyRun, folder: Path, *, is_tied: bool) -> TinyRun:
    """Return a copy of the tiny run whose model has a row for each token alone."""
    shutil.copytree(run.folder / "model", folder / "model")
    shutil.copytree(run.folder / "texts", folder / "texts")
    config = AutoConfig.from_pretrained(folder / "model")
    config.vocab_size = len(AutoTokenizer.from_pretrained(folder / "model"))
    config.tie_word_embeddings = is_tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return replace(run, folder=folder)


def write_texts(folder: Path) -> None:
    lines = [json.dumps({"text": f"{one} <tool> word3 </tool>"}) for one in TEXTS]
    (folder / "new.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(params=["spare", "tied", "untied"])
def run(request: pytest.FixtureRequest, tiny_run: TinyRun, tmp_path: Path) -> TinyRun:
    """The tiny run on texts with the new tokens; of a model with spare rows, or none."""
    write_texts(tmp_path)
    if request.param == "spare":
        return tiny_run
    return without_spare_rows(tiny_run, tmp_path, is_tied=request.param == "tied")


def trained(run: TinyRun, out: Path, *flags: str) -> Path:
    data = f"--data.train={out.parent / 'new.jsonl'}"
    assert main(run.arguments(out, data, NEW, "--train.epochs=1", *flags)) == 0
    return out / "model"


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(ids).logits
    return found


@pytest.mark.slow
def test_a_whole_model_has_the_rows(run: TinyRun, tmp_path: Path) -> None:
    source = run.folder / "model"
    size = AutoConfig.from_pretrained(source).vocab_size
    first = len(AutoTokenizer.from_pretrained(source))
    folder = trained(run, tmp_path / "run", "--train.lr=1e-30")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == [first, first + 1]
    assert tokenizer("word1<tool>")["input_ids"][-1] == first
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.vocab_size == max(size, first + 2)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for new, old in zip(
        (model.get_input_embeddings().weight, model.get_output_embeddings().weight),
        (before.get_input_embeddings().weight, before.get_output_embeddings().weight), strict=True,
    ):  # fmt: skip
        assert torch.equal(new[:first], old[:first])
        torch.testing.assert_close(new[first : first + 2], old[:first].mean(0).expand(2, -1))


@pytest.mark.slow
def test_adapters_train_the_rows_and_merge(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model.lora.rank=4", "--train.save_every_steps=1")
    folder = trained(run, tmp_path / "run", *flags)
    with signal_after(1):
        trained(run, tmp_path / "on", *flags)
    trained(run, tmp_path / "on", *flags, "--resume")
    on, whole = (load_file(tmp_path / one / "model" / ADAPTER_WEIGHTS) for one in ("on", "run"))
    assert on.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(on[name], weight, msg=name)
    settings = json.loads((folder / "adapter_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = tokenizer.convert_tokens_to_ids(TOKENS[0])
    assert all(rows == [first, first + 1] for rows in settings["trainable_token_indices"].values())
    deltas = [x for n, x in load_file(folder / ADAPTER_WEIGHTS).items() if "delta" in n]
    assert deltas and all(x.shape[0] == 2 for x in deltas)
    base = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    base.resize_token_embeddings(max(base.config.vocab_size, len(tokenizer)))
    adapted = PeftModel.from_pretrained(base, folder)
    ids = torch.cat([IDS, torch.tensor([[first, first + 1, 5]])], 1)
    assert main(["export", str(tmp_path / "run"), "--merge", "--out", str(tmp_path / "all")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "all", dtype=torch.float32)
    torch.testing.assert_close(logits(merged, ids), logits(adapted, ids), rtol=1e-5, atol=1e-5)
    assert merged.config.vocab_size == base.config.vocab_size
    # a run that goes on from the adapter begins with its rows
    goes_on = trained(run, tmp_path / "more", f"--model.lora.adapter={folder}", "--train.lr=1e-12")
    for name, weight in load_file(goes_on / ADAPTER_WEIGHTS).items():
        torch.testing.assert_close(weight, whole[name], msg=name)
    data, adapter = f"--data.train={tmp_path / 'new.jsonl'}", f"--model.lora.adapter={folder}"
    assert main(run.arguments(tmp_path / "no", data, adapter, "--train.epochs=1")) == 2
    assert "model.new_tokens" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "pp"])
def test_two_processes_read_and_train_the_rows(
    tiny_run: TinyRun, tmp_path: Path, layout: str
) -> None:
    run = without_spare_rows(tiny_run, tmp_path, is_tied=layout == "pp")
    write_texts(tmp_path)
    flags = ("--train.sequences_per_step=4", "--chunks.keep=kv", "--chunks.num_retained=1")
    truth = load_file(trained(run, tmp_path / "alone", *flags) / "model.safetensors")
    data = f"--data.train={tmp_path / 'new.jsonl'}"
    arguments = run.arguments(
        tmp_path / "two", data, NEW, "--train.epochs=1", *flags, f"--parallel.{layout}=2"
    )
    ended = Launched(tmp_path / "said", run_command, arguments).ended(300)
    assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
    ours = load_file(tmp_path / "two" / "model" / "model.safetensors")
    assert ours.keys() == truth.keys()
    for name, weight in truth.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    lora = (*arguments, "--model.lora.rank=4", f"--out={tmp_path / 'refused'}")
    ended = Launched(tmp_path / "again", run_command, lora).ended(300)
    assert [one.code for one in ended] == [2, 2] and "modules_to_save" in ended[0].said
