"""Run folders that cannot be read, written or believed: four parts, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.train.metrics import MetricsLog
from furlong.train.run_folder import clear_export

ONCE = ("--train.epochs=1", "--train.save_every_steps=1")
NOBODY = 65534
AS_NOBODY = (
    "import os, sys\n"
    "import furlong.cli.train, furlong.train.start\n"  # the interpreter may be out of reach
    "from furlong.cli.main import main\n"
    "main(['--version'])\n"
    f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    return four_parts(capsys.readouterr().err)


def four_parts(message: str) -> str:
    names = [line.split(":")[0] for line in message.splitlines()]
    assert names == ["given", "required", "from", "change"], message
    return message


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    original = MetricsLog.step

    def then_act(log: MetricsLog, at: int, figures: Any) -> None:
        original(log, at, figures)
        if at == step:
            act()

    monkeypatch.setattr(MetricsLog, "step", then_act)


@pytest.fixture
def run(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """The folder of a run that was killed after its second checkpoint."""
    run = tmp_path / "run"
    tiny_run.leave_run(run, *ONCE)
    shutil.rmtree(run / "model")
    (run / "report.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    return run


def test_a_folder_in_the_place_of_a_file(
    tiny_run: TinyRun, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    message = refused(capsys, tiny_run.arguments(run, *ONCE, "--resume"))
    assert f"{run / 'metrics.jsonl'}: Is a directory" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_run_folder_of_someone_else(
    tiny_run: TinyRun, run: Path, tmp_path: Path, mode: int
) -> None:
    for folder in (run, *run.rglob("*")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    for parent in (tiny_run.folder, *tiny_run.folder.parents, *run.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    (run / "checkpoints").chmod(mode)
    before = sorted(run.rglob("*"))
    finished = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *tiny_run.arguments(run, *ONCE, "--resume")],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": "/nonexistent"},
    )
    assert finished.returncode == 2, finished.stderr
    assert "Permission denied" in four_parts(finished.stderr)
    assert sorted(run.rglob("*")) == before


def test_a_run_folder_that_is_removed_in_mid_run(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    at_step(monkeypatch, 3, lambda: shutil.rmtree(run))
    message = refused(capsys, tiny_run.arguments(run))
    assert f"{run}/" in message and "No such file or directory" in message
    assert not run.exists()


def test_what_lies_in_the_place_of_the_model_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("model.before", "model.before-2")):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "precious.txt").write_text(str(number))
        clear_export(tmp_path)
        assert (tmp_path / name / "precious.txt").read_text() == str(number)
        assert f"is kept as {name}" in capsys.readouterr().out
    clear_export(tmp_path)
    assert capsys.readouterr().out == ""
