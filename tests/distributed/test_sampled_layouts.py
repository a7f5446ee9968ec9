"""A run that samples on two processes is the run on one: draws, losses, norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command

from furlong.cli.main import main

FLAGS = (
    "--model.dtype=float64", "--train.steps=4", "--train.epochs=null", "--chunks.size=16",
    "--chunks.sample={rate: 0.5, label_rate: 0.5}",
)  # fmt: skip
KEYS = ("loss", "grad_norm", "drawn_share")


def figures(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in KEYS if key in line} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--parallel.dp=2", "--parallel.pp=2"])
def test_two_processes_draw_as_one(tiny_run: TinyRun, tmp_path: Path, layout: str) -> None:
    data = tmp_path / "tokens.jsonl"
    # longer than a chunk: on replicas no short sequence fills another one's last chunk
    lens = (40, 90, 25, 61, 33, 48)
    records = [
        {
            "input_ids": [i * i % 300 for i in range(n)],
            "labels": [-100] * 20 + [i % 7 for i in range(n - 20)],
        }
        for n in lens
    ]
    data.write_text("\n".join(map(json.dumps, records)))
    flags = (*FLAGS, f"--data.train={data}")
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(tiny_run.arguments(one, *flags)) == 0
    started = Launched(tmp_path / "out", run_command, tiny_run.arguments(two, *flags, layout))
    ended = started.ended(120)
    assert [process.code for process in ended] == [0, 0], ended
    expected, found = figures(one), figures(two)
    assert sum("drawn_share" in line for line in expected) == 4
    assert any(0 < line.get("drawn_share", 1) < 1 for line in expected)
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, truth in zip(found, expected, strict=True):
        assert line == pytest.approx(truth, rel=1e-8), (line, truth)
