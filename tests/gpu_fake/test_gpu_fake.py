"""Whole steps on a GPU that is not there: every call of a kernel by its own rules, no race, no wait
of the host. What tensors hold is not known here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MOST_SYNCS = 2
"""Of a step: its loss, and the times of its actions."""
KINDS = ("qwen2", "gemma3_text", "mistral", "gpt_oss", "deepseek_v3", "qwen3_next")
ALL = [
    f"{kind}, {target}, {order}"
    for kind in KINDS
    for target in ("none", "cpu", "disk")
    for order in ("chunk-first", "layer-first")
]
QUICK = ["qwen2, cpu, layer-first", "mistral, cpu, chunk-first", "gemma3_text on an A100"]
MUTANTS = {
    "none": 0,
    "a lease that waits for no read": 1,
    "lanes that wait for nothing": 1,
    "buffers that are free at once": 1,
    "weights that wait for nothing before": 1,
    "weights that wait for nothing behind": 1,
}

Seen = Callable[..., dict[str, dict[str, Any]]]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, for a stand-in")


@pytest.fixture(scope="module")
def seen(once: Callable[..., Any]) -> Seen:
    """What cases were seen to do, in one process."""
    return lambda *cases: dict(once(f"{cases[0]}, {len(cases)} cases", partial(run, *cases)))


def run(*cases: str) -> dict[str, dict[str, Any]]:
    """Run cases in a process of their own: torch may not be loaded before."""
    own = HERE, HERE.parent / "ops", HERE.parents[1] / "benchmarks"
    path = os.pathsep.join((*map(str, own), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(HERE / "cases.py"), *cases], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}, check=False,
        timeout=3600,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert done.returncode == 0 and len(found) == len(cases), done.stderr[-3000:]
    return {one["case"]: one for one in found}


def require_right(found: dict[str, Any]) -> None:
    assert "error" not in found, found["error"]
    assert found["problems"] == found.get("first", []) == []
    assert 1 <= found["host_syncs"] <= MOST_SYNCS, found["syncs"]  # the loss, at least
    assert found["no_room"] == 0, "a read that does not begin before it is needed"
    if staging := found.get("staging"):
        *_, before, after = found["pinned"]  # of the step, behind what the check runs
        assert 0 < before == after, "pinned memory is there before the first action"
        assert 0 < staging["held"] <= 1.01 * staging["counted"]
        assert staging["counted"] == pytest.approx(staging["most"], rel=0.07)


@pytest.fixture(scope="module")
def quick(seen: Seen) -> dict[str, dict[str, Any]]:
    """What is seen of the slow cases, which share a process."""
    more = "values of a tree", "old cuDNN", "offloaded weights"
    return seen(*QUICK, *more, *(f"mutant: {what}" for what in MUTANTS))


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_steps(case, quick):
    require_right(quick[case])


@pytest.mark.slow
def test_weights_in_cpu_memory_come_to_the_gpu_and_their_gradients_go_back(quick):
    """Copies are waited for where the step ends, once for each gradient, and no earlier."""
    found = quick["offloaded weights"]
    assert "error" not in found, found["error"]
    assert found["problems"] == [] and found["held"] == ["cpu"]
    assert found["host_syncs"] == MOST_SYNCS + found["num_parameters"]
    assert found["syncs"]["event.synchronize at "] == found["num_parameters"], found["syncs"]


@pytest.mark.slow
def test_token_values_of_a_tree(quick):
    """The second phase runs on autograd's thread. At its end the lanes of its own pools end too,
    twice, when there is nothing left to wait for."""
    found = quick["values of a tree"]
    assert "error" not in found and found["problems"] == [], found
    assert found["host_syncs"] <= MOST_SYNCS - 1 + 4, found["syncs"]


@pytest.mark.slow
def test_a_version_of_cudnn_that_reads_out_of_bounds_is_not_called(quick):
    found = quick["old cuDNN"]
    require_right(found)
    assert set(found["calls"]) == {"flash dense", "flash packed"}


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS)
def test_a_wait_that_is_left_out_is_a_race(what, quick):
    found = quick[f"mutant: {what}"]
    races = [text for text in found["problems"] if text.startswith("RACE")]
    assert bool(races) == bool(MUTANTS[what]), found["problems"]
    assert len(races) == len(found["problems"])


@pytest.mark.slow
def test_few_kernels_lie_between_products(seen):
    """Of Qwen3-8B, per layer and chunk of 8,192 tokens."""
    most = {"all weights": (86, 12.8e9), "LoRA": (111, 12.1e9)}
    found = seen(*(f"elementwise, {what}" for what in most))
    for what, (num_kernels, num_bytes) in most.items():
        case = found[f"elementwise, {what}"]
        assert "error" not in case, case
        assert sum(case["kernels"].values()) <= num_kernels
        assert sum(case["bytes"].values()) <= num_bytes


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in QUICK])
def test_all_steps(case, seen):
    require_right(seen(*(case for case in ALL if case not in QUICK))[case])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_benchmark_runs_as_on_a_gpu(seen):
    """The shapes of 7B in two layers, at the lengths that it measures."""
    found = seen("benchmark: auto", "benchmark: host")
    for case in found.values():
        assert "error" not in case and case["problems"] == [], case
    by_cudnn = {"cuDNN": 1.0}
    names = "7B, 128K, auto", "7B, 128K, compiled"
    assert found["benchmark: auto"]["results"] == dict.fromkeys(names, by_cudnn)
    names = "7B, 64K, device", "7B, 64K, cpu"
    assert found["benchmark: host"]["results"] == dict.fromkeys(names, by_cudnn)
