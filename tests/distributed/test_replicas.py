"""A run on two replicas: signals, and errors of one process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Ended, Launched
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

from furlong.cli.main import main
from furlong.train.metrics import MetricsLog, StepFigures

FILES = {"checkpoints", "config.json", "metrics.jsonl", "model", "options.json", "report.json",
         "timeline.json", ".lock"}  # fmt: skip


def command(arguments: list[str]) -> None:
    raise SystemExit(main(arguments))


def launch(folder: Path, arguments: list[str], **options: Any) -> list[Ended]:
    function = options.pop("function", command)
    return Launched(folder, function, arguments, **options).ended(120)


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def records(run: Path, key: str) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if record.get(key) is not None]


def weights(run: Path) -> Mapping[str, torch.Tensor]:
    return load_file(next((run / "model").glob("*.safetensors")))


def worst(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm()) for n in one)


def shape_of(line: str) -> str:
    """A line without its figures."""
    line = re.sub(r"[0-9.]+(e-[0-9]+)?K?( ([KMG]iB|B|ms|s)\b)?", "#", line)
    # columns are as wide as their figures, and shares of time are told where they are large
    return re.sub(r" +(recompute|data) #%", "", re.sub(r" +", " ", line))


def stops_after(arguments: list[str], number: int, step: int) -> None:
    """A signal comes to one process only, after a step."""
    log = MetricsLog.step

    def logged(self: MetricsLog, at: int, figures: StepFigures) -> None:
        log(self, at, figures)
        if at == step and os.environ["RANK"] == str(number):
            signal.raise_signal(signal.SIGTERM)

    MetricsLog.step = logged  # type: ignore[method-assign]
    command(arguments)


def test_a_signal_to_one_stops_all_and_one_process_goes_on(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(tiny_run.arguments(whole)) == 0
    arguments = tiny_run.arguments(run)
    started = Launched(tmp_path / "out", stops_after, arguments, 1, 3)
    ended = started.ended(120)
    assert [process.code for process in ended] == [0, 0], ended
    assert "stopped by a signal to another process after step 3 of 9" in ended[0].said
    again = f"torchrun --nproc-per-node 2 -m furlong train {run / 'config.json'} --resume"
    assert f"go on with: {again}" in ended[0].said
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000002", "step-00000003",
    ]  # fmt: skip
    assert main(["export", str(run), f"--out={tmp_path / 'exported'}"]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name: w.shape for name, w in exported.items()} == {
        name: w.shape for name, w in weights(whole).items()
    }
    assert main([*arguments, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "processes = 1, before 2: the last bits may differ" in printed
    assert "options are decided again, for these keys have changed: the number of" in printed
    assert records(run, "loss") == pytest.approx(records(whole, "loss"), rel=1e-5)
    assert worst(weights(run), weights(whole)) < 1e-3


def cannot_plan(arguments: list[str], made: type[Exception]) -> None:
    """The planner of the first process fails at its third plan."""
    from furlong.train.batches import BatchPlanner

    make, calls = BatchPlanner.joined, count()

    def fail(*args: Any) -> Any:
        if next(calls) == 2:
            raise made("no such plan")
        return make(*args)

    BatchPlanner.joined = fail  # type: ignore[method-assign]
    command(arguments)


@pytest.mark.slow
def test_an_error_of_the_planner_ends_all(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(tmp_path / "run")
    ended = Launched(tmp_path / "out", cannot_plan, arguments, ValueError).ended(60)
    assert [process.code for process in ended] == [1, 1], ended
    assert all("ValueError: no such plan" in process.said for process in ended)


def diverges(arguments: list[str]) -> None:
    """The loss of one process is not a number."""
    from furlong.runtime.head import LossHead

    gradient = LossHead.gradient

    def broken(self: Any, *args: Any) -> Any:
        found = gradient(self, *args)
        self.loss_sum *= float("nan")
        return found

    if os.environ["RANK"] == "1":
        LossHead.gradient = broken  # type: ignore[method-assign]
    command(arguments)


def test_a_loss_that_is_no_number_is_told_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    ended = launch(tmp_path / "out", tiny_run.arguments(tmp_path / "run"), function=diverges)
    assert [process.code for process in ended] == [2, 2], ended
    assert "given:    loss nan" in ended[0].said and "in step 1" in ended[0].said
    assert ended[1].said == ""


def differs(arguments: list[str], flag: str) -> None:
    command([*arguments, *([flag] if os.environ["RANK"] == "1" else [])])


def differs_in_version(arguments: list[str]) -> None:
    from furlong import families

    if os.environ["RANK"] == "1":
        families.__version__ = "9.9"
    command(arguments)


WRONG: list[tuple[Any, tuple[str, ...], tuple[str, ...], str]] = [
    # what runs, with what more, with which flags, what is told
    (differs, ("--train.lr=0.5",), (), "process 1: train.lr = 0.5, on process 0 0.01"),
    (differs_in_version, (), (), 'process 1: furlong = "9.9", on process 0 "0.1.0"'),
    (command, (), ("--parallel.dp=3",), "dp 3 x sp 1 x pp 1 = 3, and 2 processes"),
    (command, (), ("--data.train=nowhere",), "nowhere: no such file or folder"),
]


def test_a_wrong_input_is_told_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Mostly processes start and wait: the cases run beside each other."""
    started = [
        Launched(
            tmp_path / str(i), function, tiny_run.arguments(tmp_path / f"run {i}", *flags), *extra
        )
        for i, (function, extra, flags, _) in enumerate(WRONG)
    ]
    for launched, (*_, told) in zip(started, WRONG, strict=True):
        ended = launched.ended(120)
        assert [process.code for process in ended] == [2, 2], ended
        assert told in ended[0].said
        assert ended[0].said.count("given:") == 1 and ended[1].said == ""
    assert not list(tmp_path.glob("run *"))
