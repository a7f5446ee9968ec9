"""`furlong.Trainer` from Python: the run of the command, hooks, more steps, a trace, a subclass."""

from __future__ import annotations

import copy
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TinyRun
from safetensors.torch import load_file

import furlong
from furlong.cli.main import main
from furlong.config.sources import parse_run
from furlong.data import cache
from furlong.errors import CheckpointError, ConfigError
from furlong.files import checksum
from furlong.train.objective import OBJECTIVES, Objective
from furlong.train.processes import Launch, Processes
from furlong.train.run_folder import CHECKPOINTS, list_checkpoints, newest_checkpoint, step_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "subclass_trainer.py"
PLAIN = ("--train.epochs=null", "--train.schedule=constant", "--train.warmup_steps=0")


def config_of(tiny_run: TinyRun, out: Path, *flags: str) -> Any:
    return parse_run(tiny_run.arguments(out, *flags)[1:])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Noting(furlong.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_step_end(self, trainer: furlong.Trainer, figures: Any) -> None:
        gradients = [p.grad for p in trainer.model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        self.seen.append(("step", trainer.progress.step, figures.loss))

    def on_evaluate(self, trainer: furlong.Trainer, evaluations: Any) -> None:
        self.seen.append(("evaluate", trainer.progress.step, *evaluations))

    def on_save(self, trainer: furlong.Trainer) -> None:
        name = f"step-{trainer.progress.step:08d}"
        assert (trainer.checkpoints.folder / name / "manifest.json").exists()
        self.seen.append(("save", trainer.progress.step))

    def on_export(self, trainer: furlong.Trainer, report: Any) -> None:
        assert Path(report.export_folder).is_dir()
        self.seen.append(("export", report.exported_step))

    def on_train_end(self, trainer: furlong.Trainer, report: Any) -> None:
        self.seen.append(("end", report.num_steps))


def test_a_trainer_is_the_command_with_hooks(tiny_run: TinyRun, tmp_path: Path) -> None:
    flags = ("--train.epochs=1", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}")
    assert main(tiny_run.arguments(tmp_path / "command", *flags)) == 0
    config = config_of(tiny_run, tmp_path / "python", *flags)
    noting = Noting()
    with furlong.Trainer(config.model_dump(), callbacks=[noting]) as trainer:
        report = trainer.train()
    assert report is not None and report.num_steps == 3
    assert same(weights(tmp_path / "python"), weights(tmp_path / "command"))
    assert [one[:2] for one in noting.seen] == [
        ("evaluate", 0), ("step", 1), ("step", 2), ("save", 2), ("step", 3), ("save", 3),
        ("evaluate", 3), ("export", 3), ("end", 3),
    ]  # fmt: skip
    records = map(json.loads, (tmp_path / "command" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert [one[2] for one in noting.seen if one[0] == "step"] == losses


def test_a_loss_of_ones_own_is_one_object(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures are in the records of steps and evaluations, whatever they are called."""

    class Doubled(Objective):
        def compute(self, *args: Any, **named: Any) -> Any:
            result = super().compute(*args, **named)
            loss, total = 2 * result.loss, 2 * result.loss_sum
            return replace(result, loss=loss, loss_sum=total, metrics={"half": result.loss})

    monkeypatch.setitem(OBJECTIVES, "sft", lambda settings: Doubled())
    run, held_out = tmp_path / "run", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}"
    assert main(tiny_run.arguments(run, "--train.epochs=1", held_out)) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 3 and all(one["loss"] == 2 * one["half"] for one in steps)
    evaluated = [record for record in records if "eval_loss" in record]
    assert all(
        record["eval_loss"] == pytest.approx(2 * record["eval_half"]) for record in evaluated
    )


def test_steps_are_taken_again_from_a_state(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Weights, moments, generators, schedule and data: what a checkpoint holds, in memory."""
    adapters = ("--model.lora.rank=2", "--model.lora.dropout=0.3")
    with furlong.Trainer(config_of(tiny_run, tmp_path / "run", *adapters)) as trainer:

        def taken(num_steps: int) -> list[float | None]:
            batches, losses = trainer.batches(), []
            for _ in range(num_steps):
                batch = next(batches)
                figures = trainer.step(batch)
                losses.append(figures.loss)
            return losses

        taken(2)
        before = copy.deepcopy(trainer.state_dict())
        losses = taken(3)
        after = copy.deepcopy(trainer.state_dict())
        trainer.load_state_dict(before)
        assert taken(3) == losses
        again = trainer.state_dict()
        assert same(again["tensors"], after["tensors"])
        assert again["progress"]["data"] == after["progress"]["data"]


def test_batches_go_on_from_a_state_that_was_loaded(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Those of a loop, and those of `train`, which has looked one ahead."""

    seen: list[tuple[int, Any]] = []

    class Back(furlong.Callback):
        def on_step_end(self, trainer: furlong.Trainer, figures: Any) -> None:
            seen.append((trainer.progress.step, trainer.progress.data))
            if len(seen) == 3:
                trainer.load_state_dict(first)

    flags = ("--train.epochs=2", "--train.save_every_steps=9")
    with furlong.Trainer(config_of(tiny_run, tmp_path / "run", *flags)) as trainer:
        batches = trainer.batches()
        trainer.step(next(batches))
        first = copy.deepcopy(trainer.state_dict())
        places = [trainer.step(next(batches)) and trainer.progress.data for _ in range(2)]
        trainer.load_state_dict(first)
        assert [next(batches).next_state, next(batches).next_state] == places
        trainer.load_state_dict(first)
        trainer.callbacks = [Back()]
        trainer.train()
    assert [step for step, _ in seen] == [2, 3, 4, 2, 3, 4, 5, 6]
    assert [place for _, place in seen[:2]] == places == [place for _, place in seen[3:5]]


def test_a_run_that_went_back_saves_over_what_it_has_left(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Else `--resume` would go on from a step that did not happen."""
    folder = tmp_path / "run" / CHECKPOINTS

    def saved() -> list[int]:
        trainer.step(next(trainer.batches()))
        trainer.save()
        return [step_of(checkpoint) for checkpoint in list_checkpoints(folder)]

    with furlong.Trainer(config_of(tiny_run, tmp_path / "run")) as trainer:
        saved()
        first = copy.deepcopy(trainer.state_dict())
        assert (saved(), saved()) == ([1, 2], [1, 2, 3])
        trainer.load_state_dict(first)
        assert trainer.saved_step == 0  # that of step 1 is not the newest
        assert saved() == [1, 2]
        trainer.save()  # where there is one already
    newest = newest_checkpoint(folder)
    assert newest is not None and newest.state["step"] == trainer.saved_step == 2


@pytest.mark.parametrize(
    "change",
    [
        "optimizer", "shape", "dtype", "more", "rng.cpu", "progress", "none", "step", "data",
        "place",
    ],
)  # fmt: skip
def test_a_state_that_is_not_whole_changes_nothing(
    tiny_run: TinyRun, tmp_path: Path, change: str
) -> None:
    with furlong.Trainer(config_of(tiny_run, tmp_path / "run")) as trainer:
        whole = copy.deepcopy(trainer.state_dict())
        state = copy.deepcopy(whole)
        tensors = state["tensors"]
        norm = next(name for name in tensors if name.endswith("norm.weight"))
        for name in [*tensors]:
            tensors[name] = torch.ones_like(tensors[name])
            if name.startswith(change):
                del tensors[name]
        if change == "shape":
            tensors[norm] = tensors[norm][:1]
        elif change == "dtype":
            tensors[norm] = tensors[norm].to(torch.float16)
        elif change == "more":
            tensors["model.more"] = tensors[norm]
        elif change == "none":
            tensors[norm] = None
        elif change == "place":
            state["progress"]["data"]["batch"] = 3  # of an epoch of 3
        state["progress"].pop(change, None)
        state.pop(change, None)
        with pytest.raises(CheckpointError) as caught:
            trainer.load_state_dict(state)
        assert caught.value.source == "load_state_dict of Trainer"
        assert same(trainer.state_dict()["tensors"], whole["tensors"])


def test_a_run_that_has_ended_goes_on_with_more_steps(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert main(tiny_run.arguments(whole, *PLAIN, "--train.steps=4")) == 0
    assert main(tiny_run.arguments(run, *PLAIN, "--train.steps=2")) == 0
    capsys.readouterr()
    assert main(tiny_run.arguments(run, *PLAIN, "--train.steps=4", "--resume")) == 0
    told = capsys.readouterr().out
    assert "train.steps = 4, before 2" in told and "learning rate" in told
    assert same(weights(run), weights(whole))
    assert json.loads((run / "report.json").read_text())["num_steps"] == 4
    with pytest.raises(CheckpointError, match="3 steps for a run that has taken 4"):
        furlong.Trainer(config_of(tiny_run, run, *PLAIN, "--train.steps=3"), resume=True)


def test_a_profiler_traces_the_steps_that_are_named(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--train.epochs=1", "--log.profile_steps=[2, 9]")
    assert main(tiny_run.arguments(run, *flags)) == 0
    trace = json.loads((run / "profile" / "process-0.json").read_text())
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert any("mm" in name for name in names)


def test_what_a_trainer_of_an_ended_run_says(tiny_run: TinyRun, tmp_path: Path) -> None:
    config = config_of(tiny_run, tmp_path / "run", "--train.epochs=1")
    with furlong.Trainer(config) as trainer:
        report = trainer.train()
    with furlong.Trainer(config, resume=True) as trainer:
        assert trainer.train() == report
        with pytest.raises(AttributeError, match=r"run in .* is finished"):
            trainer.evaluate()
        assert not hasattr(trainer, "model")
    with pytest.raises(ConfigError, match="resume=True"):
        furlong.Trainer(config)


@pytest.mark.parametrize("callback", [Noting, object()])
def test_what_is_no_callback_is_refused_at_the_start(
    tiny_run: TinyRun, tmp_path: Path, callback: Any
) -> None:
    config = config_of(tiny_run, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"furlong\.Callback"):
        furlong.Trainer(config, callbacks=[callback])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("local_number", [0, 1])
def test_one_process_of_a_machine_compares_the_bytes_of_the_cache(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_number: int
) -> None:
    class LoadedError(Exception):
        """The data is there."""

    def choose(trainer: furlong.Trainer) -> None:
        assert len(trainer.train_data) == 8
        raise LoadedError

    config = config_of(tiny_run, tmp_path / "run")
    furlong.Trainer(config_of(tiny_run, tmp_path / "first")).close()  # it is tokenized
    compared = []
    monkeypatch.setattr(cache, "checksum", lambda file: compared.append(file) or checksum(file))
    monkeypatch.setattr(furlong.Trainer, "_choose_plan", choose)
    launch = Launch(local_number=local_number, num_local=2)
    with pytest.raises(LoadedError):
        furlong.Trainer(config, processes=Processes(launch))
    assert bool(compared) == (local_number == 0)


def test_one_of_several_processes_trains_with_them(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "a")
    with pytest.raises(ConfigError, match="one of 2 that were started together"):
        furlong.Trainer(config_of(tiny_run, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_loop_of_ones_own_goes_on_from_its_checkpoint(tiny_run: TinyRun, tmp_path: Path) -> None:
    def steps(trainer: furlong.Trainer, last: int) -> None:
        for batch in trainer.batches():
            trainer.step(batch)
            if trainer.progress.step == last:
                return

    config = config_of(tiny_run, tmp_path / "own", "--train.epochs=1")
    with furlong.Trainer(config) as trainer:
        steps(trainer, 2)
        trainer.save()
    with furlong.Trainer(config, resume=True) as trainer:
        assert trainer.progress.step == 2
        steps(trainer, trainer.num_steps)
        trainer.export()
    with furlong.Trainer(config_of(tiny_run, tmp_path / "whole", "--train.epochs=1")) as trainer:
        trainer.train()
    assert same(weights(tmp_path / "own"), weights(tmp_path / "whole"))


def test_the_example_of_a_subclass(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = tmp_path / "run", tmp_path / "run.json"
    file.write_text(config_of(tiny_run, run, "--train.epochs=1").model_dump_json())
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(file)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    records = [json.loads(line) for line in (run / "gradients.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    num_weights = sum(weight.numel() for weight in weights(run).values())
    assert all(0 < sum(record["below"].values()) <= num_weights for record in records)
