"""A step that takes more than memory.device is told, also where that is let pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main
from furlong.train.memory import SCRATCH_BYTES, UsedMemory

BUDGET_BYTES = 2**28


@pytest.mark.parametrize("over_bytes", [-1, SCRATCH_BYTES // 2])
def test_a_budget_that_is_passed_is_told(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any, monkeypatch: Any, over_bytes: int
) -> None:
    monkeypatch.setattr(UsedMemory, "peak_bytes", lambda _: BUDGET_BYTES + over_bytes)
    flags = ("--train.steps=2", "--train.epochs=null", f"--memory.device={BUDGET_BYTES}")
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 0
    told = capsys.readouterr().out
    count = told.count("warning: step 1 has used 288 MiB, memory.device is 256 MiB")
    assert count == (over_bytes > 0), told
