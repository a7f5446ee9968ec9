"""A run that chooses its layout: `furlong plan` says the same, and a resumed run keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed.test_replicas import launch, records, stops_after
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main

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
