"""A run in any layout is the run on one process: losses, lines, files, the exported model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_replicas import (
    FILES,
    command,
    records,
    shape_of,
    stops_after,
    weights,
    worst,
)
from helpers.launched import Ended, Launched
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

from furlong.api import Engine
from furlong.cli.main import main
from furlong.data.loader import TrainBatch

STEPS = ("--train.steps=5", "--train.epochs=null", "--model.dtype=float64")


def sizes(**parallel: int) -> list[str]:
    return [f"--parallel.{name}={size}" for name, size in parallel.items()]


def keys(run: Path) -> list[set[str]]:
    """The keys of each line of the log; a run of several tells the seconds that it waited for
    plans."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [set(json.loads(line)) - {"plan_s", "plan_method"} for line in lines]


def train(folder: Path, arguments: list[str], num_processes: int) -> str:
    """What the first process says; the others say nothing."""
    ended = Launched(folder / "out", command, arguments, num_processes=num_processes).ended(240)
    assert [process.code for process in ended] == [0] * num_processes, ended
    assert [process.said for process in ended[1:]] == [""] * (num_processes - 1)
    return ended[0].said


LORA = ("--model.lora.rank=4", "--model.lora.dropout=0")
slow = partial(pytest.param, marks=pytest.mark.slow)
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("division", "flags"),
    [
        ({"pp": 2}, ()),
        nightly({"dp": 2}, ()),
        nightly({"sp": 2}, ()),
        # with one sequence in a step one pipeline, or one pool, is always idle
        slow({"dp": 2, "pp": 2}, (*LORA, "--train.sequences_per_step=1")),
        slow({"dp": 2, "sp": 2}, ("--train.sequences_per_step=1", "--chunks.keep=input")),
        slow({"sp": 2, "pp": 2}, ("--chunks.num_retained=0", "--chunks.keep=kv")),
    ],
    ids=str,
)
def test_a_run_is_that_of_one_process(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    division: dict[str, int],
    flags: tuple[str, ...],
) -> None:
    held_out = f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"
    common = (*STEPS, held_out, "--train.eval_train_share=0.5", *flags)
    one, two = tiny_run.folder / f"one{flags}", tmp_path / "two"
    if not one.exists():
        assert main(tiny_run.arguments(one, *common)) == 0
        (one.with_suffix(".txt")).write_text(capsys.readouterr().out)
    told = one.with_suffix(".txt").read_text()
    arguments = tiny_run.arguments(two, *common, *sizes(**division))
    said = train(tmp_path, arguments, prod(division.values()))
    for key in ("loss", "grad_norm", "eval_loss", "eval_training_loss", "lr", "num_tokens"):
        expected = records(one, key)
        assert len(expected) >= 3, key
        assert records(two, key) == pytest.approx(expected, rel=1e-10), key
    assert worst(weights(two), weights(one)) < 1e-9
    assert keys(two) == keys(one)
    assert len(records(two, "plan_s")) == 5
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
        num_processes = prod(size for name, size in division.items() if name != "replicate")
        is_last = index == len(divisions) - 1
        own = [*arguments, *sizes(**{"dp": 1, "sp": 1, "pp": 1, "replicate": 1} | division)]
        own += ["--train.steps=6", *(["--resume"] if index else [])]
        stop = 100 if is_last else 2 * (index + 1)
        started = Launched(
            folder / f"attempt{index}", stops_after, own, 0, stop, num_processes=num_processes
        )
        ended = started.ended(200)
        assert [process.code for process in ended] == [0] * num_processes, ended
        said.append(ended[0].said)
    return said


