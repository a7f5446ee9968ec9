"""A run in any layout is the run on one process: losses, lines, files, the exported model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
from distributed.test_replicas import (
    FILES,
    command,
    records,
    shape_of,
    stops_after,
    weights,
    worst,
)
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

from furlong.api import Engine
from furlong.cli.main import main
from furlong.data.loader import Batch

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


@pytest.mark.parametrize(
    ("division", "flags"),
    [
        # two replicas are compared in `test_lack_of_memory_on_one_is_answered_by_all` too
        pytest.param({"dp": 2}, (), marks=pytest.mark.nightly),
        ({"pp": 2}, ()),
        slow({"sp": 2}, ()),
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
    ("division", "number", "at", "chunk_sizes"),
    [
        ({"dp": 2}, 1, 0, (128, 64)),
        slow({"pp": 2}, 1, 4, (128, 64)),
        slow({"dp": 2}, 1, 1, (256, 128, 64)),
        slow({"dp": 2, "pp": 2}, 3, 4, (128, 64)),
    ],
    ids=str,
)
def test_lack_of_memory_on_one_is_answered_by_all(
    tiny_run: TinyRun, tmp_path: Path, division: dict[str, int], number: int, at: int,
    chunk_sizes: tuple[int, ...],
) -> None:  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = (*STEPS, f"--chunks.size={chunk_sizes[0]}", "--train.steps=2",
             "--train.eval_every_steps=0")  # fmt: skip
    assert main(tiny_run.arguments(whole, *flags)) == 0
    arguments = tiny_run.arguments(run, *flags, *sizes(**division))
    num_processes = prod(division.values())
    ended = Launched(
        tmp_path / "out", has_no_memory, arguments, at, len(chunk_sizes) - 1, number,
        num_processes=num_processes,
    ).ended(240)  # fmt: skip
    assert [process.code for process in ended] == [0] * num_processes, ended
    for before, size in pairwise(chunk_sizes):
        told = (
            f"step 1 did not fit (out of memory on process {number} (MemoryError: no room)): "
            f"chunks of {size} tokens from now on, {before} before"
        )
        assert told in ended[0].said
    assert json.loads((run / "options.json").read_text())["size"] == chunk_sizes[-1]
    assert records(run, "loss") == pytest.approx(records(whole, "loss"), rel=1e-10)
    assert worst(weights(run), weights(whole)) < 1e-8


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


@pytest.mark.slow
def test_more_stages_than_layers_are_told_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(tmp_path / "run", *sizes(pp=3))
    ended = Launched(tmp_path / "out", command, arguments, num_processes=3).ended(120)
    assert [process.code for process in ended] == [2, 2, 2], ended
    assert "a parallel.pp of at most the model's 2 layers" in ended[0].said
    assert ended[0].said.count("given:") == 1 and ended[1].said == ended[2].said == ""
