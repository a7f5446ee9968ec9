"""Runs whose plans another planner makes than that of the dials: the losses of one process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command

from furlong.cli.main import main
from furlong.config.schema import RunConfig
from furlong.cost import machine
from furlong.plan.plan import Layout
from furlong.planners import search
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions
from furlong.train import run_model
from furlong.train.checkpoints import Checkpoints
from furlong.train.processes import Launch
from furlong.train.run_folder import decision_of, shrunk, values_of

FLAGS = (
    "--model.dtype=float64", "--train.steps=4", "--train.epochs=null", "--chunks.size=auto",
    "--train.eval_train_share=0.5", "--train.sequences_per_step=6",
)  # fmt: skip


def records(run: Path, key: str) -> list[Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def takes(arguments: list[str], method: str) -> None:
    """The command with plans by `method`: `auto` would take local sequences only if they gained
    something, which they do not in tiny models."""
    if method == search.LOCAL:
        best_plan = search.BatchPlans.best_plan

        def last_of(*args: Any, **values: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(search, "LAYOUT_SLACK", -1e9)
                return best_plan(*args, **values)

        search.BatchPlans.best_plan = last_of  # type: ignore[method-assign]
        run_command(arguments)
    else:
        run_command([*arguments, f"--chunks.method={method}"])


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (("--parallel.sp=2",), "places"),
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


def takes_until_saved(arguments: list[str], method: str) -> None:
    """The same, until the first process is killed after the first checkpoint."""
    save = Checkpoints.save

    def saved(*args: Any, **values: Any) -> Any:
        save(*args, **values)
        if os.environ["RANK"] == "0":  # which has given the checkpoint its name
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpoints.save = saved  # type: ignore[method-assign]
    takes(arguments, method)


def takes_with_less_memory(arguments: list[str], method: str) -> None:
    """The same, where hardly any memory is free now."""
    run_model.free_ram_budget_bytes = machine.free_ram_budget_bytes = lambda: 2**16
    takes(arguments, method)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_same_plans(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    layout, method = "--parallel.pp=2", "infinipipe"

    def run(name: str, function: Any, *flags: str) -> list[int | None]:
        arguments = tiny_run.arguments(tmp_path / name, *FLAGS, layout, *flags)
        arguments += ["--train.save_every_steps=2"]
        ended = Launched(tmp_path / "out", function, arguments, method).ended(120)
        return [process.code for process in ended]

    assert run("whole", takes) == [0, 0]
    assert run("killed", takes_until_saved)[0] == -9
    assert run("killed", takes_with_less_memory, "--resume") == [0, 0]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert records(killed, "plan_method") == [method] * 4
    assert records(killed, "loss") == records(whole, "loss")
    weights = [(one / "model" / "model.safetensors").read_bytes() for one in (whole, killed)]
    assert weights[0] == weights[1]


def test_rivals_end_with_a_step_that_did_not_fit(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Also in a run that was resumed, which begins with the smaller chunks."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(tiny_run.folder / "model"), "dtype": "float64"},
            "data": {"train": str(tiny_run.folder / "texts"), "max_seq_len": 256},
            "out": str(tmp_path),
        }
    )
    chosen = Decision(ChunkOptions(size=64), "", layout=Layout(sp=2), budget_bytes=2**30)
    smaller = shrunk(chosen, ChunkOptions(size=32))
    same, still_smaller = shrunk(chosen, chosen.options), shrunk(smaller, smaller.options)
    expected = ((chosen, True), (same, True), (smaller, False), (still_smaller, False))
    model = run_model.RunModel.read(
        config, torch.device("cpu"), Launch(num_processes=2, num_local=2)
    )
    for decision, is_free in expected:
        decision = decision_of(json.loads(json.dumps(values_of(decision))))
        found = run_model.batch_plans_of(config, model, decision)
        assert found is not None and found.has_shrunk != is_free
        assert 2**29 < found.space.question.limits.limit_bytes < 2**30
