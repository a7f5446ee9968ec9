"""The example of preference training, run as its first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "preference.py"
LIMIT_S = 120


@pytest.mark.nightly
def test_the_margin_of_held_out_pairs_rises(tmp_path: Path) -> None:
    before = os.times()
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    after = os.times()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rewards/margins" in ended.stdout
    (log,) = (tmp_path / "runs" / "preference").glob("2*/metrics.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    margins = [one["eval_rewards/margins"] for one in records if "eval_loss" in one]
    assert margins[-1] > margins[0] + 0.1
    # the machine may be shared: what counts is the work
    used_s = after.children_user + after.children_system
    assert used_s - before.children_user - before.children_system < LIMIT_S
