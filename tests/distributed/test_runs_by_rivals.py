"""Runs whose plans another planner makes than that of the dials: the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, build_tiny_run, run_command

from furlong.cli.main import main
from furlong.planners.auto import rivals
from furlong.planners.auto.rivals import CHUNKS, Rivals

FLAGS = (
    "--model.dtype=float64", "--train.steps=4", "--train.epochs=null", "--chunks.size=auto",
    "--train.eval_train_share=0.5", "--train.sequences_per_step=6",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return build_tiny_run(tmp_path_factory.mktemp("tiny"))


def records(run: Path, key: str) -> list[Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def takes(arguments: list[str], method: str) -> None:
    """The command, where a plan by `method` is the fastest: tiny models have little to gain."""

    def fastest(self: Rivals, lens: Any, plan: Any, options: Any, *, frozen_layers: int) -> Any:
        others = dict(self._others(lens, plan, options, frozen_layers))
        return (method, others[method]) if method in others else (CHUNKS, plan)

    Rivals.fastest = fastest  # type: ignore[method-assign]
    step_s = rivals.step_s
    rivals.step_s = lambda *args: 2 * step_s(*args)  # that of the chunks, which is to be beaten
    run_command(arguments)


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (("--parallel.sp=2",), "places"),
        (("--parallel.pp=2",), "InfiniPipe"),
        pytest.param(
            ("--parallel.sp=2", "--chunks.size=64"), "local sequences", marks=pytest.mark.slow
        ),
    ],
)
def test_losses_are_those_of_one_process(
    tiny_run: TinyRun, tmp_path: Path, layout: tuple[str, ...], method: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(tiny_run.arguments(one, *FLAGS)) == 0
    arguments = tiny_run.arguments(two, *FLAGS, *layout)
    ended = Launched(tmp_path / "out", takes, arguments, method).ended(120)
    assert [process.code for process in ended] == [0, 0], ended
    assert records(one, "plan_method") == []
    assert records(two, "plan_method") == [method] * 4
    for key in ("loss", "grad_norm", "eval_training_loss"):
        assert records(two, key) == pytest.approx(records(one, key), rel=1e-8), key
