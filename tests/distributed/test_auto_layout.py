"""A run that chooses its layout: `furlong plan` says the same, and a resumed run keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed.test_replicas import launch, records, stops_after, weights, worst
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.units import format_bytes

FLAGS = (
    *("--train.steps=4", "--train.epochs=null", "--model.dtype=float64"),
    *("--train.eval_every_steps=0", "--chunks.size=auto", "--memory.device=64MiB"),
    *("--parallel.sp=auto", "--parallel.pp=auto"),
)


def line_of(printed: str, head: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith(head))


def layout_in(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "options.json").read_text())
    return {name: values[name] for name in ("layout", "stages", "size", "keep", "num_retained")}


@pytest.mark.slow
def test_two_processes_choose_their_layout_and_keep_it(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, run, file = tmp_path / "one", tmp_path / "run", tmp_path / "run.yaml"
    assert main(tiny_run.arguments(one, *FLAGS)) == 0
    arguments = tiny_run.arguments(run, *FLAGS)
    ended = Launched(tmp_path / "first", stops_after, arguments, 0, 2).ended(120)
    assert [process.code for process in ended] == [0, 0], ended
    told = line_of(ended[0].said, "parallel: ").removeprefix("parallel: ")
    assert " (auto): " in told and " predicted per step; dp " in told
    decided = layout_in(run)

    # the plan of two devices is that of the run
    file.write_text((run / "config.json").read_text())
    capsys.readouterr()
    assert main(["plan", str(file), "--devices=2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parallel"] == told
    assert decided["layout"].items() <= planned["layout"].items()
    assert planned["options"].items() <= decided.items()

    ended = launch(tmp_path / "second", [*arguments, "--resume"])
    assert [process.code for process in ended] == [0, 0], ended
    assert "decided again" not in ended[0].said
    assert line_of(ended[0].said, "parallel: ").removeprefix("parallel: ") in told
    assert layout_in(run) == decided
    assert records(run, "loss") == pytest.approx(records(one, "loss"), rel=1e-10)


DEEP = (
    *("--train.steps=4", "--train.epochs=null", "--model.dtype=float64", "--chunks.size=64"),
    *("--model.init=random", "--model.config={num_hidden_layers: 6}"),
    *("--train.eval_train_share=0.5", "--train.eval_every_steps=2", "--train.save_every_steps=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "flags", "budget"),
    [(2, ("--parallel.sp=2", "--parallel.dp=1"), "2900KiB"),
     pytest.param(4, ("--parallel.sp=2", "--parallel.reshard=true"), "64MiB",
                  marks=pytest.mark.nightly),
     (4, ("--parallel.sp=2", "--parallel.pp=2", "--chunks.method=infinipipe", "--chunks.size=auto",
          "--parallel.reshard=true"), "64MiB")],
)  # fmt: skip
def test_weights_that_are_freed_between_stages_train_as_kept_ones(
    num_processes: int, flags: tuple[str, ...], budget: str, tiny_run: TinyRun, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the key, and by `auto` on a device that holds no plan with kept weights; from start to
    export, across a resume as kept ones, as `furlong plan` says it."""
    one, run, file = tmp_path / "one", tmp_path / "run", tmp_path / "run.yaml"
    assert main(tiny_run.arguments(one, *DEEP)) == 0
    flags = (*flags, f"--memory.device={budget}")
    arguments = tiny_run.arguments(run, *DEEP, *flags)
    started = Launched(
        tmp_path / "first", stops_after, arguments, 0, 2, num_processes=num_processes
    )
    ended = started.ended(120)
    assert [process.code for process in ended] == [0] * num_processes, ended
    told = " ".join(line_of(ended[0].said, "weights: ").split())
    options = json.loads((run / "options.json").read_text())
    order = "chunk-first" if "--parallel.pp=2" in flags else "layer-first"
    assert options["reshard"] and options["order"] == order

    file.write_text((run / "config.json").read_text())
    capsys.readouterr()
    assert main(["plan", str(file), f"--devices={num_processes}", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["options"].items() <= options.items() and planned["weights"]["reshard"]
    for part in ("share_bytes", "whole_bytes"):
        assert format_bytes(planned["weights"][part]) in told

    kept = [*arguments, "--resume", "--parallel.reshard=false", "--memory.device=64MiB"]
    ended = launch(tmp_path / "second", kept, num_processes=num_processes)
    assert [process.code for process in ended] == [0] * num_processes, ended
    assert not json.loads((run / "options.json").read_text())["reshard"]
    for key in ("loss", "grad_norm", "eval_training_loss"):
        assert len(records(one, key)) > 1
        assert records(run, key) == pytest.approx(records(one, key), rel=1e-10), key
    assert worst(weights(run), weights(one)) <= 1e-6  # exported in float32
