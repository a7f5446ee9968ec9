"""Signals at every moment of a run: what is computed is saved, and the run ends in order."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.load import slowed
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.train import build, checkpoints, trainer
from furlong.train.metrics import MetricsLog
from furlong.train.run_folder import newest_checkpoint
from furlong.train.stop import STOP_SIGNALS, Ended, QuietEnd, StopRequest

PROGRAM = "import sys; from furlong.cli.main import main; sys.exit(main(sys.argv[1:]))"
ONCE = "--train.epochs=1"
"""Three steps."""


def steps_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], object]
) -> None:
    """`act` runs at the first call of a function, before it."""
    original = getattr(owner, name)
    calls = []

    def acting(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            act()
        return original(*args, **named)

    monkeypatch.setattr(owner, name, acting)


def test_signals_during_the_last_save_lose_nothing(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def signals() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)

    before(monkeypatch, MetricsLog, "step", lambda: signal.raise_signal(signal.SIGTERM))
    before(monkeypatch, checkpoints, "_write_tensors", signals)
    assert main(tiny_run.arguments(run)) == 0
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None and newest.path.name == "step-00000001"


def test_a_second_ctrl_c_during_a_save_leaves_the_checkpoint_before(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saves = []

    def interrupt(*args: Any, **named: Any) -> Any:
        saves.append(args)
        if len(saves) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(*args, **named)

    original = checkpoints._write_tensors
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_write_tensors", interrupt)
        assert main(tiny_run.arguments(run, ONCE)) == 130
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None and newest.path.name == "step-00000002"
    assert main(tiny_run.arguments(run, ONCE, "--resume")) == 0
    assert steps_of(run) == [1, 2, 3]


def test_a_signal_during_the_export_ends_nothing(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before(monkeypatch, trainer, "export_model", lambda: signal.raise_signal(signal.SIGHUP))
    assert main(tiny_run.arguments(run, ONCE)) == 0
    assert (run / "report.json").exists()


def test_a_second_ctrl_c_during_the_export_leaves_a_run_that_goes_on(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        before(patched, trainer, "export_model", twice)
        assert main(tiny_run.arguments(run, ONCE)) == 130
    assert not (run / "report.json").exists()
    assert main(tiny_run.arguments(run, ONCE, "--resume")) == 0
    assert steps_of(run) == [1, 2, 3]


def test_a_signal_while_the_data_are_read_ends_in_one_line(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before(monkeypatch, build, "load_data", lambda: signal.raise_signal(signal.SIGTERM))
    assert main(tiny_run.arguments(tmp_path / "run")) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines() == ["ended by SIGTERM"]
    assert not (tmp_path / "run").exists()


def test_every_stop_signal_is_taken_and_put_back() -> None:
    present = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        with StopRequest() as stop:
            signal.raise_signal(number)
            assert stop.signal_name == number.name
        with pytest.raises(Ended), QuietEnd() as end:
            signal.raise_signal(number)
        assert end.number == number
    assert present == {number: signal.getsignal(number) for number in STOP_SIGNALS}


def test_ignored_signals_and_a_callers_own_handlers_stay() -> None:
    calls: list[int] = []
    kept = {
        signal.SIGHUP: signal.SIG_IGN,
        signal.SIGUSR1: lambda number, frame: calls.append(number),
    }
    present = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number, handler in kept.items():
            signal.signal(number, handler)
        with StopRequest() as stop:
            for number in kept:
                signal.raise_signal(number)
            assert not stop.asked and calls == [signal.SIGUSR1]
            signal.raise_signal(signal.SIGUSR2)
            assert stop.signal_name == "SIGUSR2"
    finally:
        for number, before_all in present.items():
            signal.signal(number, before_all)


@pytest.mark.slow
def test_a_terminal_that_is_closed_leaves_a_checkpoint(tiny_run: TinyRun, tmp_path: Path) -> None:
    """What a closed ssh session does: SIGHUP, and from then on no output goes anywhere."""
    run = tmp_path / "run"
    arguments = tiny_run.arguments(run, "--train.epochs=null", "--train.steps=100000")
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM, *arguments])
    started_s = time.monotonic()
    said = b""
    while b"step     10/" not in said:
        assert time.monotonic() - started_s < slowed(120), said[-2000:]
        said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None and int(newest.path.name[5:]) == steps_of(run)[-1] >= 10
