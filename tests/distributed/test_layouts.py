"""A run in any layout is the run on one process: losses, lines, checkpoints, the exported model."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from distributed.test_replicas import FILES, launch, records, shape_of, stops_after, weights, worst
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, build_tiny_run
from safetensors.torch import load_file

from furlong.cli.main import main

STEPS = ("--train.steps=5", "--train.epochs=null", "--model.dtype=float64")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return build_tiny_run(tmp_path_factory.mktemp("tiny"))


def sizes(**parallel: int) -> list[str]:
    return [f"--parallel.{name}={size}" for name, size in parallel.items()]


def keys(run: Path) -> list[set[str]]:
    """The keys of each line of the log; a run of several tells the seconds that it waited for
    plans."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [set(json.loads(line)) - {"plan_s"} for line in lines]


def train(folder: Path, arguments: list[str], num_processes: int, limit_s: float = 120) -> str:
    """What the first process says; the others say nothing."""
    if num_processes == 1:
        assert main(arguments) == 0
        return ""
    ended = launch(folder / "said", arguments, num_processes=num_processes)
    assert [process.code for process in ended] == [0] * num_processes, ended
    assert [process.said for process in ended[1:]] == [""] * (num_processes - 1)
    return ended[0].said


@pytest.mark.parametrize("division", [{"pp": 2}, {"sp": 2}], ids=["pp", "sp"])
def test_two_processes_train_as_one(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], division: dict[str, int]
) -> None:
    held_out = f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"
    common = (*STEPS, held_out, "--train.eval_train_share=0.5")
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(tiny_run.arguments(one, *common)) == 0
    told = capsys.readouterr().out
    said = train(tmp_path, tiny_run.arguments(two, *common, *sizes(**division)), 2)
    for key in ("loss", "grad_norm", "eval_loss", "eval_training_loss", "lr", "num_tokens"):
        expected = records(one, key)
        assert len(expected) >= 3, key
        assert records(two, key) == pytest.approx(expected, rel=1e-10), key
    assert worst(weights(two), weights(one)) < 1e-9
    assert keys(two) == keys(one)
    assert {path.name for path in two.iterdir()} == FILES
    lines = [line for line in said.splitlines() if "step " in line or "loss" in line]
    assert [shape_of(line) for line in lines if line[:5] != "model"] == [
        shape_of(line)
        for line in told.splitlines()
        if ("step " in line or "loss" in line) and line[:5] != "model"
    ]
    assert "Warning" not in said


def in_parts(folder: Path, arguments: list[str], *divisions: dict[str, int]) -> list[str]:
    """A run of six steps in attempts of two steps, each in another layout; what each says."""
    said = []
    for index, division in enumerate(divisions):
        num_processes, is_last = prod(division.values()), index == len(divisions) - 1
        own = [*arguments, *sizes(**{"dp": 1, "sp": 1, "pp": 1} | division)]
        own += ["--train.steps=6", *(["--resume"] if index else [])]
        stop = 100 if is_last else 2 * (index + 1)
        started = Launched(
            folder / f"attempt{index}", stops_after, own, 0, stop, num_processes=num_processes
        )
        ended = started.ended(200)
        assert [process.code for process in ended] == [0] * num_processes, ended
        said.append(ended[0].said)
    return said


LORA = ("--model.lora.rank=4", "--model.lora.dropout=0")


@pytest.mark.parametrize(
    ("divisions", "flags"),
    [
        (({"pp": 2}, {"dp": 2}, {}), ()),
        (({"sp": 2}, {"pp": 2}), LORA),
    ],
    ids=["pp, dp, one", "sp, pp, with adapters"],
)
def test_another_layout_goes_on(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    divisions: tuple[dict[str, int], ...],
    flags: tuple[str, ...],
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    common = (*STEPS, *flags, "--train.eval_every_steps=0")
    assert main(tiny_run.arguments(whole, *common, "--train.steps=6")) == 0
    said = in_parts(tmp_path, tiny_run.arguments(run, *common), *divisions)
    assert "resumed from step-00000002: step 2 of 6" in said[1]
    assert "options are decided again, for these keys have changed: parallel." in said[1]
    assert records(run, "loss") == pytest.approx(records(whole, "loss"), rel=1e-10)
    file = "adapter_model.safetensors" if flags else "model.safetensors"
    ours, truth = (load_file(folder / "model" / file) for folder in (run, whole))
    assert worst(ours, truth) < 1e-8
    # what a process of a pipeline wrote is the whole model, for a process alone
    assert main(["export", str(run), f"--out={tmp_path / 'exported'}"]) == 0
    assert worst(load_file(tmp_path / "exported" / file), ours) == 0
