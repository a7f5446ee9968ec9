"""Runs over a base in 4 bits, and of a model of the hub's layout, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TEXTS, TinyRun, run_command
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from furlong.cli.main import main

IDS = torch.arange(3, 40)[None]
FLAGS = ("--model.quantize=nf4", "--model.lora.rank=4", "--train.epochs=1")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(IDS).logits
    return output


@pytest.mark.slow
def test_a_run_is_evaluated_exported_merged_and_gone_on_from(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"
    saved = "--model.lora.modules_to_save=embed_tokens"
    run = tmp_path / "run"
    assert main(tiny_run.arguments(run, *FLAGS, saved, held_out)) == 0
    assert main(["export", str(run), "--merge", "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    adapted = AutoPeftModelForCausalLM.from_pretrained(
        run / "model", quantization_config=four_bits, device_map={"": "cpu"}, dtype=torch.float32
    )
    for module in adapted.modules():
        module.support_avx512bf16_for_cpu = False
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-5)
    assert getattr(merged.config, "quantization_config", None) is None
    capsys.readouterr()

    report = json.loads((run / "report.json").read_text())
    going_on = (f"--model.lora.adapter={run / 'model'}", "--model.quantize=nf4")
    assert main(tiny_run.arguments(tmp_path / "on", *going_on, held_out, "--train.epochs=1")) == 0
    after = json.loads((tmp_path / "on" / "report.json").read_text())
    assert after["eval_loss_before"] == pytest.approx(report["eval_loss_after"], abs=1e-7)
    assert after["eval_loss_after"] < after["eval_loss_before"]

    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"prompt": one[:20], "chosen": one[20:50], "rejected": one[20:40]}) + "\n"
            for one in TEXTS[2:6]
        )
    )
    flags = ("--train.loss=dpo", f"--data.train={pairs}", f"--data.cache_dir={tmp_path / 'cache'}")
    assert main(tiny_run.arguments(tmp_path / "dpo", *going_on, *flags)) == 0
    told = capsys.readouterr().out
    assert "step 1/6  loss 0.6931  margin 0.0000" in told  # by the adapters that it goes on from


@pytest.mark.slow
def test_a_revision_of_the_hub_is_read_wherever_the_model_is(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        snapshot = repository / "snapshots" / commit
        shutil.copytree(tiny_run.folder / "model", snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        if name == "main":  # which is to be read by nothing
            (snapshot / "config.json").write_text("{}")
            (snapshot / "tokenizer.json").write_text("{}")
    run = tmp_path / "run"
    flags = (*FLAGS, "--model.name=acme/tiny", "--model.revision=v2")
    commands = (
        tiny_run.arguments(run, *flags),
        ["export", str(run)],
        ["lengths", str(run / "config.json")],
        ["plan", str(run / "config.json")],
    )
    script = (
        "import sys; from furlong.cli.main import main;"
        f" sys.exit(any(main(command) for command in {commands!r}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    adapters = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == ("acme/tiny", "v2")


@pytest.mark.parametrize("layout", ["sp", "dp", "pp"])
@pytest.mark.few(0, 2)
def test_two_processes_over_4_bits(tiny_run: TinyRun, tmp_path: Path, layout: str) -> None:
    """Codes are whole on each process, adapters and a copy of tied embeddings are divided."""
    flags = (*FLAGS, "--model.lora.modules_to_save=embed_tokens", "--chunks.keep=kv")
    flags += ("--train.sequences_per_step=4",)
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main(tiny_run.arguments(alone, *flags)) == 0
    arguments = tiny_run.arguments(together, *flags, f"--parallel.{layout}=2")
    ended = Launched(tmp_path / "said", run_command, arguments).ended(300)
    assert [one.code for one in ended] == [0, 0], ended[0].said + ended[1].said
    ours, truth = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (together, alone)
    )
    for key in ("loss", "grad_norm"):
        found = [[line[key] for line in lines if key in line] for lines in (ours, truth)]
        assert found[0] == pytest.approx(found[1], rel=1e-5)
        assert len(found[0]) == 2