@pytest.mark.slow
def test_another_layout_goes_on(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    common = (*STEPS, *LORA, "--train.eval_every_steps=0")
    assert main(tiny_run.arguments(whole, *common, "--train.steps=6")) == 0
    arguments = tiny_run.arguments(run, *common)
    said = in_parts(tmp_path, arguments, {"pp": 2}, {"sp": 2}, {"dp": 2, "replicate": 2})
    assert "resumed from step-00000002: step 2 of 6" in said[1]
    assert "options are decided again, for these keys have changed: parallel." in said[1]
    assert records(run, "loss") == pytest.approx(records(whole, "loss"), rel=1e-10)
    file = "adapter_model.safetensors"
    ours, truth = (load_file(folder / "model" / file) for folder in (run, whole))
    assert worst(ours, truth) < 1e-8
    # what several processes wrote is the whole model, for a process alone
    assert main(["export", str(run), f"--out={tmp_path / 'exported'}"]) == 0
    assert worst(load_file(tmp_path / "exported" / file), ours) == 0


def has_no_memory(arguments: list[str], at: int, number: int) -> None:
    """A process runs out of memory in its second step, after `at` actions; after none it has not
    even its tokens."""
    run, part, steps = Engine.run_made, TrainBatch.part, count(1)

    def no_part(self: Any, *args: Any) -> Any:
        if next(steps) == 2:
            raise torch.OutOfMemoryError("no room")
        return part(self, *args)

    def short(self: Any, *args: Any, watch: Callable[[], None], **kwargs: Any) -> Any:
        actions, step = count(1), next(steps)

        def watch_and_fail() -> None:
            watch()
            if step == 2 and next(actions) == at:
                raise torch.OutOfMemoryError("no room")

        return run(self, *args, watch=watch_and_fail, **kwargs)

    if os.environ["RANK"] == str(number):
        if at:
            Engine.run_made = short  # type: ignore[method-assign]
        else:
            TrainBatch.part = no_part  # type: ignore[method-assign]
    command(arguments)


@pytest.mark.parametrize(
    ("division", "number", "at"),
    [
        ({"dp": 2}, 1, 2),
        slow({"dp": 2}, 1, 0),
        nightly({"pp": 2}, 1, 4),
        nightly({"sp": 2}, 0, 3),
        slow({"dp": 2, "pp": 2}, 3, 4),
    ],
    ids=str,
)
def test_lack_of_memory_on_one_ends_all_and_a_resume_takes_smaller_chunks(
    tiny_run: TinyRun, tmp_path: Path, division: dict[str, int], number: int, at: int
) -> None:
    """To the bit of a run that is given the smaller chunks from that step on."""
    run, given = tmp_path / "run", tmp_path / "given"
    flags = (*STEPS, "--train.steps=3", "--train.save_every_steps=1", "--train.eval_every_steps=0")
    num_processes = prod(division.values())

    def ends(function: Any, out: Path, *own: Any, size: int = 128, attempt: int = 0) -> list[Ended]:
        arguments = tiny_run.arguments(out, *flags, *sizes(**division), f"--chunks.size={size}")
        arguments += ["--resume"] * (size != 128)
        return Launched(
            tmp_path / f"out{size}{attempt}", function, arguments, *own,
            num_processes=num_processes, attempt=attempt,
        ).ended(120)  # fmt: skip

    ended = ends(has_no_memory, run, at, number)
    assert [process.code for process in ended] == [
        2 if rank == number else 1 for rank in range(num_processes)
    ], ended
    message = f"did not fit on process {number} with chunks of 128 tokens: no room"
    assert [message in process.said for process in ended].count(True) == 1
    assert message in ended[number].said and "--resume" in ended[number].said
    assert json.loads((run / "options.json").read_text())["size"] == 64
    assert len(records(run, "loss")) == 1
    shutil.copytree(run, given)
    (given / "options.json").unlink()
    for out, size, attempt in ((run, 128, 1), (given, 64, 0)):  # as torchrun --max-restarts does
        ended = ends(command, out, size=size, attempt=attempt)
        assert [process.code for process in ended] == [0] * num_processes, ended
    assert records(run, "chunk_size") == [128, 64, 64]
    assert records(run, "loss") == records(given, "loss")
    assert worst(weights(run), weights(given)) == 0


@pytest.mark.slow
def test_more_stages_than_layers_are_told_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(tmp_path / "run", *sizes(pp=3))
    ended = Launched(tmp_path / "out", command, arguments, num_processes=3).ended(120)
    assert [process.code for process in ended] == [2, 2, 2], ended
    assert "a parallel.pp of at most the model's 2 layers" in ended[0].said
    assert ended[0].said.count("given:") == 1 and ended[1].said == ended[2].said == ""
