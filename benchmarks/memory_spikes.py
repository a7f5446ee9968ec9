"""Memory over the time of one step, of the same sequence in 2, 4, 8 and 16 chunks: measured, and
as the cost model says. FPDT (arXiv 2408.16978) shows its memory spikes so.

    python benchmarks/memory_spikes.py spikes.png --tokens 8192

Each step runs in a process of its own, its peak read and reset around every action. Gradients exist
beforehand. glibc is told to give freed memory back at once, so that what is measured is what is
held; that costs time. Nothing is promised.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders import SHAPES, Trial, build
from harness import console, machine, read_alone

from furlong.plan.text import load_plan, save_plan
from furlong.report.picture import save_picture
from furlong.report.scene import Panel
from furlong.timeline import Timeline
from furlong.units import format_bytes

_NUM_CHUNKS = (2, 4, 8, 16)
_STEADY_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": "0"}


def main() -> int:
    arguments = _parse()
    if arguments.chunks:
        print(json.dumps(run_step(arguments, arguments.chunks)))
        return 0
    panels: list[Panel] = []
    for num_chunks in _NUM_CHUNKS:
        settings = [f"{name}={value}" for name, value in _STEADY_ALLOCATOR.items()]
        command = [sys.executable, *sys.argv, "--chunks", str(num_chunks)]
        found = read_alone(["env", *settings, *command])
        plan = load_plan(found["plan"])
        for how in ("measured", "simulated"):
            timeline = Timeline.from_json(found[how])
            panels.append(Panel(timeline, plan, f"{num_chunks} chunks, {how}"))
    for panel in panels:
        console.print(f"{panel.title}: peak {format_bytes(panel.timeline.peak_device_bytes)}")
    save_picture(panels, arguments.picture)
    console.print(f"written: {arguments.picture}")
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return 0


def run_step(arguments: argparse.Namespace, num_chunks: int) -> dict[str, Any]:
    """A plan, and the timelines of its step as measured and as simulated, as JSON; memory is what
    the step adds."""
    import torch
    from measuring import release

    import furlong
    from furlong.runtime.profile import memory_bytes

    model = build(arguments.shape)
    batch = Trial("furlong", arguments.shape, arguments.tokens).batch()
    options = furlong.ChunkOptions(
        size=-(-arguments.tokens // num_chunks), order=arguments.order, keep=arguments.keep,
        offload=json.loads(arguments.offload), num_retained=arguments.num_retained,
    )  # fmt: skip
    engine = furlong.Engine(model)
    engine.forward_backward([{name: ids[:256] for name, ids in batch[0].items()}], options)
    release(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).add_(0)  # written to: resident
    plan = engine.plan([arguments.tokens], options)
    before_bytes = memory_bytes(torch.device("cpu"))
    measured = engine.run(plan, batch, exact_peaks=True).timeline
    return {
        "plan": save_plan(plan),
        "measured": _above(measured, before_bytes).to_json(),
        "simulated": _simulated(model.config, plan).to_json(),
    }


def _simulated(config: Any, plan: Any) -> Timeline:
    from furlong.cost.machine import this_cpu
    from furlong.cost.model import CostModel
    from furlong.cost.training import Training
    from furlong.models.describe import describe
    from furlong.simulate.clock import simulate

    shape = describe(config)
    cost = CostModel(shape, this_cpu(), Training.in_dtype("float32"))
    memory, costs = cost.memory(), cost.costs(plan)
    host = memory.curve(plan, 0).disk.tolist()
    timeline = simulate(
        plan, costs, copies=costs,
        device_bytes=[memory.peak_bytes_of_actions(plan, 0)], offloaded_bytes=[host],
    )  # fmt: skip
    state = cost.training.weights(shape, plan.stages, frozenset(range(len(plan.stages)))).state
    return _above(timeline, state.total)


def _above(timeline: Timeline, floor_bytes: int) -> Timeline:
    """The timeline with only the device memory above a floor."""
    records = (
        replace(r, device_bytes=max(0, r.device_bytes - floor_bytes)) for r in timeline.records
    )
    return Timeline(tuple(records))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help=".png or .svg to write")
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--order", default="chunk-first")
    parser.add_argument("--keep", default="attention")
    parser.add_argument("--num-retained", type=int, default=1)
    parser.add_argument(
        "--offload", default='"none"', help="JSON: a target, or a mapping of kinds to targets"
    )
    parser.add_argument("--chunks", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
