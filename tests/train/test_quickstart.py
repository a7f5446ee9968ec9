"""The quickstart's table, of a run that is over: what it reads of a run folder must be there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli.main import main

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.mark.slow
def test_the_table_of_a_run(
    tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    held_out = f"--data.eval={tiny_run.folder / 'texts'}"
    assert main(tiny_run.arguments(run, held_out)) == 0
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    assert spec is not None and spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    assert quickstart.report(run) in (0, 1)  # 1: a tiny model may learn less than a nat
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err, printed.err
    assert "extra memory chunk by chunk" in printed.out
    assert "unchunked needs" in printed.out
