"""`furlong plan` of a run on pairs: one call of it, in two phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.pair_runs import write_pairs
from helpers.tiny_runs import build_tiny_run

from furlong.cli.main import main
from furlong.plan.text import load_plan
from furlong.runtime import two_phase


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    build_tiny_run(tmp_path)
    settings = {
        "model": {"name": str(tmp_path / "model"), "dtype": "float32"},
        "data": {
            "train": str(write_pairs(tmp_path / "pairs.jsonl", 9)), "max_seq_len": 512,
            "cache_dir": str(tmp_path / "cache"),
        },
        "chunks": {"size": 64},
        "train": {"loss": "dpo", "sequences_per_step": 3},
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    return file


def test_a_run_has_the_plan_of_the_largest_pair(
    run_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """With its prompt in common, where that has a chunk or more."""
    made, out = [], tmp_path / "plan.json"
    seen = two_phase.plan_two_phases
    monkeypatch.setattr(
        two_phase, "plan_two_phases", lambda *a, **k: made.append(seen(*a, **k)) or made[-1]
    )
    flags = [
        "--chunks.size=8",
        "--data.limit=3",
        "--train.steps=1",
        "--train.eval_every_steps=0",
    ]
    assert main(["train", str(run_file), *flags, f"--out={tmp_path / 'run'}"]) == 0
    assert main(["plan", str(run_file), *flags, f"--out={out}"]) == 0
    plan = load_plan(out.read_text())
    largest = max(made, key=lambda one: (sum(one.seq_lens), one == plan))
    assert plan == largest and plan.trees


def test_the_page_of_a_pair(run_file: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["plan", str(run_file)]) == 0
    said = capsys.readouterr().out
    assert "two phases, size 64, num_retained 0" in said
    assert said.partition("\nauto ")[2].strip().startswith(("keep ", "offload "))
    assert main(["plan", str(run_file), "--json", "--chunks.keep=kv"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["method"], figures["options"]["keep"]) == ("two phases", "kv")


@pytest.mark.parametrize("lengths", ["file", "github"])
def test_lengths_alone_are_planned_as_pairs(lengths: str, tmp_path: Path, capsys: Any) -> None:
    name = str(tmp_path / "lens.json") if lengths == "file" else lengths
    (tmp_path / "lens.json").write_text('{"version": 1, "lengths": [700, 300]}')
    flags = ["plan", f"--lengths={name}", "--model.name=Qwen2.5-0.5B", "--hardware=A100-80"]
    flags += ["--train.loss=dpo", "--chunks.size=512", "--data.max_seq_len=1024"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "two phases" and found["batch"]["num_sequences"] == 2
    assert main([*flags, "--devices=2"]) == 2
    assert "with train.loss: dpo" in capsys.readouterr().err


def test_questions_about_something_else(run_file: Path, capsys: Any) -> None:
    for flags, given in (
        (["--compare"], "with train.loss: dpo"),
        (["--sequences=8"], "with train.loss: dpo"),
        (["--devices=2", "--hardware=h100"], "with train.loss: dpo"),
        (["--chunks.keep=all"], "chunks.keep = all with train.loss: dpo"),
        (["--memory.device=300KiB"], "none fits"),
    ):
        assert main(["plan", str(run_file), *flags]) == 2
        assert given in capsys.readouterr().err
