"""What benchmarks share: contenders in processes of their own, promises, and the report.

A contender runs alone in a fresh process: a few tokens, a warm-up step, the step that counts.
Contenders are interleaved over rounds, so that a machine that slows down slows all of them. A
figure is the median of its per-round values with their range; a promise is MISSED when the whole
range lies on the wrong side of its bound, and missed within noise when only the median does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from measuring import Measurement
from rich.console import Console
from rich.table import Table

from furlong.units import format_bytes, format_seconds

AGREEMENT = 1e-4
"""Relative difference of losses and gradient norms that float32 contenders may show."""

_PACKAGES = ("furlong", "torch", "transformers", "trl")
_STDERR_LINES_SHOWN = 20
_LIMIT_BYTES = 6 * 2**30
_ALLOCATOR_PREFIXES = (
    "MALLOC_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_CUDA_ALLOC",
    "PYTORCH_ALLOC",
)

Answer = TypeVar("Answer")
console = Console(width=120, highlight=False)


class ContenderError(RuntimeError):
    """A contender's process that did not end well."""


def read_alone(command: Sequence[str]) -> dict[str, Any]:
    """What a process wrote, as JSON, in its last line on stdout. Raises ContenderError."""
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        tail = "\n".join(finished.stderr.splitlines()[-_STDERR_LINES_SHOWN:])
        raise ContenderError(f"{' '.join(command)} ended with {finished.returncode}:\n{tail}")
    values: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return values


def each_alone(
    measure: Callable[[str], Answer],
    names: Sequence[str],
    failed: Callable[[str, str], Answer],
    *,
    preload: list[str],
    jobs: int,
    limit_s: float,
    tell: Callable[[Answer], None],
) -> list[Answer]:
    """The answer of `measure` for every name, each from a process of its own.

    A process that raises, dies, or runs past `limit_s` seconds is answered for by `failed`, which
    gets the name and the reason. Processes start with the modules of `preload`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(preload)
    waiting, answers = list(names), []
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            ours, theirs = context.Pipe(duplex=False)
            name = waiting.pop(0)
            process = context.Process(target=_answer_alone, args=(measure, name, failed, theirs))
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic() + limit_s)
        next_end_s = min(end for _, _, end in running.values()) - time.monotonic()
        ready = wait(list(running), timeout=max(next_end_s, 0))
        for connection, (name, process, end) in list(running.items()):
            if connection not in ready and time.monotonic() < end:
                continue
            detail, answer = f"no answer within {limit_s:g} s", None
            if connection in ready:
                with suppress(EOFError):
                    answer = connection.recv()
                process.join()
                detail = f"its process ended with {process.exitcode}"
            process.kill()
            process.join()
            del running[connection]
            answers.append(failed(name, detail) if answer is None else answer)
            tell(answers[-1])
    return answers


def _answer_alone(
    measure: Callable[[str], Answer],
    name: str,
    failed: Callable[[str, str], Answer],
    connection: Connection,
) -> None:
    """Send the answer for one name, from a process that is quiet and cannot eat the machine."""
    import torch  # not all benchmarks load it in their first process

    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT_BYTES, _LIMIT_BYTES))
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        answer = measure(name)
    except Exception as error:  # code of others in a place where nobody thought of it
        answer = failed(name, f"the measurement fails: {type(error).__name__}: {error}")
    connection.send(answer)


def run_rounds(
    contenders: Mapping[str, Sequence[str]], num_rounds: int
) -> dict[str, list[Measurement]]:
    """The Measurement of every contender's command in every round; each round starts with another
    one. Raises ContenderError."""
    names = list(contenders)
    results: dict[str, list[Measurement]] = {name: [] for name in names}
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = Measurement(**read_alone(contenders[name]))
            results[name].append(result)
            console.print(
                f"  round {index + 1}: {name}: {format_seconds(result.step_s)} "
                f"({format_seconds(result.cpu_s)} of the CPU), {format_bytes(result.extra_bytes)}",
                style="dim",
            )
    return results


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure, per round, and the bound that it keeps."""

    name: str
    ratios: tuple[float, ...]
    sense: Literal["<=", ">="]
    bound: float

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        if self._keeps(self.median):
            return "met"
        return "missed within noise" if any(map(self._keeps, self.ratios)) else "MISSED"

    def _keeps(self, ratio: float) -> bool:
        return ratio <= self.bound if self.sense == "<=" else ratio >= self.bound


