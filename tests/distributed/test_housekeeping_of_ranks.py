"""Early ends, the best checkpoint, samples and pushes of runs with two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command
from safetensors.torch import load_file

from furlong.cli.main import main


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("division", ["dp", "sp", "pp"])
def test_two_processes_end_and_export_as_one(
    tiny_run: TinyRun, tmp_path: Path, division: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    flags = [
        "--train.lr=0.3", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}",
        "--train.eval_every_steps=1", "--train.keep_best=true", "--train.early_stopping=2",
        '--log.samples=["word1 word2"]', "--log.sample_tokens=4", "--model.dtype=float64",
    ]  # fmt: skip
    assert main(tiny_run.arguments(one, *flags)) == 0
    arguments = tiny_run.arguments(two, *flags, f"--parallel.{division}=2")
    if division == "dp":
        arguments.append("--train.max_loss=1000")
    ended = Launched(tmp_path / "out", run_command, arguments).ended(200)
    assert [process.code for process in ended] == [0, 0], ended
    reports = [json.loads((run / "report.json").read_text()) for run in (one, two)]
    assert [(r["num_steps"], r["exported_step"]) for r in reports] == [(3, 1)] * 2
    ours, truth = weights(two), weights(one)
    assert all(torch.allclose(ours[name], truth[name], rtol=0, atol=1e-8) for name in truth)
    lines = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, two)
    ]
    written = [[line["samples"] for line in of if "samples" in line] for of in lines]
    assert written[1] == ([] if division == "pp" else written[0]) and len(written[0]) == 4
    assert ("left out, for no process of a pipeline" in ended[0].said) is (division == "pp")


@pytest.mark.slow
def test_a_loss_above_the_most_is_told_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--train.lr=0.3", "--train.save_every_steps=99", "--parallel.dp=2",
             "--train.max_loss=5.8"]  # fmt: skip
    ended = Launched(tmp_path / "out", run_command, tiny_run.arguments(run, *flags)).ended(200)
    assert [process.code for process in ended] == [2, 2], ended
    assert ended[0].said.count("train.max_loss = 5.8") == 1 and "given:" not in ended[1].said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
