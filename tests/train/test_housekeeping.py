"""Saves, evaluations and ends of whole runs: per epoch, best, early, weights only, above a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TinyRun, signal_after
from safetensors.torch import load_file

from furlong.cli.main import main
from furlong.train.checkpoints import load_tensors, stored_tensors
from furlong.train.metrics import MetricsLog

NO_SAVES = ("--train.save_every_steps=null", "--train.saves_per_epoch=0.5")


def records(run: Path, key: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(shape, dtype=t) for name, (shape, t) in
             stored_tensors(checkpoint).items()}  # fmt: skip
    load_tensors(checkpoint, found)
    return found


def exported(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def report_of(run: Path) -> Any:
    return json.loads((run / "report.json").read_text())


def test_a_run_ends_early_and_exports_its_best_also_when_it_is_resumed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rate is so high that the held-out loss is lowest after the first step."""
    flags = [
        *NO_SAVES, "--train.lr=0.3", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}",
        "--train.eval_every_steps=null", "--train.evals_per_epoch=3", "--train.num_checkpoints=1",
        "--train.keep_best=true", "--train.early_stopping=3",
    ]  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(tiny_run.arguments(whole, *flags)) == 0
    assert "ended early: 3 evaluations without a lower" in capsys.readouterr().out
    losses = dict(records(whole, "eval_loss"))
    assert list(losses) == [0, 1, 2, 3, 4] and min(losses, key=lambda step: losses[step]) == 1
    report = report_of(whole)
    assert (report["num_steps"], report["exported_step"]) == (4, 1)
    assert (report["eval_loss_before"], report["eval_loss_after"]) == (losses[0], losses[1])
    assert checkpoints(whole) == ["step-00000001", "step-00000004"]
    best = stored(whole / "checkpoints" / "step-00000001")
    assert torch.equal(exported(whole)["model.norm.weight"], best["model.model.norm.weight"])

    with signal_after(2):
        assert main(tiny_run.arguments(halves, *flags)) == 0
    assert checkpoints(halves) == ["step-00000001", "step-00000002"]
    assert main(tiny_run.arguments(halves, *flags, "--resume")) == 0
    assert checkpoints(halves) == checkpoints(whole)
    assert same(exported(halves), exported(whole))
    for name in checkpoints(whole):
        assert same(stored(halves / "checkpoints" / name), stored(whole / "checkpoints" / name))
    assert dict(records(halves, "eval_loss")) == losses
    assert report_of(halves)["exported_step"] == 1

    capsys.readouterr()
    shard = next((whole / "checkpoints" / "step-00000001").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    more = ["--train.early_stopping=99", "--resume"]
    assert main(tiny_run.arguments(whole, *flags, *more)) == 0
    assert "is looked for anew: checkpoint step-00000001 is damaged" in capsys.readouterr().out
    assert report_of(whole)["num_steps"] == 9 and report_of(whole)["exported_step"] > 4


def test_a_best_checkpoint_that_is_damaged_costs_no_export(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def damage(log: MetricsLog, step: int, *_: Any) -> None:
        if step == 4:
            next((run / "checkpoints" / "step-00000001").glob("shard-*")).unlink()

    flags = [
        *NO_SAVES, "--train.lr=0.3", f"--data.eval={tiny_run.folder / 'held-out.jsonl'}",
        "--train.eval_every_steps=1", "--train.keep_best=true", "--train.early_stopping=3",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MetricsLog, "evaluation", damage)
        assert main(tiny_run.arguments(run, *flags)) == 0
    assert "warning: the weights of step 4 are exported" in capsys.readouterr().out
    assert report_of(run)["exported_step"] == 4
    last = stored(run / "checkpoints" / "step-00000004")
    assert torch.equal(exported(run)["model.norm.weight"], last["model.model.norm.weight"])


def test_weights_alone_are_exported_and_not_resumed(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = tiny_run.arguments(run, "--train.save_weights_only=true")
    with signal_after(3):
        assert main(arguments) == 0
    assert f"furlong export {run}" in capsys.readouterr().out
    newest = run / "checkpoints" / "step-00000003"
    assert all(name.startswith("model.") for name in stored(newest))
    assert main([*arguments, "--resume"]) == 2
    assert f"furlong export {newest}" in capsys.readouterr().err
    assert main(["export", str(run)]) == 0
    weights = load_file(run / "model-step-00000003" / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], stored(newest)["model.model.norm.weight"])


def test_a_loss_above_the_most_stops_and_the_run_goes_on_from_the_step_before(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["--model.lora.rank=2", "--model.lora.dropout=0.3", "--train.epochs=2"]  # it draws
    flags = [*lora, "--train.lr=0.5", "--train.eval_every_steps=0"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(tiny_run.arguments(whole, *flags)) == 0
    losses = dict(records(whole, "loss"))
    step = 3
    assert losses[step] > losses[step - 1]
    with signal_after(1):
        assert main(tiny_run.arguments(stopped, *flags)) == 0
    most = f"--train.max_loss={losses[step - 1]!r}"
    arguments = tiny_run.arguments(stopped, *flags, "--train.save_every_steps=99", most, "--resume")
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert f"in step {step};" in told and f"checkpoint of step {step - 1}" in told
    assert checkpoints(stopped) == ["step-00000001", f"step-{step - 1:08d}"]
    assert main(tiny_run.arguments(stopped, *flags, "--resume")) == 0
    assert dict(records(stopped, "loss")) == losses
    last = f"checkpoints/step-{max(losses):08d}"
    assert same(stored(stopped / last), stored(whole / last))


def test_the_first_step_can_be_above_it(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny_run.arguments(tmp_path / "run", "--train.max_loss=1")) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--train.saves_per_epoch=1", "--train.save_every_steps=3"], "train.save_every_steps"),
        (["--train.eval_every_steps=null"], "train.evals_per_epoch"),
        (["--train.saves_per_epoch=0", "--train.save_every_steps=null"], "train.saves_per_epoch"),
        (["--train.keep_best=true"], "data.eval = null"),
        (["--train.early_stopping=2", "--train.eval_every_steps=0", "--data.eval=x"],
         "train.eval_every_steps = 0"),
        (["--train.num_checkpoints=0"], "train.num_checkpoints"),
        (["--train.max_loss=-1"], "train.max_loss"),
    ],
)  # fmt: skip
def test_keys_that_another_makes_meaningless_are_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str],
    key: str,
) -> None:  # fmt: skip
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 2
    told = capsys.readouterr().err
    assert key in told and "required:" in told
    assert not (tmp_path / "run").exists()
