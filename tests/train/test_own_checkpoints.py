"""What a run goes on from is its own: config, architecture and step of a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun
from transformers import AutoConfig

from furlong.cli.main import main

LORA = "--model.lora.rank=2"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name != ".lock")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "given", "required", "from", "change",
    ]  # fmt: skip
    return message


@pytest.fixture
def own_model(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    shutil.copytree(tiny_run.folder / "model", tmp_path / "model")
    return tmp_path / "model"


def edit_config(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_edited_config_of_the_run_is_refused(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, stopped_after=4)
    config = json.loads((run / "config.json").read_text())
    config["train"]["lr"] = 0.5
    (run / "config.json").write_text(json.dumps(config))
    before = files_of(run)
    message = refused(capsys, ["train", str(run / "config.json"), "--resume"])
    assert "train.lr = 0.5, the run has 0.01" in message and "step-00000004" in message
    assert files_of(run) == before


@pytest.mark.parametrize("flags", [(), (LORA,)], ids=["all weights", "adapters"])
@pytest.mark.few(1)
def test_another_architecture_is_refused(
    tiny_run: TinyRun,
    own_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    run = tmp_path / "run"
    flags = (*flags, f"--model.name={own_model}")
    tiny_run.leave_run(run, *flags, stopped_after=4)
    config = (own_model / "config.json").read_text()
    before = files_of(run)
    for key, value, named in (
        ("rope_parameters", {"rope_type": "default", "rope_theta": 100.0}, "rope_theta = 100.0"),
        ("rms_norm_eps", 1e-3, "rms_norm_eps = 0.001, trained with 1e-06"),
    ):
        edit_config(own_model, **{key: value})
        for arguments in (
            tiny_run.arguments(run, *flags, "--resume"),
            ["export", str(run)],
            ["export", str(run / "checkpoints" / "step-00000004")],
        ):
            assert named in refused(capsys, arguments)
        (own_model / "config.json").write_text(config)
    assert files_of(run) == before
    # where it comes from and in which type it was saved changes nothing
    edit_config(own_model, transformers_version="4.0.0", dtype="bfloat16", _name_or_path="x")
    assert main(tiny_run.arguments(run, *flags, "--resume")) == 0


def test_the_changed_rope_is_part_of_the_architecture(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--model.rope.rope_type=linear", "--model.rope.factor=4")
    tiny_run.leave_run(run, *flags, stopped_after=4)
    state = json.loads((run / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["architecture"]["rope_parameters"]["factor"] == 4.0
    assert main(tiny_run.arguments(run, *flags, "--resume")) == 0
    exported = AutoConfig.from_pretrained(run / "model")
    assert exported.rope_parameters["factor"] == 4.0


def lose_all(model: Path) -> None:
    shutil.rmtree(model)


def cut_weights(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1])


@pytest.mark.parametrize("lose", [lose_all, cut_weights])
def test_the_model_of_a_finished_run_is_exported_again(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], lose: Any
) -> None:
    run = tmp_path / "run"
    arguments = tiny_run.arguments(run, "--train.epochs=1")
    tiny_run.leave_run(run, "--train.epochs=1")
    weights = (run / "model" / "model.safetensors").read_bytes()
    metrics = (run / "metrics.jsonl").read_text()
    lose(run / "model")
    left = {path.name for path in (run / "model").glob("*")}
    assert main([*arguments, "--resume"]) == 0
    assert "it is exported again" in capsys.readouterr().out
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert (run / "model" / "tokenizer.json").exists()
    assert {path.name for path in (run / "model.before").glob("*")} == left
    assert (run / "metrics.jsonl").read_text() == metrics
    assert main([*arguments, "--resume"]) == 0
    assert "is finished: its model is" in capsys.readouterr().out


def test_a_finished_run_without_model_and_checkpoints(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = tiny_run.arguments(run, "--train.epochs=1", "--train.save_every_steps=0")
    assert main(arguments) == 0
    shutil.rmtree(run / "model")
    message = refused(capsys, [*arguments, "--resume"])
    assert f"a finished run without {run / 'model'}, and no checkpoint" in message


def test_a_run_without_a_checkpoint_says_that_it_begins_again(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, "--train.save_every_steps=0", stopped_after=4)
    assert main(tiny_run.arguments(run, "--train.save_every_steps=0", "--resume")) == 0
    assert f"no checkpoint in {run}: the run begins again" in capsys.readouterr().out
