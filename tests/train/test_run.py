"""A whole run through the command, from text files to a model that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TEXTS, TinyRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli.main import main
from furlong.config.sources import load_run


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def test_a_run_leaves_a_model_and_its_figures(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, held_out = tmp_path / "run", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"
    assert (
        main(tiny_run.arguments(run, held_out, "--chunks.size=32", "--chunks.num_retained=1")) == 0
    )
    report = read_json(run / "report.json")
    assert report["num_steps"] == 9
    assert report["eval_loss_after"] < report["eval_loss_before"]
    options = read_json(run / "options.json")
    assert (options["size"], options["num_retained"], options["keep"]) == (32, 1, "all")
    assert load_run(run / "config.json").train.lr == 1e-2

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 4, 8, 9]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 10))
    assert all(r["tokens_per_s"] > 0 and r["peak_memory_bytes"] > 0 for r in steps)
    assert all(r["forward_s"] > 0 and r["backward_s"] > 0 for r in steps)
    printed = capsys.readouterr().out
    assert "chunks: size 32, num_retained 1, keep all (auto)" in printed
    assert "auto: size 32, num_retained 1, keep all: the fastest that fits" in printed, printed
    assert printed.count("\nstep ") == 9

    model = AutoModelForCausalLM.from_pretrained(report["export_folder"])
    tokenizer = AutoTokenizer.from_pretrained(report["export_folder"])
    ids = torch.tensor([[*tokenizer(TEXTS[3][10:])["input_ids"], tokenizer.eos_token_id]])
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(report["eval_loss_after"], rel=1e-4)


def test_sequences_longer_than_those_of_training_are_evaluated_for_themselves(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """They are no part of the held-out loss, which training goes by."""
    run, texts = tmp_path / "run", tiny_run.folder / "texts"
    flags = ("--data.max_seq_len=32", "--data.too_long=truncate", "--train.epochs=1")
    longer = f"--data.eval=[{{path: {texts}, max_seq_len: 64}}]"
    assert main(tiny_run.arguments(run, *flags, longer, "--train.early_stopping=2")) == 2
    both = f"--data.eval=[{texts}, {{path: {texts}, max_seq_len: 64}}]"
    positions = "--model.config={max_position_embeddings: 32}"
    assert main(tiny_run.arguments(run, *flags, both, positions)) == 0
    assert read_json(run / "model" / "config.json")["max_position_embeddings"] == 32
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if "eval_64_loss" in record]
    assert [record["step"] for record in evaluated] == [0, 3]
    beyond = evaluated[1]["eval_64_beyond"]
    assert beyond["trained_tokens"] == 32
    assert [each["start"] for each in beyond["spans"]] == list(range(0, 64, 8))
    assert "eval_beyond" not in evaluated[1] and (run / "beyond-64.png").stat().st_size > 1000
    report = read_json(run / "report.json")
    assert report["eval_loss_after"] == evaluated[1]["eval_loss"] != evaluated[1]["eval_64_loss"]


def test_an_epoch_is_one_pass_though_batches_are_skipped(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The model's weights are random, as the run file says."""
    data = tmp_path / "data.jsonl"
    records = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 5 + [{"input_ids": [1, 2, 3]}]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    flags = (f"--data.train={data}", "--train.sequences_per_step=1", "--train.epochs=2")
    assert main(tiny_run.arguments(tmp_path / "run", *flags, "--model.init=random")) == 0
    assert read_json(tmp_path / "run" / "report.json")["num_steps"] == 2


@pytest.mark.parametrize(
    ("flag", "part"),
    [("--data.max_seq_len=20", "a sequence of"), ("--model.name={bare}", "required: weights")],
)
def test_a_wrong_input_ends_with_2_and_leaves_no_folder(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, part: str
) -> None:
    bare = shutil.copytree(tiny_run.folder / "model", tmp_path / "model")
    (bare / "model.safetensors").unlink()
    assert main(tiny_run.arguments(tmp_path / "run", flag.format(bare=bare))) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
