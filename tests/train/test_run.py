"""A whole run through the command, from text files to a model that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from furlong.cli.main import main
from furlong.config.sources import load_run

TEXTS = [" ".join(f"word{(i * j) % 17}" for j in range(1, 5 + 9 * i)) for i in range(1, 9)]

TRAINER = trainers.BpeTrainer(special_tokens=["<end>"], vocab_size=300, show_progress=False)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A command line that trains; its last run folder is `tmp_path / "run"`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(special_tokens=["<end>"], vocab_size=300)
    )
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    ).save_pretrained(folder)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"text": TEXTS[3][10:]}) + "\n")
    return [
        "train",
        f"--model.name={folder}",
        "--model.init=random",
        "--model.dtype=float32",
        f"--data.train={tmp_path / 'texts'}",
        f"--data.eval={tmp_path / 'held-out.jsonl'}",
        "--data.max_seq_len=256",
        "--chunks.size=32",
        "--chunks.num_retained=1",
        "--train.epochs=3",
        "--train.sequences_per_step=3",
        "--train.lr=1e-2",
        "--train.eval_every_steps=4",
        f"--out={tmp_path / 'run'}",
    ]


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def test_a_run_leaves_a_model_and_its_figures(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    run = tmp_path / "run"
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


def test_an_epoch_is_one_pass_though_batches_are_skipped(
    arguments: list[str], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    records = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 5 + [{"input_ids": [1, 2, 3]}]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    flags = [f"--data.train={data}", "--train.sequences_per_step=1", "--train.epochs=2"]
    rest = [argument for argument in arguments if not argument.startswith("--data.train=")]
    assert main([*rest, *flags]) == 0
    assert read_json(tmp_path / "run" / "report.json")["num_steps"] == 2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--data.max_seq_len=20"], "a sequence of"),
        (["--model.init=pretrained"], "required: weights"),
    ],
)
def test_a_wrong_input_ends_with_2_and_leaves_no_folder(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    part: str,
) -> None:
    assert main([*arguments, *flags]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
