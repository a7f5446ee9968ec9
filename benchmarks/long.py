"""Memory and time of one training step against the length of its one sequence: Hugging Face's
gradient checkpointing, StreamBP, and furlong under three plans.

Promises, on a CPU, at 8,192 and at 16,384 tokens: furlong with attention outputs and stage inputs
on disk takes at most 0.6x the time of StreamBP and at most 0.4x its extra memory; of StreamBP's
settings the fastest counts for the time and the leanest for the memory. All contenders of a length
agree in loss and gradient norm (within 1e-4; 2e-2 in 16 bits). Exits 1 on a miss.

StreamBP needs an older transformers, so an environment of its own, named by `--streambp`:

    python -m venv V
    V/bin/pip install torch==2.13.0 transformers==4.51.3 psutil
    V/bin/pip install --no-deps streambp==1.0
    python benchmarks/long.py --streambp V/bin/python

Without it StreamBP is left out, and nothing is promised. `--tokens 512,1024` tries the command out.
On a GPU (`--device cuda --dtype bfloat16`) it is the same script: time by events, memory as the
allocator's highest, host memory in the place of the disk, and checkpointing with offload besides.
A contender that fails at one length, or whose memory would not fit, is left out from there on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import psutil
from contenders import SHAPES, Trial
from harness import (
    AGREEMENT,
    ContenderError,
    Promise,
    Report,
    add_common_arguments,
    console,
    run_rounds,
)
from measuring import Measurement

_LENGTHS = "2048,4096,8192,16384,32768"
_PROMISED_TOKENS = (8_192, 16_384)
_TIME_BOUND, _MEMORY_BOUND = 0.6, 0.4
_AGREEMENT_16_BITS = 2e-2
_WARMUP_TOKENS = 2_048
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True, slots=True)
class Contender:
    """Who runs, and with which dials."""

    name: str
    system: str
    kind: str
    """Its name in contenders.py."""
    dials: dict[str, Any] = field(default_factory=dict)
    chunks_per_sequence: int = 0
    """Where StreamBP's chunks are a share of the sequence."""
    is_promised: bool = False

    def trial(self, num_tokens: int, arguments: argparse.Namespace) -> Trial:
        dials, storage = dict(self.dials), {}
        if self.chunks_per_sequence:
            dials["checkpoint_chunk_size"] = -(-num_tokens // self.chunks_per_sequence)
        if self.system == "furlong" and arguments.disk_dir:
            storage["disk_dir"] = arguments.disk_dir
        return Trial(
            self.kind, arguments.shape, num_tokens, dials=dials, storage=storage,
            warmup_tokens=min(num_tokens, arguments.warmup_tokens or _WARMUP_TOKENS),
            device=arguments.device, dtype=arguments.dtype,
            python=arguments.streambp if self.system == "StreamBP" else sys.executable,
        )  # fmt: skip


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """The rivals, StreamBP with every dial that its code has, and three plans of ours."""
    is_cpu = arguments.device == "cpu"
    found = [Contender("HF checkpointing", "HF", "hf-checkpointing")]
    if not is_cpu:  # it takes pinned memory, which torch gives only beside an accelerator
        dials = {"gradient_checkpointing_kwargs": None, "offload": True}
        found.append(Contender("HF checkpointing, offload", "HF", "hf-checkpointing", dials))
    if arguments.streambp:
        names = "StreamBP's defaults", "StreamBP, chunks of 2,048", "StreamBP as its README says"
        settings = (
            {"logits_chunk_size": 500, "checkpoint_chunk_size": 500},
            {"logits_chunk_size": 500, "checkpoint_chunk_size": 2_048},
            {"logits_chunk_size": 100},
        )
        for name, dials, share in zip(names, settings, (0, 0, 3), strict=True):
            found.append(Contender(name, "StreamBP", "streambp", dials, share))
    lower, size = "disk" if is_cpu else "cpu", arguments.chunk_tokens
    layer_first = {"keep": "attention", "order": "layer-first", "stage_layers": 1}
    some = {"inputs": lower, "attention": lower}
    ours = (
        ("all on the device", {"keep": "attention", "size": size}),
        (f"inputs, attention on {lower}", {**layer_first, "size": size, "offload": some}),
        (f"small chunks, all on {lower}", {**layer_first, "size": size // 4, "offload": lower}),
    )
    found += [
        Contender(
            f"furlong, {name}",
            "furlong",
            "furlong",
            dials,
            is_promised=dials.get("offload") is some,
        )
        for name, dials in ours
    ]
    return found


def main() -> int:
    arguments = _parse()
    report = Report("long", vars(arguments))
    everyone = taking_part = contenders(arguments)
    measured: dict[str, dict[int, list[Measurement]]] = {c.name: {} for c in everyone}
    for num_tokens in arguments.tokens:
        taking_part = [c for c in taking_part if _fits(measured[c.name], num_tokens, arguments)]
        results, taking_part = _measure(num_tokens, taking_part, report, arguments)
        for name, rounds in results.items():
            measured[name][num_tokens] = rounds
        part = f"{num_tokens:,} tokens"
        report.add(part, results)
        is_wide = arguments.dtype in ("float32", "float64")
        report.check_agreement(part, AGREEMENT if is_wide else _AGREEMENT_16_BITS)
        if num_tokens in _PROMISED_TOKENS and arguments.device == "cpu":
            report.promises += promises(num_tokens, taking_part, results)
    for contender in everyone:
        if contender not in taking_part:
            longest = max(measured[contender.name], default=0)
            report.notes.append(f"{contender.name} was left out above {longest:,} tokens.")
    return report.finish(arguments.json)


def promises(
    num_tokens: int, taking_part: list[Contender], results: dict[str, list[Measurement]]
) -> list[Promise]:
    """Ours against the best of StreamBP's settings, each round by itself; none without StreamBP."""
    rivals = [results[c.name] for c in taking_part if c.system == "StreamBP"]
    ours = [results[c.name] for c in taking_part if c.is_promised]
    if not rivals or not ours:
        return []
    found = []
    for what, bound in (("step_s", _TIME_BOUND), ("extra_bytes", _MEMORY_BOUND)):
        ratios = tuple(
            getattr(own, what) / min(getattr(theirs, what) for theirs in others)
            for own, *others in zip(*ours, *rivals, strict=True)
        )
        word = "time" if what == "step_s" else "extra peak"
        name = f"{word}: furlong on disk / StreamBP's best, {num_tokens:,} tokens"
        found.append(Promise(name, ratios, "<=", bound))
    return found


def _measure(
    num_tokens: int, taking_part: list[Contender], report: Report, arguments: argparse.Namespace
) -> tuple[dict[str, list[Measurement]], list[Contender]]:
    """Every contender's rounds at one length, and those who got through the first."""
    commands = {c.name: c.trial(num_tokens, arguments).command() for c in taking_part}
    results: dict[str, list[Measurement]] = {}
    for name in list(commands):
        try:
            results |= run_rounds({name: commands[name]}, 1)
        except ContenderError as error:
            console.print(str(error), style="yellow", markup=False)
            report.notes.append(f"{name} failed at {num_tokens:,} tokens.")
            del commands[name]
    for name, rounds in run_rounds(commands, arguments.rounds - 1).items():
        results[name] += rounds
    return results, [c for c in taking_part if c.name in results]


def _fits(
    measured: dict[int, list[Measurement]], num_tokens: int, arguments: argparse.Namespace
) -> bool:
    """Whether a step may be tried on a CPU, where too much memory ends other processes, too."""
    if arguments.device != "cpu" or not measured:
        return True
    longest = max(measured)
    extra_bytes = max(m.extra_bytes for m in measured[longest])
    growth = (num_tokens / longest) ** 2  # at worst, where masks exist
    return extra_bytes * growth <= _SHARE_OF_MEMORY * psutil.virtual_memory().available


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--tokens", type=lambda text: [int(n) for n in text.split(",")], default=_LENGTHS,
        help=f"lengths in rising order (default: {_LENGTHS})",
    )  # fmt: skip
    parser.add_argument("--streambp", metavar="PYTHON", help="interpreter that has StreamBP")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--chunk-tokens", type=int, default=1_024, help="furlong's chunks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--disk-dir", default=None, help="folder of furlong's disk target")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
