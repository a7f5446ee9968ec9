"""Long sequences on one GPU, random weights: Qwen2.5-0.5B and 1.5B with all weights trained,
Qwen2.5-7B and Llama-3.1-8B with LoRA; 32K tokens and twice as many again, as far as time allows.

NOTHING OF THIS HAS BEEN RUN ON CUDA YET. No figure in this project comes from a GPU; what is tested
is that the commands run with tiny shapes on a CPU (`--tiny`).

Per point, in a process of its own: seconds of a step with the optimizer's, tokens/s, MFU (useful
work only: causal FLOPs, nothing recomputed; with LoRA 4 FLOPs per frozen parameter and token and
three times the attention's forward; over the peak in the vendor's data sheet), peak bytes on the
device, pinned and held on the host, resident in the process. Per model, at the shortest length:
the share of the time of copies during which the device computes as well. And the error of bfloat16
gradients against float32, by that of Hugging Face's own unchunked bfloat16 backward.

Promises, on a GPU whose peak is known:
  MFU      of Qwen2.5-7B with LoRA at 128K and 256K, of the better plan: at least 35 %
  host     the plan with everything on the host takes at most 1.05x the time of the one on the
           device, at 128K, where both fit
  flat     its peak on the device at 256K is at most 1.02x that at 64K
  bf16     the error in 1, 16 and 64 chunks is at most 1.1x Hugging Face's
A length is tried if twice the tokens in four times the time end within `--limit-s` per model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from gpu_point import MODELS, PLANS, Point, Setting
from harness import (
    ContenderError,
    Promise,
    add_common_arguments,
    console,
    machine,
    print_promises,
    read_alone,
    write_json,
)
from rich.table import Table

from furlong.units import format_bytes, format_seconds

_K = 1024
_LENGTHS = tuple(32 * _K * 2**i for i in range(6))
_TINY_LENGTHS = (256, 512)
_ON_DEVICE, _ON_HOST = PLANS
_HERE = Path(__file__).resolve().parent

Points = dict[tuple[str, str, int], Point]


def main() -> int:
    arguments = _parse()
    lengths = _TINY_LENGTHS if arguments.tiny else _LENGTHS
    models = [m for m in MODELS if arguments.model is None or arguments.model in m]
    points: Points = {}
    hidden: dict[str, float | None] = {}
    for model in models:
        for plan in PLANS:
            points |= _measure(model, plan, lengths, arguments)
        profiled = _setting(model, _ON_HOST, lengths[0], arguments, profiles=True)
        try:
            hidden[model] = Point(**_alone("gpu_point.py", asdict(profiled))).hidden_share
        except ContenderError as error:
            console.print(str(error), style="yellow", markup=False)
    _print_points(points, hidden)
    errors = _alone("gpu_error.py", {"tiny": arguments.tiny, "device": _device(arguments)})
    for name, ratio in errors.items():
        console.print(f"bfloat16 in {name} chunks: {ratio:.3f}x the error of HF's own")
    promises = [] if arguments.tiny else judge(points)
    promises += [Promise(f"bf16, {n} chunks", (r,), "<=", 1.1) for n, r in errors.items()]
    print_promises(promises)
    facts = machine() | {"device": next((p.device_name for p in points.values()), "none")}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.json:
        rows = [
            dict(zip(("model", "plan", "tokens"), k, strict=True)) | asdict(p)
            for k, p in points.items()
        ]
        write_json(
            arguments.json, settings=vars(arguments), machine=facts, points=rows, hidden=hidden,
            bfloat16=errors, promises=[asdict(p) | {"verdict": p.verdict} for p in promises],
        )  # fmt: skip
    return int(not points or any(p.verdict == "MISSED" for p in promises))


def judge(points: Points) -> list[Promise]:
    """What was promised of the points that were reached."""
    found = []
    seven = "Qwen2.5-7B, LoRA"
    for num_tokens in (128 * _K, 256 * _K):
        reached = [points.get((seven, plan, num_tokens)) for plan in PLANS]
        known = [p.mfu for p in reached if p is not None and p.mfu is not None]
        if known:
            found.append(Promise(f"MFU: 7B at {num_tokens // _K}K", (max(known),), ">=", 0.35))
    for model in MODELS:
        on_device, on_host = (points.get((model, plan, 128 * _K)) for plan in PLANS)
        if on_device and on_host:
            slower = on_host.step_s / on_device.step_s
            found.append(Promise(f"host / device: {model} at 128K", (slower,), "<=", 1.05))
        short, long = (points.get((model, _ON_HOST, n * _K)) for n in (64, 256))
        if short and long:
            grown = long.device_peak_bytes / short.device_peak_bytes
            found.append(Promise(f"device memory, 256K / 64K: {model}", (grown,), "<=", 1.02))
    return found


def _measure(
    model: str, plan: str, lengths: tuple[int, ...], arguments: argparse.Namespace
) -> Points:
    """The points of a model under one plan, shortest first, until one fails or takes too long."""
    points: Points = {}
    left_s = arguments.limit_s / len(PLANS)
    for num_tokens in lengths:
        try:
            setting = _setting(model, plan, num_tokens, arguments)
            point = Point(**_alone("gpu_point.py", asdict(setting)))
        except ContenderError as error:
            console.print(f"{model}, {plan}: {num_tokens:,} tokens failed", style="yellow")
            console.print(str(error), style="dim", markup=False)
            break
        points[model, plan, num_tokens] = point
        console.print(
            f"  {model}, {plan}, {num_tokens:,} tokens: {format_seconds(point.step_s)}", style="dim"
        )
        left_s -= point.process_s
        if 4 * point.process_s > left_s:
            break
    return points


def _setting(
    model: str, plan: str, num_tokens: int, arguments: argparse.Namespace, *, profiles: bool = False
) -> Setting:
    size = min(arguments.chunk_tokens, 64) if arguments.tiny else arguments.chunk_tokens
    return Setting(
        model, plan, num_tokens, size=size, is_tiny=arguments.tiny, device=_device(arguments),
        profiles=profiles, peak_flops_per_s=arguments.peak_flops,
    )  # fmt: skip


def _device(arguments: argparse.Namespace) -> str:
    return "cpu" if arguments.tiny else "cuda"


def _alone(script: str, given: dict[str, object]) -> dict[str, object]:
    return read_alone([sys.executable, str(_HERE / script), json.dumps(given)])


def _print_points(points: Points, hidden: dict[str, float | None]) -> None:
    for model in dict.fromkeys(model for model, _, _ in points):
        table = Table(
            "plan", "tokens", "step", "optimizer", "tokens/s", "MFU", "device", "pinned",
            "held below", "resident", title=model, title_justify="left",
        )  # fmt: skip
        for (own, plan, num_tokens), p in points.items():
            if own == model:
                table.add_row(
                    plan, f"{num_tokens:,}", format_seconds(p.step_s),
                    format_seconds(p.optimizer_s), f"{num_tokens / p.step_s:,.0f}",
                    "-" if p.mfu is None else f"{p.mfu:.1%}", format_bytes(p.device_peak_bytes),
                    format_bytes(p.pinned_peak_bytes), format_bytes(p.below_peak_bytes),
                    format_bytes(p.resident_bytes),
                )  # fmt: skip
        console.print(table)
        share = hidden.get(model)
        words = (
            "none of a device was seen" if share is None else f"{share:.0%} of their time hidden"
        )
        console.print(f"copies, {_ON_HOST}: {words}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: a trial run")
    parser.add_argument("--model", default=None, help="only models whose name has this in it")
    parser.add_argument("--chunk-tokens", type=int, default=8_192)
    parser.add_argument("--limit-s", type=float, default=600, help="seconds per model")
    parser.add_argument(
        "--peak-flops", type=float, default=None, help="FLOP/s of a device that is not known"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
