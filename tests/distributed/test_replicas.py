"""A run on two replicas: signals, lack of memory, and errors of one process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Ended, Launched
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

from furlong.api import Engine
from furlong.cli.main import main
from furlong.data.loader import Batch
from furlong.train.metrics import MetricsLog, StepFigures

slow = partial(pytest.param, marks=pytest.mark.slow)
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


def has_no_memory(arguments: list[str], at: int, num_times: int, number: int = 1) -> None:
    """A process lacks memory in its first tries of a step, after so many actions; after none it has
    not even its tokens."""
    run, part, tries = Engine.run, Batch.part, count()

    def no_part(self: Any, *args: Any) -> Any:
        if next(tries) < num_times:
            raise MemoryError("no room")
        return part(self, *args)

    def short(self: Any, *args: Any, watch: Callable[[], None], **kwargs: Any) -> Any:
        actions, is_short = count(1), next(tries) < num_times

        def watch_and_fail() -> None:
            watch()
            if is_short and next(actions) == at:
                raise MemoryError("no room")

        return run(self, *args, watch=watch_and_fail, **kwargs)

    if os.environ["RANK"] == str(number):
        if at:
            Engine.run = short  # type: ignore[method-assign]
        else:
            Batch.part = no_part  # type: ignore[method-assign]
    command(arguments)


@pytest.mark.parametrize(
    ("at", "sizes"),
    [
        pytest.param(1, (256, 128, 64), marks=pytest.mark.slow),
        (0, (128, 64)),
    ],
)
def test_lack_of_memory_on_one_is_answered_by_all(
    tiny_run: TinyRun, tmp_path: Path, at: int, sizes: tuple
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = (f"--chunks.size={sizes[0]}", "--train.steps=2", "--train.epochs=null")
    assert main(tiny_run.arguments(whole, *flags)) == 0
    arguments = tiny_run.arguments(run, *flags, "--parallel.dp=2")
    ended = Launched(tmp_path / "out", has_no_memory, arguments, at, len(sizes) - 1).ended(120)
    assert [process.code for process in ended] == [0, 0], ended
    for size, before in zip(sizes[1:], sizes, strict=False):
        told = f"chunks of {size} tokens from now on, {before} before"
        assert (
            f"step 1 did not fit (out of memory on process 1 (MemoryError: no room)): {told}"
            in ended[0].said
        )
    assert read_json(run / "options.json")["size"] == sizes[-1]
    assert records(run, "loss") == pytest.approx(records(whole, "loss"), rel=1e-5)
    assert worst(weights(run), weights(whole)) < 1e-3


@pytest.mark.slow
def test_lack_of_memory_inside_a_sequence_parallel_group_ends_all(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    arguments = tiny_run.arguments(tmp_path / "run", "--parallel.sp=2")
    ended = Launched(tmp_path / "out", has_no_memory, arguments, 3, 1).ended(60)
    assert [process.code for process in ended] == [1, 2], ended
    told = "out of memory on process 1 while processes exchanged rows of a chunk: MemoryError"
    assert told in ended[1].said
    assert "change:   set chunks.size to less" in ended[1].said


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
    from furlong.train import processes

    if os.environ["RANK"] == "1":
        processes.__version__ = "9.9"
    command(arguments)


@pytest.mark.parametrize(
    ("function", "extra", "flags", "part"),
    [
        (differs, ("--train.lr=0.5",), (), "process 1: train.lr = 0.5, on process 0 0.01"),
        (differs_in_version, (), (), 'process 1: furlong = "9.9", on process 0 "0.1.0"'),
        (command, (), ("--parallel.dp=3",), "dp 3 x sp 1 x pp 1 = 3, and 2 processes"),
        (command, (), ("--data.train=nowhere",), "nowhere: no such file or folder"),
    ],
)
def test_a_wrong_input_is_told_once(
    tiny_run: TinyRun,
    tmp_path: Path,
    function: Any,
    extra: tuple[str, ...],
    flags: tuple[str, ...],
    part: str,
) -> None:
    arguments = tiny_run.arguments(tmp_path / "run", *flags)
    ended = Launched(tmp_path / "out", function, arguments, *extra).ended(60)
    assert [process.code for process in ended] == [2, 2], ended
    assert part in ended[0].said
    assert ended[0].said.count("given:") == 1 and ended[1].said == ""
    assert not (tmp_path / "run").exists()
