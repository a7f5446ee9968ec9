"""Ask one GPU, on a fresh machine and in at most ten minutes, what no CPU can answer.

    python benchmarks/gpu.py --dry-run           # what is missing here, and the budget; no GPU
    python benchmarks/gpu.py --json gpu.json

NOTHING OF THIS HAS BEEN RUN ON CUDA YET. No figure in this project comes from a GPU; what is tested
is that all parts run with tiny shapes on a CPU (`--tiny`).

Each part is a process of its own with a limit, so one that fails takes no other with it; the JSON
is written again after every result. Wheels in the folder `wheels` (or `--wheels`) are unpacked and
imported, for a machine without a network.

Exit code 0: all was measured and is as promised; 1: all was measured, a promise is missed; 2:
a package is missing, a part failed, or something was not measured. With `--tiny` figures promise
nothing: 0 where all was measured.
"""

# Only the standard library, and nothing of furlong, may be imported before the packages are there.
from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

LIMIT_S = 570
PACKAGES = (
    "torch", "transformers", "peft", "pydantic", "ruamel.yaml", "numpy", "psutil", "safetensors",
    "tokenizers", "tqdm", "xxhash",
)  # fmt: skip
"""What every part imports."""
OF_ONE_PART = ("pytest", "hypothesis", "bitsandbytes")
"""What the tests and QLoRA import: without it the other parts are measured."""
_KILL_S = 5
_HERE = Path(__file__).resolve().parent

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Bound:
    """A promise about one value of a part's results."""

    result: str
    """Name of the result; one that ends in `*` stands for all that begin so."""
    key: str
    sense: str
    bound: float
    below: str = ""
    """The result by whose value this one's is divided."""

    def rows(self, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return name, value, bound and verdict; a value that is not there was not measured."""
        names = [self.result]
        if self.result.endswith("*"):
            begun = [n for n in results if n.startswith(self.result[:-1])]
            names = [n for n in begun if "refused" not in results[n]] or names
        found = []
        for name in names:
            value = _number(results, name, self.key)
            if self.below:
                value /= _number(results, self.below, self.key)
            keeps = value <= self.bound if self.sense == "<=" else value >= self.bound
            verdict = "not measured" if math.isnan(value) else "met" if keeps else "MISSED"
            text = f"{name}, {self.key}" + f" / {self.below}" * bool(self.below)
            bound = f"{self.sense} {self.bound:g}"
            found.append({"name": text, "value": value, "bound": bound, "verdict": verdict})
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """A question, the seconds that its answer may take, and what is promised of it."""

    question: str
    limit_s: int
    bounds: tuple[Bound, ...]


PARTS = {
    "kernels": Part(
        "Is each attention kernel right at the shapes that train, and how fast; and norms?", 40,
        (
            Bound("kernel, *", "error", "<=", 0.02),
            *(Bound(f"norm, {of}, fused", "seconds", "<=", 0.5, below=f"norm, {of}, as written")
              for of in ("hidden", "heads")),
        ),
    ),
    "tests": Part(
        "Do the tests marked gpu pass?", 50, (Bound("tests", "returncode", "<=", 0),)
    ),
    "errors": Part(
        "Are bfloat16 gradients as near to float32 as Hugging Face's own?", 35,
        (Bound("error, *", "ratio", "<=", 1.1),),
    ),
    "verify": Part(
        "Does furlong verify pass?", 45, (Bound("verify", "returncode", "<=", 0),)
    ),
    "auto": Part(
        "What MFU has 7B with LoRA at 128K as auto runs it, by which kernels; and compiled?", 165,
        (
            Bound("7B, 128K, auto", "mfu", ">=", 0.35),
            Bound("7B, 128K, compiled", "step_s", "<=", 1, below="7B, 128K, auto"),
        ),
    ),
    "host": Part(
        "Does offload to the host cost time, at 7B and 64K?", 70,
        (Bound("7B, 64K, cpu", "step_s", "<=", 1.05, below="7B, 64K, device"),),
    ),
    "flat": Part(
        "Is the device's peak at 128K that at 32K, with all weights of 0.5B trained?", 40,
        (Bound("0.5B, 128K, cpu", "device_peak_bytes", "<=", 1.02, below="0.5B, 32K, cpu"),),
    ),
    "fsdp": Part(
        "Do FSDP2 and NCCL, forced on one card, give the gradients of none?", 30,
        (
            Bound("FSDP2", "divided", ">=", 1), Bound("FSDP2", "loss_off", "<=", 1e-3),
            Bound("FSDP2", "norm_off", "<=", 1e-2),
        ),
    ),
    "resume": Part(
        "Does a killed run go on as if it had not been?", 45,
        (Bound("train, kill, resume", "off", "<=", 1e-2),),
    ),
    "losses": Part(
        "Are the first steps of DPO and QLoRA as near to float32 as Hugging Face's?", 20,
        (Bound("DPO", "ratio", "<=", 1.1), Bound("QLoRA", "ratio", "<=", 1.1)),
    ),
}  # fmt: skip
"""In the order of what counts, but for the first, which tells most in the shortest time.

Limits are guesses for an H200: 12 s to start a process and 10 for each `furlong train`, of which
`resume` has three, two at once; steps by cuDNN's assumed rates, 38 s at 7B and 128K, 12 s at 64K,
of 0.5B 10 s at 128K; 3 GB/s to pin memory; 45 s to compile."""


def main() -> int:
    arguments = _parse()
    parts = arguments.parts.split(",") if arguments.parts else list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        unpack(arguments.wheels, folder)
        gone = missing(folder)
        release = ".".join(platform.python_version_tuple()[:2])
        for name in gone:
            print(
                f"missing: {name}; on a machine with a network: pip download --only-binary :all:"
                f" --python-version {release} -d {arguments.wheels} {name}"
            )
        total_s = sum(PARTS[part].limit_s for part in parts)
        if arguments.dry_run:
            for part in parts:
                print(f"{part}, {PARTS[part].limit_s} s: {PARTS[part].question}")
            print(f"limits: {total_s} s of {LIMIT_S} s")
            return 2 if gone or total_s > LIMIT_S else 0
        if set(gone) & set(PACKAGES):
            return 2
        results: Results = {}
        ended: dict[str, str] = {}
        settings = {
            "device": "cpu" if arguments.tiny else "cuda", "is_tiny": arguments.tiny,
            "peak_flops_per_s": arguments.peak_flops or (1e11 if arguments.tiny else None),
        }  # fmt: skip
        for part in parts:
            print(f"{part}: {PARTS[part].question}", flush=True)
            began_s = time.monotonic()
            limit_s = math.inf if arguments.tiny else float(PARTS[part].limit_s)
            ended[part] = run(part, settings, limit_s, results, arguments.json, folder)
            print(f"  {ended[part]}, {time.monotonic() - began_s:.0f} s")
            for row in judge(results, [part]):
                print("  {name}: {value:.4g} ({bound}): {verdict}".format(**row), flush=True)
    rows = judge(results, parts)
    if arguments.json:
        _write(arguments.json, results, ended, rows)
    return exit_code(ended, rows, promises_count=not arguments.tiny)


def judge(results: Mapping[str, Mapping[str, Any]], parts: list[str]) -> list[dict[str, Any]]:
    """Return a row for all that is promised of `parts`."""
    return [row for part in parts for bound in PARTS[part].bounds for row in bound.rows(results)]


def exit_code(ended: Mapping[str, str], rows: list[dict[str, Any]], *, promises_count: bool) -> int:
    """Return 2 where something failed or was not measured, 1 for a missed promise, else 0."""
    verdicts = {row["verdict"] for row in rows}
    if set(ended.values()) != {"done"} or "not measured" in verdicts:
        return 2
    return int(promises_count and "MISSED" in verdicts)


def unpack(wheels: str, folder: str) -> None:
    """Unpack the wheels in a folder, where there is one."""
    for wheel in sorted(Path(wheels).glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)


def missing(folder: str = "") -> list[str]:
    """Return the packages that are neither installed nor unpacked in `folder`."""
    found = {
        own.metadata["Name"].lower().replace("_", "-")
        for own in metadata.distributions(path=[folder, *sys.path])
    }
    return [name for name in (*PACKAGES, *OF_ONE_PART) if name not in found]


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the one that has started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def run(
    part: str, settings: Mapping[str, Any], limit_s: float, results: Results, path: str | None,
    packages: str = "",
) -> str:  # fmt: skip
    """Run a part, and add its results as they come; return how it ended."""
    pinned = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    environment = {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{pinned}", **os.environ}
    own = [str(_HERE.parent / "src"), packages, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, own))
    command = [sys.executable, str(_HERE / "gpu_part.py"), part, json.dumps(settings)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True, preexec_fn=_end_with_parent,
    ) as process:  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        told: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), stop)
        listener = threading.Thread(target=lambda: told.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        timer.daemon = True  # so that Ctrl-C does not wait for the limit
        timer.start()
        listener.start()
        for line in process.stdout:
            if not line.startswith('{"result"'):
                continue
            found = json.loads(line)
            name = found.pop("result")
            results[name] = found
            print(f"  {name}: {_short(found)}", flush=True)
            if path:  # a call that is cut off leaves what it has
                _write(path, results, {part: "running"}, [])
        process.wait()
        timer.cancel()
        listener.join(_KILL_S)
    if late.is_set():
        return f"ended at its limit of {limit_s:.0f} s"
    if process.returncode:
        print("".join(told[-12:]))
        return f"failed ({process.returncode}): {(told or ['?'])[-1].strip()}"
    return "done"


def _number(results: Mapping[str, Mapping[str, Any]], name: str, key: str) -> float:
    found = results.get(name, {}).get(key)
    return math.nan if found is None else float(found)


def _short(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )


def _write(
    path: str, results: Results, ended: Mapping[str, str], rows: list[dict[str, Any]]
) -> None:
    machine = {"system": platform.platform(), "python": platform.python_version()}
    content = {"machine": machine, "parts": ended, "results": results, "promises": rows}
    target = Path(path).with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    target.replace(path)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: a trial run")
    parser.add_argument("--dry-run", action="store_true", help="print what is missing and limits")
    parser.add_argument("--parts", default=None, help=f"only these of {','.join(PARTS)}")
    parser.add_argument("--wheels", default="wheels", metavar="FOLDER", help="packages to import")
    parser.add_argument("--json", default=None, metavar="PATH", help="write the results there")
    parser.add_argument(
        "--peak-flops", type=float, default=None, help="FLOP/s of a device that is not known"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
