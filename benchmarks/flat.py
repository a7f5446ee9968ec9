"""Memory that does not grow with the sequence: K,V and their gradients, stage inputs and attention
outputs wait on disk. On a CPU.

Promises, with one chunk size, float32, both orders of the walk, at the default sizes:
  memory   private and shared memory of the process (RssAnon + RssShmem, its peak during a step) at
           131,072 tokens is at most that at 16,384 + 16 bytes per added token (a token id and a
           label: the batch itself) + 8 MiB.
  bytes    read from and written to disk in each of these steps: within 1 % of what the cost model
           says of the plan.
  time     a step of 65,536 tokens takes at most 1.25x that of the same plan with all kinds of
           memory on the device, in equal loss and gradients.
Exits 1 on a miss. The model is small (2 layers, 64 wide, one head), so that only what grows with
the sequence matters. `--tokens` makes all of it smaller: then misses mean nothing.

No variable of the C library is set: furlong gives back what its heap keeps of freed blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import (
    AGREEMENT,
    Promise,
    add_common_arguments,
    console,
    disagreements,
    machine,
    print_promises,
    read_alone,
    write_json,
)
from rich.table import Table

from furlong.units import format_bytes, format_seconds

_LONG_TOKENS = 131_072
_SHORT_SHARE, _TIMED_SHARE = 8, 2
_TOKEN_BYTES = 16
_SPARE_BYTES = 8 * 2**20
_ORDERS = "chunk-first", "layer-first"


@dataclass(frozen=True, slots=True)
class Step:
    """What the process of one step found."""

    step_s: float
    peak_bytes: int
    """RssAnon + RssShmem."""
    read_bytes: int
    written_bytes: int
    planned_read_bytes: int
    planned_written_bytes: int
    waited_s: float
    """Seconds that the computing thread waited for the disk."""
    loss: float
    grad_norm: float


def main() -> int:
    arguments = _parse()
    if arguments.step:
        print(json.dumps(asdict(run_step(**json.loads(arguments.step)))))
        return 0
    lengths = {
        "short": arguments.tokens // _SHORT_SHARE,
        "timed": arguments.tokens // _TIMED_SHARE,
        "long": arguments.tokens,
    }
    steps: dict[str, list[Step]] = {}
    for _ in range(arguments.rounds):
        for order in _ORDERS:
            for name, target in (*((n, "disk") for n in lengths), ("timed", "none")):
                step = _run_alone(lengths[name], order, target, arguments)
                point = f"{order}, {lengths[name]:,} tokens, {target}"
                steps.setdefault(point, []).append(step)
                console.print(f"  {point}: {format_seconds(step.step_s)}", style="dim")
    _print_steps(steps)
    promises, errors = judge(steps, lengths)
    print_promises(promises)
    for error in errors:
        console.print(f"ERROR: {error}", style="bold red")
    facts = machine()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.json:
        write_json(
            arguments.json, settings=vars(arguments), machine=facts, errors=errors,
            steps={name: [asdict(s) for s in rounds] for name, rounds in steps.items()},
            promises=[asdict(p) | {"verdict": p.verdict} for p in promises],
        )  # fmt: skip
    if arguments.tokens != _LONG_TOKENS:
        console.print(f"The promises are made for --tokens {_LONG_TOKENS}.")
    return int(bool(errors) or any(p.verdict == "MISSED" for p in promises))


def judge(steps: dict[str, list[Step]], lengths: dict[str, int]) -> tuple[list[Promise], list[str]]:
    """The promises, and who computes another thing than the same plan on the device."""
    promises: list[Promise] = []
    errors: list[str] = []
    for order in _ORDERS:
        short, timed, long = (steps[f"{order}, {lengths[name]:,} tokens, disk"] for name in lengths)
        device = steps[f"{order}, {lengths['timed']:,} tokens, none"]
        allowed_bytes = _TOKEN_BYTES * (lengths["long"] - lengths["short"]) + _SPARE_BYTES
        grown = tuple(
            (b.peak_bytes - a.peak_bytes) / allowed_bytes for a, b in zip(short, long, strict=True)
        )
        promises.append(Promise(f"{order}: growth of memory / allowed", grown, "<=", 1.0))
        for what in ("read_bytes", "written_bytes"):
            off = tuple(
                abs(getattr(s, what) / getattr(s, f"planned_{what}") - 1)
                for rounds in (short, timed, long)
                for s in rounds
            )
            name = f"{order}: {what.removesuffix('_bytes')} bytes off the plan's"
            promises.append(Promise(name, (max(off),), "<=", 0.01))
        slower = tuple(a.step_s / b.step_s for a, b in zip(timed, device, strict=True))
        promises.append(Promise(f"{order}: time, disk / device", slower, "<=", 1.25))
    timed_steps = {
        name: rounds for name, rounds in steps.items() if f"{lengths['timed']:,}" in name
    }
    errors += disagreements(timed_steps, AGREEMENT)  # type: ignore[arg-type]
    return promises, errors


def _print_steps(steps: dict[str, list[Step]]) -> None:
    table = Table("step", "time", "waited", "memory", "read", "planned", "written", "planned")
    for name, rounds in steps.items():
        median = {
            key: statistics.median(getattr(s, key) for s in rounds) for key in asdict(rounds[0])
        }
        amounts = (
            "peak_bytes", "read_bytes", "planned_read_bytes", "written_bytes",
            "planned_written_bytes",
        )  # fmt: skip
        table.add_row(
            name, format_seconds(median["step_s"]), format_seconds(median["waited_s"]),
            *(format_bytes(int(median[key])) for key in amounts),
        )  # fmt: skip
    console.print(table)


def _run_alone(num_tokens: int, order: str, target: str, arguments: argparse.Namespace) -> Step:
    given = {
        "num_tokens": num_tokens, "order": order, "target": target, "size": arguments.chunk_tokens,
        "disk_dir": arguments.disk_dir, "warmup_tokens": arguments.warmup_tokens,
    }  # fmt: skip
    command = [sys.executable, __file__, "--step", json.dumps(given)]
    return Step(**read_alone(command))


def run_step(
    num_tokens: int, order: str, target: str, size: int, disk_dir: str | None,
    warmup_tokens: int | None,
) -> Step:  # fmt: skip
    """A step in this process, after one of `warmup_tokens` (default: two chunks)."""
    import torch
    from contenders import Trial, build
    from measuring import Timer, release

    import furlong
    from furlong.runtime.profile import reset_peak_memory

    model = build("flat")
    batch = Trial("furlong", "flat", num_tokens).batch()
    offload = dict.fromkeys(
        ("kv", "inputs", "attention"), target
    )  # graphs stay where they are made
    options = furlong.ChunkOptions(size=size, order=order, offload=offload)  # type: ignore[arg-type]
    engine = furlong.Engine(model, storage=furlong.Storage(disk_dir=disk_dir))
    start_tokens = min(num_tokens, warmup_tokens or 2 * size)
    start = [{name: ids[:start_tokens] for name, ids in batch[0].items()}]
    engine.forward_backward(start, options)
    release(model)
    plan = engine.plan([num_tokens], options)
    planned_read, planned_written = _planned_bytes(model.config, plan, target)
    before = _moved(engine, target)
    reset_peak_memory(torch.device("cpu"))
    timer = Timer(torch.device("cpu"))
    result = engine.run(plan, batch)
    step_s = timer.seconds()
    peak_bytes = _peak_anonymous_bytes()
    read, written, waited_s = (b - a for a, b in zip(before, _moved(engine, target), strict=True))
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return Step(
        step_s, peak_bytes, int(read), int(written), planned_read, planned_written, waited_s,
        result.loss, float(torch.stack(norms).norm()),
    )  # fmt: skip


def _planned_bytes(config: Any, plan: Any, target: str) -> tuple[int, int]:
    """Bytes that the cost model says a plan reads from a memory off the device, and writes."""
    from furlong.cost.memory import PlanMemory
    from furlong.cost.training import Training
    from furlong.models.describe import describe

    if target == "none":
        return 0, 0
    shape = describe(config)
    memory = PlanMemory(shape, Training.in_dtype("float32"), 0, device_type="cpu")
    traffic = memory.curve(plan, 0).traffic
    own = traffic.of(target)  # type: ignore[arg-type]
    return int(traffic.read[:, own].sum()), int(traffic.written[:, own].sum())


def _moved(engine: Any, target: str) -> tuple[float, float, float]:
    """(bytes read, bytes written, seconds waited) of the engine's pool of a target so far."""
    pool = engine._session.state.pools.of(target)  # the engine tells nobody else
    return pool.read_bytes, pool.written_bytes, pool.waited_s


def _peak_anonymous_bytes() -> int:
    """Highest RssAnon + RssShmem since the last reset: the peak of all, less the files, which are
    the libraries' own pages and the same all through a step."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    peak_kib, files_kib = (int(values[name].split()[0]) for name in ("VmHWM", "RssFile"))
    return 1024 * (peak_kib - files_kib)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.set_defaults(rounds=1)
    parser.add_argument("--tokens", type=int, default=_LONG_TOKENS, help="the longest step's")
    parser.add_argument("--chunk-tokens", type=int, default=2_048)
    parser.add_argument("--disk-dir", default=None, help="folder of the disk")
    parser.add_argument("--step", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
