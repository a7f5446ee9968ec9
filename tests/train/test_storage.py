"""Offload in whole runs: what the run file says is what happens, or is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main

FIXED = (
    *("--chunks.size=32", "--chunks.num_retained=1", "--chunks.keep=attention"),
    "--train.eval_every_steps=4",
)
DISK = ("--memory.disk=50MiB",)
LAYER_FIRST = ("--chunks.order=layer-first", "--chunks.stage_layers=1")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Of steps and of evaluations."""
    names = ("loss", "eval_loss")
    return [record[name] for record in records(run) for name in names if name in record]


@pytest.mark.parametrize(
    ("dials", "told"),
    [
        (
            ("--offload={kv: disk, attention: disk}", "--chunks.order=chunk-first"),
            "offload {kv: disk, attention: disk}, order chunk-first",
        ),
        (
            ("--offload={attention: disk}", *LAYER_FIRST),
            "offload {attention: disk}, order layer-first, stage_layers 1",
        ),
    ],
)
def test_tiers_and_order_of_the_run_file_train_to_the_same_losses(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any, dials: tuple[str, ...], told: str
) -> None:
    """Evaluations too, which run under the same options."""
    folder = tmp_path / "fast"
    folder.mkdir()
    both = (*FIXED, f"--data.eval={tiny_run.folder / 'held-out.jsonl'}", "--train.epochs=1")
    plain = ("--offload=none", "--chunks.order=chunk-first")
    tiny_run.leave_run(tmp_path / "device", *both, *plain)
    capsys.readouterr()
    place = f"--memory.disk_dir={folder}"
    assert main(tiny_run.arguments(tmp_path / "lower", *both, *dials, *DISK, place)) == 0
    printed = capsys.readouterr().out
    assert told in printed and f"disk: at most 50 MiB in {folder}" in printed
    assert losses(tmp_path / "lower") == pytest.approx(losses(tmp_path / "device"), rel=1e-5)
    first, predicted = records(tmp_path / "lower")[1:3]
    assert first["disk_bytes"] == predicted["predicted_disk_bytes"] > 0
    assert "disk_bytes" not in records(tmp_path / "device")[1]
    assert list(folder.iterdir()) == []


def test_decided_tiers_come_back_when_a_run_is_resumed(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    dials = (*FIXED, *LAYER_FIRST, "--offload={inputs: disk}", *DISK, "--train.epochs=1")
    assert main(tiny_run.arguments(run, *dials)) == 0
    options = (run / "options.json").read_text()
    for name in ("report.json", "options.json"):
        (run / name).unlink()
    shutil.rmtree(run / "model")
    capsys.readouterr()
    assert main(["train", str(run / "config.json"), "--resume"]) == 0
    assert "offload {inputs: disk}, order layer-first" in capsys.readouterr().out
    assert (run / "options.json").read_text() == options
    assert json.loads(options)["offload"]["inputs"] == "disk"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--memory.disk_dir=/dev/shm",), ("/dev/shm, which is on a tmpfs", "memory.disk_dir")),
        (("--memory.disk_dir=/sys",), ("/sys for the disk: ", "can be written")),
        (("--memory.disk_dir=/no/such",), ("No such file or directory", "a folder that exists")),
        (("--memory.disk=0",), ("memory.disk = 0", "add memory.disk, such as")),
        (
            ("--memory.disk=1KiB",),
            ("of memory.disk", "the smallest that would do is memory.disk: 1MiB"),
        ),
        (("--offload=cpu",), ("offload = cpu on", "remove offload")),
        (("--memory.device=100KiB",), ("none fits", "would do is memory.device: 2MiB")),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: Any, capsys: Any, flags: Any, told: Any
) -> None:
    monkeypatch.setattr("furlong.train.build.build_model", lambda *_, **__: pytest.fail("loaded"))
    run = tmp_path / "run"
    arguments = (*FIXED, "--offload=disk", *DISK, *flags)
    if flags[0].startswith("--memory.dev"):
        arguments = (*FIXED, *flags)
    assert main(tiny_run.arguments(run, *arguments)) == 2
    message = capsys.readouterr().err
    assert all(words in message for words in told), message
    assert [line.split(":")[0] for line in message.strip().splitlines()][-4:] == [
        "given", "required", "from", "change",
    ]  # fmt: skip
    assert not run.exists()


def test_the_budgets_alone_decide(tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    """With nothing else in the run file: what was chosen, why, and how near the prediction was."""
    run = tmp_path / "run"
    budgets = ("--memory.device=2MiB", "--memory.disk=50MiB", "--train.epochs=1")
    assert main(tiny_run.arguments(run, "--chunks.size=auto", *budgets)) == 0
    printed = capsys.readouterr().out
    chosen = next(line for line in printed.splitlines() if line.startswith("chunks: "))
    assert chosen.count("(auto)") >= 5
    assert "fits 2 MiB (memory.device)" in printed
    told = next(line for line in printed.splitlines() if line.startswith("first step: "))
    assert told.count("(predicted ") >= 2 and "gradients in" in told and "peak" in told
    first, predicted = records(run)[:2]
    assert first["gradients_s"] > 0 and predicted["predicted_step_s"] > 0
    assert predicted["predicted_device_bytes"] < 2**21


@pytest.mark.slow
def test_keys_and_values_larger_than_the_budget(tmp_path: Path, tiny_run: TinyRun) -> None:
    """A sequence whose K,V alone exceed memory.device, to the loss of a run that may keep all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, num_tokens, layers, width = tmp_path / "model", 8000, 4, 64
    shutil.copytree(tiny_run.folder / "model", model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=width, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=1, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    draw = random.Random(0)
    ids = [draw.randrange(4, 300) for _ in range(num_tokens)]
    (tmp_path / "long.jsonl").write_text(json.dumps({"input_ids": ids}) + "\n")
    both = (
        *(f"--model.name={model}", f"--data.train={tmp_path / 'long.jsonl'}"),
        *("--data.format=tokens", "--data.max_seq_len=8192", "--train.epochs=1"),
        *("--train.sequences_per_step=1", "--chunks.size=auto"),
    )
    budget_bytes = 15 * 2**20
    assert 2 * num_tokens * layers * width * 4 > budget_bytes
    small = (f"--memory.device={budget_bytes}", "--memory.disk=200MiB")
    assert main(tiny_run.arguments(tmp_path / "small", *both, *small)) == 0
    assert main(tiny_run.arguments(tmp_path / "large", *both, "--memory.device=1GiB")) == 0
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), rel=1e-5)
    first, predicted = records(tmp_path / "small")[:2]
    assert first["disk_bytes"] == predicted["predicted_disk_bytes"] > 0
    assert predicted["predicted_device_bytes"] < budget_bytes
