"""What a GPU has to show, in one call of at most ten minutes on a fresh machine with one H100.

NOTHING OF THIS HAS BEEN RUN ON CUDA YET. No figure in this project comes from a GPU; what is tested
is that the parts run with tiny shapes on a CPU (`--tiny`), and on a GPU that is not there.

Parts, each in a process of its own; the JSON is written again after every result of a part:

  versions   torch, cuDNN, the card; the backend chosen for each kind of attention, and who was left
             out and why
  tests      the tests marked `gpu`
  errors     bfloat16 gradients of four layers of 0.5B against float32, by the error of Hugging
             Face's own: in 1, 16 and 64 chunks, with tails from the host, with a window
  seven      7B with LoRA, each length twice and the second counts: 128K from the host, 64K on the
             device and from the host, 32K against transformers with checkpoints (and offload) and
             the loss in tiles; one profile of what the device does
  long       all weights of 0.5B at 64K and 256K; its first four layers at 64K and 1M tokens
  processes  one process of FSDP2 and NCCL, against none
  train      `furlong train`, killed and resumed, against one that was not

Promises. One that was not measured is a miss, and a miss is exit code 1:
  MFU        of 7B with LoRA at 128K: at least 35 % (useful work only: causal FLOPs, nothing
             recomputed, over the peak in the vendor's data sheet)
  host       64K from the host take at most 1.05x the time of 64K on the device
  flat       the peak on the device at 256K (and 1M) is at most 1.02x that at 64K
  bf16       each error is at most 1.1x Hugging Face's
  tests      none fails
  processes  the loss differs by at most 1e-3
  train      losses of the resumed run differ by at most 1e-2: kernels add up in any order
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Promise, console, machine, print_promises, write_json
from rich.table import Table

from furlong.units import format_bytes, format_seconds

_LIMITS_S = {
    "versions": 60, "tests": 90, "seven": 280, "errors": 60, "long": 170, "processes": 60,
    "train": 90,
}  # fmt: skip
"""By part, in the order of what counts; the last ones get what is left."""
_KILL_S = 5
_ERRORS = ("1 chunk", "16 chunks", "64 chunks", "tails, cpu")
_MANY = "0.5B's first 4 layers"
_HERE = Path(__file__).resolve().parent

Results = dict[str, dict[str, Any]]


def main() -> int:
    arguments = _parse()
    parts = arguments.parts.split(",") if arguments.parts else list(_LIMITS_S)
    settings = {
        "device": "cpu" if arguments.tiny else "cuda", "is_tiny": arguments.tiny,
        "peak_flops_per_s": arguments.peak_flops,
    }  # fmt: skip
    results: Results = {}
    ended: dict[str, str] = {}
    start_s = time.monotonic()
    for part in parts:
        left_s = arguments.limit_s - (time.monotonic() - start_s)
        limit_s = min(left_s, math.inf if arguments.tiny else _LIMITS_S[part])
        began_s = time.monotonic()
        ended[part] = _run(part, settings, limit_s, results, arguments.json)
        console.print(f"{part}: {ended[part]}, {format_seconds(time.monotonic() - began_s)}")
    promises = judge(results)
    _print(results)
    print_promises(promises)
    if arguments.json:
        _write(arguments.json, results, ended, promises)
    missed = [p.name for p in promises if p.verdict == "MISSED"]
    if arguments.tiny:  # figures of tiny shapes promise nothing: that all were taken is what counts
        missed = [p.name for p in promises if math.isnan(p.median)]
        missed += [part for part, end in ended.items() if end != "done"]
    return int(bool(missed))


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Promise]:
    """All that is promised; what was not measured is not a number, and a miss."""

    def value(result: str, key: str) -> float:
        found = results.get(result, {}).get(key)
        return math.nan if found is None else float(found)

    def ratio(key: str, above: str, below: str) -> float:
        return value(above, key) / value(below, key)

    tests = results.get("tests", {}).get("returncode")
    windows = [name for name in results if name.startswith("error, ") and "window" in name]
    names = [f"error, {case}" for case in _ERRORS]
    return [
        Promise("MFU of 7B at 128K", (value("7B, 128K, cpu", "mfu"),), ">=", 0.35),
        Promise(
            "host / device, 7B at 64K", (ratio("step_s", "7B, 64K, cpu", "7B, 64K, device"),),
            "<=", 1.05,
        ),
        *(
            Promise(
                f"device memory, {name}, {long} / 64K",
                (ratio("device_peak_bytes", f"{name}, {long}, cpu", f"{name}, 64K, cpu"),),
                "<=", 1.02,
            )
            for name, long in (("0.5B", "256K"), (_MANY, "1024K"))
        ),
        *(Promise(name, (value(name, "ratio"),), "<=", 1.1) for name in [*names, *windows]),
        Promise("windows measured", (float(len(windows)) or math.nan,), ">=", len(_ERRORS)),
        Promise("tests that fail", (math.nan if tests is None else float(tests != 0),), "<=", 0),
        Promise("FSDP2, loss", (value("one process of FSDP2", "off"),), "<=", 1e-3),
        Promise("resumed, losses", (value("train, kill, resume", "off"),), "<=", 1e-2),
    ]  # fmt: skip


def _run(
    part: str, settings: Mapping[str, Any], limit_s: float, results: Results, path: str | None
) -> str:
    """Run a part, and add its results as they come; how it ended."""
    if limit_s <= 0:
        return "no time was left"
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    package = str(_HERE.parent / "src")
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(_HERE / "gpu_part.py"), part, json.dumps(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as run:  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(run.pid, signal.SIGKILL)

        told: list[str] = []
        assert run.stdout is not None and run.stderr is not None
        timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), stop)
        listener = threading.Thread(target=lambda: told.extend(run.stderr), daemon=True)  # type: ignore[arg-type]
        timer.start()
        listener.start()
        for line in run.stdout:
            if not line.startswith('{"result"'):
                continue
            found = json.loads(line)
            name = found.pop("result")
            results[name] = found
            console.print(f"  {name}: {_short(found)}", style="dim", markup=False)
            if path:
                _write(path, results, {part: "running"}, [], quiet=True)
        run.wait()
        timer.cancel()
        listener.join(_KILL_S)
    if late.is_set():
        return f"ended at its limit of {limit_s:.0f} s"
    if run.returncode:
        console.print("".join(told[-12:]), style="yellow", markup=False)
        return f"failed ({run.returncode}): {(told or ['?'])[-1].strip()}"
    return "done"


def _short(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in list(values.items())[:6]
        if not isinstance(value, dict)
    )


def _write(
    path: str, results: Results, ended: Mapping[str, str], promises: list[Promise],
    *, quiet: bool = False,
) -> None:  # fmt: skip
    rows = [
        {"name": p.name, "value": p.median, "bound": f"{p.sense} {p.bound:g}", "verdict": p.verdict}
        for p in promises
    ]
    content = {"machine": machine(), "parts": ended, "results": results, "promises": rows}
    if quiet:  # a call that is cut off leaves what it has
        target = Path(path).with_suffix(".part")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        target.replace(path)
    else:
        write_json(path, **content)


def _print(results: Results) -> None:
    table = Table("what, tokens", "step", "first", "tokens/s", "MFU", "device", "pinned", "below")
    for name, p in results.items():
        if "tokens" not in p:
            continue
        table.add_row(
            f"{name}: {p['tokens']:,}", format_seconds(p["step_s"]),
            "-" if p["first_step_s"] is None else format_seconds(p["first_step_s"]),
            f"{p['tokens_per_s']:,.0f}", "-" if p["mfu"] is None else f"{p['mfu']:.1%}",
            format_bytes(p["device_peak_bytes"]), format_bytes(p["pinned_peak_bytes"]),
            format_bytes(p["below_peak_bytes"]),
        )  # fmt: skip
    console.print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: a trial run")
    parser.add_argument("--parts", default=None, help=f"only these of {','.join(_LIMITS_S)}")
    parser.add_argument("--limit-s", type=float, default=570, help="seconds of all parts together")
    parser.add_argument("--json", default=None, metavar="PATH", help="write the results there")
    parser.add_argument(
        "--peak-flops", type=float, default=None, help="FLOP/s of a device that is not known"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
