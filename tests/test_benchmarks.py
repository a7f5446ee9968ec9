"""The benchmarks' own arithmetic, and that the commands run with tiny sizes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import flat
import gpu
import gpu_part
import long
import psutil
import pytest
from harness import disagreements
from measuring import Measurement

ROOT = Path(__file__).resolve().parents[1]
STEP = flat.Step(1.0, 100, 1000, 500, 1000, 500, 0.1, 2.0, 3.0)
LENGTHS = {"short": 16_384, "timed": 65_536, "long": 131_072}
MIB = 2**20


def benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark's command, with the tree's own package."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def flat_steps(**changes: flat.Step) -> dict[str, list[flat.Step]]:
    """Steps that keep all promises, but for `changes` to those of layer-first."""
    steps = {}
    for order in ("chunk-first", "layer-first"):
        for name, num_tokens in LENGTHS.items():
            steps[f"{order}, {num_tokens:,} tokens, disk"] = [STEP]
            if order == "layer-first" and name in changes:
                steps[f"{order}, {num_tokens:,} tokens, disk"] = [changes[name]]
        steps[f"{order}, 65,536 tokens, none"] = [STEP]
    return steps


def verdicts(steps: dict[str, list[flat.Step]]) -> dict[str, str]:
    promises, errors = flat.judge(steps, LENGTHS)
    assert not errors
    return {promise.name: promise.verdict for promise in promises if promise.verdict != "met"}


def test_flat_memory_may_grow_by_the_batch_and_eight_mebibytes():
    allowed = 16 * (131_072 - 16_384) + 8 * MIB
    assert verdicts(flat_steps(long=replace(STEP, peak_bytes=100 + allowed))) == {}
    missed = verdicts(flat_steps(long=replace(STEP, peak_bytes=101 + allowed)))
    assert missed == {"layer-first: growth of memory / allowed": "MISSED"}


def test_flat_counts_bytes_and_time():
    assert verdicts(flat_steps(timed=replace(STEP, step_s=1.25, read_bytes=1009))) == {}
    missed = verdicts(
        flat_steps(timed=replace(STEP, step_s=1.26), short=replace(STEP, written_bytes=490))
    )
    assert set(missed) == {
        "layer-first: written bytes off the plan's",
        "layer-first: time, disk / device",
    }


def test_flat_sees_another_gradient():
    _, errors = flat.judge(flat_steps(timed=replace(STEP, grad_norm=3.1)), LENGTHS)
    assert len(errors) == 1 and "layer-first, 65,536 tokens, disk has grad_norm 3.1" in errors[0]


def cpu(**changes: object) -> Namespace:
    given = {"device": "cpu", "dtype": "float32", "streambp": "V/bin/python", "chunk_tokens": 1024}
    return Namespace(**(given | changes))


def measurement(step_s: float, extra_bytes: int) -> Measurement:
    return Measurement(step_s, step_s, extra_bytes, 2.0, 3.0, 8192)


def test_long_compares_with_the_best_of_streambp_in_each_figure():
    taking_part = long.contenders(cpu())
    rivals = [c.name for c in taking_part if c.system == "StreamBP"]
    (ours,) = (c.name for c in taking_part if c.is_promised)
    assert len(rivals) == 3 and "disk" in ours
    results = {c.name: [measurement(1.0, 1)] for c in taking_part}
    results |= {ours: [measurement(3.0, 30)], rivals[0]: [measurement(6.0, 200)]}
    results |= {rivals[1]: [measurement(5.0, 300)], rivals[2]: [measurement(9.0, 100)]}
    time, memory = long.promises(8192, taking_part, results)
    assert (time.ratios, memory.ratios) == ((0.6,), (0.3,))
    assert time.verdict == memory.verdict == "met"
    results[ours] = [measurement(3.1, 41)]
    assert {p.verdict for p in long.promises(8192, taking_part, results)} == {"MISSED"}


def test_long_promises_nothing_without_streambp_and_offloads_on_a_gpu_alone():
    alone = long.contenders(cpu(streambp=None))
    results = {c.name: [measurement(1.0, 1)] for c in alone}
    assert long.promises(8192, alone, results) == []
    names = [c.name for c in long.contenders(cpu(device="cuda"))]
    assert "HF checkpointing, offload" in names and not any("disk" in name for name in names)
    assert "HF checkpointing, offload" not in results


def test_contenders_that_differ_are_named():
    results = {"a": [measurement(1, 1)], "b": [replace(measurement(1, 1), loss=2.0003)]}
    assert disagreements(results) == ["b has loss 2.0003; a 2"]


def measured(**changes: dict[str, float]) -> dict[str, dict[str, float]]:
    """Results of which every promise of gpu.py is met, but for `changes`."""
    found: dict[str, dict[str, float]] = {}
    for bound in (bound for part in gpu.PARTS.values() for bound in part.bounds):
        found.setdefault(bound.result.replace("*", "some"), {})[bound.key] = bound.bound
        if bound.below:
            found.setdefault(bound.below, {})[bound.key] = 1.0
    return found | changes


def gpu_ends(results: dict[str, dict[str, float]], end: str = "done", **how: bool) -> int:
    ended = dict.fromkeys(gpu.PARTS, end)
    return gpu.exit_code(ended, gpu.judge(results, [*gpu.PARTS]), promises_count=True, **how)


def test_gpu_tells_a_missed_promise_from_one_that_was_not_measured():
    assert {row["verdict"] for row in gpu.judge({}, [*gpu.PARTS])} == {"not measured"}
    assert gpu_ends(measured()) == 0
    assert gpu_ends(measured(), "failed (1): ?") == gpu_ends({}) == 2
    cases = {"error, some": {"ratio": 1.2}, "FSDP2": {"divided": 0, "loss_off": 0, "norm_off": 0}}
    for name, values in cases.items():
        assert gpu_ends(measured(**{name: values})) == 1
    assert gpu_ends(measured(**{"7B, 128K, auto": {"step_s": 1.0}})) == 2
    refused = measured(**{"kernel, other": {"refused": 1.0}})
    assert gpu_ends(refused) == 0, "a kernel that refuses a shape is an answer"


def test_gpu_takes_ten_minutes_and_says_in_the_first_second_what_is_missing(tmp_path):
    """With a Python that has the standard library alone, as the other machine may have."""
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= gpu.LIMIT_S == 570
    assert set(gpu.PARTS) == set(gpu_part.PARTS)
    with zipfile.ZipFile(tmp_path / "pydantic-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pydantic-2.0.dist-info/METADATA", "Name: pydantic\nVersion: 2.0\n")
    path, given = str(ROOT / "benchmarks" / "gpu.py"), ["--wheels", str(tmp_path), "--dry-run"]
    alone = subprocess.run(
        [sys.executable, "-I", "-S", path, *given], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 2, alone.stderr
    missing = {
        line.split()[1].rstrip(";") for line in alone.stdout.splitlines() if "missing" in line
    }
    assert missing == {*gpu.PACKAGES, *gpu.OF_ONE_PART} - {"pydantic"}
    assert f"{gpu.LIMIT_S} s" in alone.stdout and not gpu.missing()


def test_a_part_of_gpu_that_is_cut_off_leaves_its_results(tmp_path, monkeypatch):
    (tmp_path / "gpu_part.py").write_text(
        "import json, time\n"
        "print(json.dumps({'result': 'first', 'step_s': 1.5}), flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu, "_HERE", tmp_path)
    values, results = tmp_path / "gpu.json", {}
    assert gpu.run("flat", {}, 2.0, results, str(values)) == "ended at its limit of 2 s"
    assert results == json.loads(values.read_text())["results"] == {"first": {"step_s": 1.5}}


def test_a_part_ends_with_a_gpu_that_is_killed(tmp_path):
    (tmp_path / "gpu_part.py").write_text(
        "import json, os, time\n"
        "print(json.dumps({'result': 'own', 'pid': os.getpid()}), flush=True)\n"
        "time.sleep(60)\n"
    )
    code = (
        f"import gpu, pathlib; gpu._HERE = pathlib.Path({str(tmp_path)!r}); "
        "gpu.run('flat', {}, 60.0, {}, None)"
    )
    whole = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             cwd=ROOT / "benchmarks")  # fmt: skip
    with whole:
        part = psutil.Process(int(whole.stdout.readline().rpartition(" ")[2]))
        whole.kill()
    _, left = psutil.wait_procs([part], timeout=20)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


@pytest.mark.parametrize("ends", ["exit 0", "kill -9 $$"])
def test_a_run_that_was_not_killed_behind_a_checkpoint_shows_no_resume(ends, tmp_path, monkeypatch):
    command = tmp_path / "train"
    command.write_text(f"#!/bin/sh\n{ends}\n")
    command.chmod(0o755)
    monkeypatch.setattr(gpu_part.sys, "executable", str(command))
    with pytest.raises(RuntimeError, match=r"ended with 0|no checkpoint"):
        gpu_part._trained(tmp_path, tmp_path / "out", kills=True)


@pytest.mark.nightly
def test_long_runs(tmp_path):
    values = tmp_path / "long.json"
    ended = benchmark(
        "long.py", "--tokens", "128,256", "--rounds", "1", "--chunk-tokens", "64", "--shape",
        "tiny", "--json", str(values), "--disk-dir", str(tmp_path),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads(values.read_text())["measurements"]
    assert [len(results) for results in parts.values()] == [4, 4]


@pytest.mark.nightly
def test_flat_runs_and_counts_the_bytes_of_the_plan(tmp_path):
    values = tmp_path / "flat.json"
    benchmark(
        "flat.py", "--tokens", "4096", "--chunk-tokens", "256", "--json", str(values),
        "--disk-dir", str(tmp_path),
    )  # fmt: skip
    found = json.loads(values.read_text())
    bytes_off = [p for p in found["promises"] if "bytes off" in p["name"]]
    assert not found["errors"] and len(bytes_off) == 4
    assert {p["verdict"] for p in bytes_off} == {"met"}


@pytest.mark.nightly
@pytest.mark.slow
def test_gpu_answers_all_with_tiny_shapes_on_a_cpu(tmp_path):
    values = tmp_path / "gpu.json"
    ended = benchmark("gpu.py", "--tiny", "--json", str(values))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(values.read_text())
    assert set(found["parts"]) == set(gpu.PARTS)
    assert found["results"]["FSDP2"]["divided"] > 0
    assert found["results"]["train, kill, resume"]["off"] < 1e-5


def test_norms_are_timed_as_written_and_fused():
    found = dict(gpu_part._norms(gpu_part.Settings("cpu", is_tiny=True), 8))
    assert len(found) == 4 and all(values["seconds"] > 0 for values in found.values())


@pytest.mark.slow
def test_fsdp_is_forced_on_a_process_that_is_alone():
    """As gpu.py asks it: weights divided, the loss and the gradient norm of none."""
    ((name, values),) = gpu_part.fsdp(gpu_part.Settings("cpu", is_tiny=True))
    assert name == "FSDP2" and values["divided"] > 0
    assert values["loss_off"] < 1e-3 and values["norm_off"] < 1e-2
