"""The quickstart's table, of a run that is over: what it reads of a run folder must be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.tiny_runs import TinyRun

from furlong.cli.main import main

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_the_table_of_a_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = f"--data.eval={tiny_run.folder / 'texts'}"
    assert main(tiny_run.arguments(run, held_out)) == 0
    ended = subprocess.run(
        [sys.executable, str(QUICKSTART), "report", str(run)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode in (0, 1), ended.stderr  # 1: a tiny model may learn less than a nat
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "extra memory chunk by chunk" in ended.stdout
    assert "unchunked needs" in ended.stdout
