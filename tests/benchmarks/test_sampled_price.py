"""benchmarks/sampled.py: what it compares, promises and refuses to compare."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sampled
from measuring import Measurement

from furlong.planners.options import ChunkOptions

ROOT = Path(__file__).resolve().parents[2]
EXACT = Measurement(10.0, 20.0, 1000, 2.0, 3.0, 8192)
SAMPLED = Measurement(4.0, 8.0, 1000, 2.1, 5.0, 8192)


def results(**changes: Measurement) -> dict[str, list[Measurement]]:
    """Measurements that keep every promise, but for `changes` (by the beginning of the name)."""
    found = {}
    for name in sampled.contenders(128):
        usual = EXACT if name.startswith("exact") else SAMPLED
        if name.endswith("report_loss"):
            usual = replace(usual, loss=EXACT.loss)
        found[name] = [changes.get(name.replace(", keep=", "_").replace(", ", "_"), usual)]
    return found


def verdicts(found: dict[str, list[Measurement]]) -> list[str]:
    return [promise.verdict for promise in sampled.promises(found)]


def test_only_the_sample_differs_between_what_is_promised():
    dials = sampled.contenders(128)
    options = {name: ChunkOptions(**given) for name, given in dials.items()}
    fixed, exact = options["fixed, keep=kv"], options["exact, keep=kv"]
    assert fixed.sampling is not None and exact.sampling is None
    assert replace(fixed, sample=None) == exact
    assert sampled.num_drawn(8192, dials["fixed, keep=kv"]) == [8] * 8
    drawn = sampled.num_drawn(8192, dials["unbiased, keep=kv"])
    assert len(set(drawn)) > 1 and 4 < sum(drawn) / len(drawn) < 12


def test_promises_are_kept_at_their_bounds_and_missed_beyond():
    assert verdicts(results()) == ["met", "met"]
    assert verdicts(results(fixed_kv=replace(SAMPLED, step_s=4.01))) == ["MISSED", "met"]
    assert verdicts(results(fixed_kv=replace(SAMPLED, extra_bytes=1001))) == ["met", "MISSED"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("exact_attention", replace(EXACT, grad_norm=3.1)),
        ("fixed_attention", replace(SAMPLED, grad_norm=5.1)),
        ("fixed_kv_report_loss", replace(SAMPLED, loss=2.1)),
        ("fixed_kv_report_loss", replace(SAMPLED, loss=2.0, grad_norm=5.1)),
    ],
)
def test_another_loss_or_gradient_is_seen(name, other):
    assert sampled.disagreeing(results()) == []
    assert len(sampled.disagreeing(results(**{name: other}))) == 1


@pytest.mark.nightly
def test_sampled_runs_and_all_agree(tmp_path):
    values = tmp_path / "sampled.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "sampled.py"), "--tokens", "512"]
    options = ["--rounds", "1", "--json", str(values)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert values.exists(), ended.stdout + ended.stderr
    found = json.loads(values.read_text())
    assert found["errors"] == [] and len(found["promises"]) == 2