def ratios(
    above: Sequence[Measurement],
    below: Sequence[Measurement],
    value: Callable[[Measurement], float],
) -> tuple[float, ...]:
    """Per round, one contender's value by another's."""
    return tuple(value(a) / value(b) for a, b in zip(above, below, strict=True))


def disagreements(
    results: Mapping[str, Sequence[Measurement]], tolerance: float = AGREEMENT
) -> list[str]:
    """Contenders whose loss or gradient norm is not the first one's: they compute another thing."""
    first = next(iter(results))
    found = []
    for what in ("loss", "grad_norm"):
        expected = getattr(results[first][0], what)
        for name, rounds in results.items():
            given = [getattr(m, what) for m in rounds]
            if not all(abs(v - expected) <= tolerance * abs(expected) for v in given):
                texts = ", ".join(f"{v:.8g}" for v in given)
                found.append(f"{name} has {what} {texts}; {first} {expected:.8g}")
    return found


@dataclass
class Report:
    """What a benchmark found; `finish` prints and writes it and returns the exit code."""

    title: str
    settings: dict[str, Any]
    measurements: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, results: dict[str, list[Measurement]]) -> None:
        """Keep the results of one part; print them."""
        self.measurements[part] = results
        table = Table(
            "contender", "time", "CPU time", "tokens/s", "extra peak", "loss", "gradient norm"
        )
        table.title, table.title_justify = part, "left"
        for name, rounds in results.items():
            step_s = statistics.median(m.step_s for m in rounds)
            cpu_s = statistics.median(m.cpu_s for m in rounds)
            extra_bytes = statistics.median(m.extra_bytes for m in rounds)
            table.add_row(
                name, format_seconds(step_s), format_seconds(cpu_s),
                f"{rounds[0].num_tokens / step_s:,.0f}", format_bytes(extra_bytes),
                f"{rounds[0].loss:.6f}", f"{rounds[0].grad_norm:.6f}",
            )  # fmt: skip
        console.print(table)

    def check_agreement(self, part: str, tolerance: float = AGREEMENT) -> None:
        """Contenders that compute something else than the first are errors."""
        self.errors += [
            f"{part}: {text}" for text in disagreements(self.measurements[part], tolerance)
        ]

    def finish(self, json_path: str | None) -> int:
        facts = machine()
        print_promises(self.promises)
        for note in self.notes:
            console.print(note)
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
        for error in self.errors:
            console.print(f"ERROR: contenders disagree: {error}", style="bold red")
        if json_path is not None:
            results = {
                part: {name: [asdict(m) for m in rounds] for name, rounds in by_name.items()}
                for part, by_name in self.measurements.items()
            }
            promises = [
                asdict(p) | {"median": p.median, "verdict": p.verdict} for p in self.promises
            ]
            write_json(
                json_path, title=self.title, settings=self.settings, machine=facts,
                measurements=results, promises=promises, errors=self.errors, notes=self.notes,
            )  # fmt: skip
        return int(bool(self.errors) or any(p.verdict == "MISSED" for p in self.promises))


def print_promises(promises: Sequence[Promise]) -> None:
    """One row per promise: the median, its range over the rounds, the bound, the verdict."""
    table = Table("promise", "median", "range", "bound", "verdict")
    for promise in promises:
        table.add_row(
            promise.name, f"{promise.median:.3g}",
            f"{min(promise.ratios):.3g} .. {max(promise.ratios):.3g}",
            f"{promise.sense} {promise.bound:g}", promise.verdict,
            style="bold red" if promise.verdict == "MISSED" else None,
        )  # fmt: skip
    console.print(table)


def machine() -> dict[str, str]:
    """What a figure depends on besides the code."""
    facts = {"CPU": _cpu_model(), "cores": str(len(os.sched_getaffinity(0)))}
    facts["python"] = platform.python_version()
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    facts["allocator"] = _allocator()
    return facts


def _allocator() -> str:
    """The C library, whose malloc serves tensors on a CPU, and what the environment tells it."""
    name = " ".join(platform.libc_ver()).strip() or "unknown"
    told = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_ALLOCATOR_PREFIXES)]
    return f"{name} ({', '.join(told) or 'as it is'})"


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: str, **content: Any) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {path}")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all contenders")
    parser.add_argument(
        "--warmup-tokens", type=int, default=None,
        help="tokens of the step before the measured one (default: the measured step's own batch)",
    )  # fmt: skip
    parser.add_argument("--json", default=None, metavar="PATH", help="write the results there")
