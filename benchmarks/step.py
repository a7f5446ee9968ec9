"""One training step: furlong against Hugging Face's full activations and gradient checkpointing,
and against TRL's packing. Float32, on a CPU.

Promises, at the default sizes:
  step       16,384 tokens, 8 layers, chunks of 1,024. keep=attention: at most 0.70x the time and
             0.5x the extra peak memory of gradient checkpointing, at most 1.05x the time and 0.25x
             the extra peak of full activations. keep=kv: at most 0.95x the time and 0.4x the extra
             peak of gradient checkpointing. Layer-first, stage inputs and attention outputs on
             disk: at most 0.85x the time and 0.20x the extra peak. Layer-first in chunks of 512,
             all on disk: at most 1.2x the time and 0.10x the extra peak.
             Half of what checkpointing takes is slack of glibc's heap, so its extra peak without
             (blocks from 1 MiB on come straight from the system and go straight back) is measured
             as well, and our ratios to that are printed below.
  growth     keep=kv, from 16,384 to 65,536 tokens: extra memory grows by no more than K,V and
             dK,dV of the added tokens plus 10 %. (2 layers; glibc is told to give freed memory
             back, else its reuse of its heap is a large part of what is measured.)
  long-tail  32 files of the Python standard library (median under 2,048 tokens, longest over
             16,384), chunks of 2,048: at least 1.2x the tokens/s of gradient checkpointing one
             sequence at a time, and at least 1.0x those of TRL's packing with checkpointing at no
             more than 0.5x its extra peak memory.
With `--model qwen3_5` one other part:
  hybrid     16,384 tokens, 8 layers, six of them Gated DeltaNet, chunks of 512, keep=kv: at most
             0.9x the time and 0.4x the extra peak memory of gradient checkpointing.
All contenders of a part must agree in loss and gradient norm. Exits 1 on a miss.

Takes about an hour on two cores; `--warmup-tokens 2048`, which shortens the step before the
measured one, halves that. Full activations need 8 GiB of memory. `--tokens` makes all of it
smaller, to try the commands out: then misses mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders import SHAPES, STEADY_ALLOCATOR, Trial
from harness import Promise, Report, add_common_arguments, ratios, run_rounds
from library import long_tailed_batch, shrunk
from measuring import Measurement

from furlong.planners.options import ChunkOptions
from furlong.units import format_bytes

_TOKENS = 16_384
_CHUNK_TOKENS = 1_024
_LONG_TAIL_CHUNK_TOKENS = 2_048
_GROWTH_FACTOR = 4
_NUM_FILES = 32
_FLOAT32_BYTES = 4

_SLACK_FREE_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

_LAYER_FIRST = {"keep": "attention", "order": "layer-first", "stage_layers": 1}
PLANS: dict[str, dict[str, Any]] = {
    "furlong keep=attention": {"keep": "attention", "size": _CHUNK_TOKENS},
    "furlong keep=kv": {"keep": "kv", "size": _CHUNK_TOKENS},
    "furlong layer-first, disk": {
        **_LAYER_FIRST, "size": _CHUNK_TOKENS, "offload": {"inputs": "disk", "attention": "disk"},
    },
    "furlong smallest": {**_LAYER_FIRST, "size": _CHUNK_TOKENS // 2, "offload": "disk"},
}  # fmt: skip
"""ChunkOptions by name."""

_HYBRID_CHUNK_TOKENS = 512

Results = Mapping[str, list[Measurement]]


def main() -> int:
    arguments = _parse()
    report = Report("step", vars(arguments))
    parts = {"step": step, "growth": growth, "long-tail": long_tail}
    if arguments.model == "qwen3_5":
        parts = {"hybrid": hybrid}
    for name, part in parts.items():
        if arguments.only in (None, name):
            part(report, arguments)
    if arguments.tokens != _TOKENS:
        report.notes.append(f"The promises are made for --tokens {_TOKENS}.")
    return report.finish(arguments.json)


def step(report: Report, arguments: argparse.Namespace) -> None:
    """One sequence of random ids, in all ways."""

    def command(contender: str, dials: Mapping[str, Any], **given: Any) -> list[str]:
        trial = Trial(contender, "small", arguments.tokens, dials=dials, **given)
        return replace(trial, warmup_tokens=arguments.warmup_tokens).command()

    slack_free = "HF checkpointing, no slack"
    commands = {
        "HF full activations": command("hf-full", {}),
        "HF checkpointing": command("hf-checkpointing", {}),
        slack_free: command("hf-checkpointing", {}, environment=_SLACK_FREE_ALLOCATOR),
    }
    commands |= {name: command("furlong", dials) for name, dials in PLANS.items()}
    results = run_rounds(commands, arguments.rounds)
    part = f"step: {arguments.tokens:,} tokens"
    report.add(part, results)
    report.check_agreement(part)
    bounds = (
        ("furlong keep=attention", "HF checkpointing", 0.70, 0.5),
        ("furlong keep=attention", "HF full activations", 1.05, 0.25),
        ("furlong keep=kv", "HF checkpointing", 0.95, 0.4),
        ("furlong layer-first, disk", "HF checkpointing", 0.85, 0.20),
        ("furlong smallest", "HF checkpointing", 1.2, 0.10),
    )
    for ours, theirs, time_bound, memory_bound in bounds:
        report.promises += [
            _at_most("time", results, ours, theirs, time_bound),
            _at_most("extra peak", results, ours, theirs, memory_bound),
        ]
    for ours in PLANS:
        values = ratios(results[ours], results[slack_free], lambda m: m.extra_bytes)
        report.notes.append(
            f"extra peak: {ours} / {slack_free} ({_settings(_SLACK_FREE_ALLOCATOR)}): "
            f"{statistics.median(values):.3g}"
        )


def hybrid(report: Report, arguments: argparse.Namespace) -> None:
    """One sequence through a model most of whose layers are recurrent."""
    trials = {
        "HF checkpointing": Trial("hf-checkpointing", "qwen3_5", arguments.tokens),
        "furlong keep=kv": Trial(
            "furlong", "qwen3_5", arguments.tokens,
            dials={"keep": "kv", "size": _HYBRID_CHUNK_TOKENS},
        ),
    }  # fmt: skip
    commands = {
        name: replace(trial, warmup_tokens=arguments.warmup_tokens).command()
        for name, trial in trials.items()
    }
    results = run_rounds(commands, arguments.rounds)
    part = f"hybrid: {arguments.tokens:,} tokens"
    report.add(part, results)
    report.check_agreement(part)
    theirs, ours = results
    report.promises += [
        _at_most("time", results, ours, theirs, 0.9),
        _at_most("extra peak", results, ours, theirs, 0.4),
    ]


def growth(report: Report, arguments: argparse.Namespace) -> None:
    """How extra memory grows with the sequence when only K,V are kept."""
    lengths = (arguments.tokens, _GROWTH_FACTOR * arguments.tokens)
    commands = {
        f"{n:,} tokens": Trial(
            "furlong", "tiny", n, warmup_tokens=arguments.warmup_tokens,
            dials={"size": _CHUNK_TOKENS, "keep": "kv"}, environment=STEADY_ALLOCATOR,
        ).command()
        for n in lengths
    }  # fmt: skip
    results = run_rounds(commands, arguments.rounds)
    report.add("growth: furlong keep=kv", results)
    short, long = results.values()
    shape = SHAPES["tiny"]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    # K, V, dK and dV of one token in all layers
    token_bytes = (
        4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * _FLOAT32_BYTES
    )
    allowed_bytes = token_bytes * (lengths[1] - lengths[0])
    grown = tuple(
        (b.extra_bytes - a.extra_bytes) / allowed_bytes for a, b in zip(short, long, strict=True)
    )
    report.notes.append(f"K,V and dK,dV of the added tokens: {format_bytes(allowed_bytes)}.")
    report.promises.append(
        Promise("growth of extra peak / K,V and dK,dV of the added tokens", grown, "<=", 1.10)
    )


def long_tail(report: Report, arguments: argparse.Namespace) -> None:
    """A batch of real files: many short sequences, a few long ones."""
    batch = long_tailed_batch(_NUM_FILES, vocab_size=SHAPES["small"]["vocab_size"])
    batch = shrunk(batch, arguments.tokens / _TOKENS)
    lens = [len(ids) for ids in batch]
    options = ChunkOptions(size=_LONG_TAIL_CHUNK_TOKENS)
    report.notes.append(
        f"Long tail: {len(lens)} files, median {statistics.median(lens):,.0f}, longest "
        f"{max(lens):,}, together {sum(lens):,} tokens; chunks of {options.size}, "
        f"num_retained {options.num_retained}, keep={options.keep}."
    )
    dials = {"size": options.size, "num_retained": options.num_retained, "keep": options.keep}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "batch.json")
        path.write_text(json.dumps(batch))

        def command(contender: str, **given: Any) -> list[str]:
            warmup_tokens = arguments.warmup_tokens
            return Trial(
                contender, "small", batch_path=str(path), warmup_tokens=warmup_tokens, **given
            ).command()

        results = run_rounds(
            {
                "HF checkpointing, one at a time": command("hf-checkpointing"),
                "TRL packing, checkpointing": command("trl-packing"),
                "furlong": command("furlong", dials=dials),
            },
            arguments.rounds,
        )
    part = f"long tail: {len(lens)} files, {sum(lens):,} tokens"
    report.add(part, results)
    report.check_agreement(part)
    one_at_a_time, packing, ours = results
    report.promises += [
        _tokens_per_s_at_least(results, ours, one_at_a_time, 1.2),
        _tokens_per_s_at_least(results, ours, packing, 1.0),
        _at_most("extra peak", results, ours, packing, 0.5),
    ]


def _at_most(what: str, results: Results, ours: str, theirs: str, bound: float) -> Promise:
    values = {"time": lambda m: m.step_s, "extra peak": lambda m: m.extra_bytes}
    name = f"{what}: {ours} / {theirs}"
    return Promise(name, ratios(results[ours], results[theirs], values[what]), "<=", bound)


def _tokens_per_s_at_least(results: Results, ours: str, theirs: str, bound: float) -> Promise:
    name = f"tokens/s: {ours} / {theirs}"
    values = ratios(results[ours], results[theirs], lambda m: m.num_tokens / m.step_s)
    return Promise(name, values, ">=", bound)


def _settings(environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in environment.items())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--only", choices=("step", "growth", "long-tail"), default=None)
    parser.add_argument("--model", choices=("qwen2", "qwen3_5"), default="qwen2")
    parser.add_argument(
        "--tokens", type=int, default=_TOKENS,
        help="length of the step part; growth and long-tail scale with it",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
