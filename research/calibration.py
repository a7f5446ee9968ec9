"""Predictions against measurements: steps that a calibration has not seen. On a CPU, in float32.

Calibrates this machine as `furlong calibrate` does (or takes `--calibration FILE`), then runs
twelve steps, each in a process of its own: other models than the calibrated ones, other sizes of
chunks, ways to keep, orders, offload and lengths.

Promises: of every step, predicted seconds within 15 % and predicted peak memory within 10 % of
what is measured. Seconds are those in which the computing thread worked or waited for a target, so
that other processes on the machine do not count; memory is the resident set of the process, Python
and its libraries included (the peak beside them is printed, too). Exits 1 on a miss.

Takes about five minutes on two cores. It computes with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import console, machine, write_json
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.cost.machine import Machine, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.simulate.predict import predict
from furlong.units import format_bytes, format_seconds

_TIME_BOUND, _MEMORY_BOUND = 0.15, 0.10
_NUM_RUNS = 2
_THREADS = {"OMP_NUM_THREADS": "1"}


def _qwen2(hidden: int, heads: int, kv_heads: int, mlp: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "num_hidden_layers": layers,
        "vocab_size": 4096, "tie_word_embeddings": True, "max_position_embeddings": 2**17,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "384 wide, 8 layers": _qwen2(384, 6, 2, 1024, 8),
    "640 wide, 4 layers": _qwen2(640, 10, 2, 2560, 4) | {"model_type": "llama"},
    "896 wide, 3 layers": _qwen2(896, 14, 2, 4864, 3) | {"vocab_size": 8192},
}


@dataclass(frozen=True)
class Step:
    """What one process measures; travels as JSON on its command line."""

    model: str
    seq_lens: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lens = f"{len(self.seq_lens)} x " if len(self.seq_lens) > 1 else ""
        dials = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.model}: {lens}{self.seq_lens[0]:,} tokens; {dials}"


_SMALL, _OTHER, _WIDE = MODELS
_LAYER_FIRST: dict[str, Any] = {"order": "layer-first", "num_retained": 0}
STEPS = (
    Step(_SMALL, (2304,), {"size": 768, "keep": "kv", "num_retained": 1}),
    Step(_SMALL, (3072,), {"size": 1024, "keep": "attention", "num_retained": 0}),
    Step(_SMALL, (1152,), {"size": 192, "keep": "input", "num_retained": 1}),
    Step(_SMALL, (2000,), {"size": 448, "keep": "attention", "stage_layers": 1, **_LAYER_FIRST}),
    Step(_SMALL, (2500,), {"size": 640, "keep": "input", "stage_layers": 2, **_LAYER_FIRST}),
    Step(
        _SMALL, (2048,),
        {"size": 512, "keep": "attention", "stage_layers": 1, "offload": "disk", **_LAYER_FIRST},
    ),
    Step(_OTHER, (1280,), {"size": 1280, "keep": "all"}),
    Step(_OTHER, (1500,), {"size": 384, "keep": "attention", "num_retained": 2}),
    Step(_OTHER, (1600,), {"size": 400, "keep": "attention", "offload": {"attention": "disk"}}),
    Step(_OTHER, (150, 250, 350, 1200), {"size": 700, "keep": "kv", "num_retained": 1}),
    Step(_WIDE, (900,), {"size": 300, "keep": "kv", "num_retained": 0}),
    Step(_WIDE, (768,), {"size": 128, "keep": "attention", "recompute_layers": 2}),
)  # fmt: skip


def main() -> int:
    arguments = _parse()
    if arguments.measure:
        print(json.dumps(measure(Step(**json.loads(arguments.measure)))))
        return 0
    calibrated = _calibrated(arguments.calibration)
    rows, missed = [], 0
    table = Table("step", "seconds", "predicted", "error", "peak", "predicted", "error", "beside")
    for step in STEPS:
        measured = json.loads(_alone(["--measure", json.dumps(asdict(step))]))
        row = _compared(step, measured, calibrated)
        rows.append({"step": str(step), **measured, **row})
        is_miss = abs(row["time_error"]) > _TIME_BOUND or abs(row["memory_error"]) > _MEMORY_BOUND
        missed += is_miss
        table.add_row(
            str(step), format_seconds(measured["step_s"]), format_seconds(row["step_s_predicted"]),
            f"{row['time_error']:+.1%}", format_bytes(row["bytes_measured"]),
            format_bytes(row["bytes_predicted"]), f"{row['memory_error']:+.1%}",
            f"{row['error_beside_weights']:+.1%}", style="bold red" if is_miss else None,
        )  # fmt: skip
        console.print(f"{step}: {row['time_error']:+.1%}, {row['memory_error']:+.1%}", style="dim")
    console.print(table)
    console.print("peaks without interpreter and libraries; beside: without the weights too")
    console.print(f"{missed} of {len(STEPS)} missed; " + ", ".join(machine().values()))
    if arguments.json:
        write_json(
            arguments.json, title="calibration", machine=machine(), steps=rows,
            calibration={name: str(x) for name, x in calibrated.measurements.items()},
        )  # fmt: skip
    return int(missed > 0)


def _compared(step: Step, measured: dict[str, Any], calibrated: Machine) -> dict[str, float]:
    """What a calibrated model says of a step, and how far it is off."""
    shape = describe(AutoConfig.for_model(**MODELS[step.model]))
    training = replace(Training.in_dtype("float32"), optimizer_bytes=0)  # the step has none
    model = CostModel(shape, calibrated, training)
    options = ChunkOptions(**step.options)
    plan = plan_on_device(step.seq_lens, options, num_layers=shape.num_layers)
    predicted = predict(model, plan)
    resting = 4 * shape.num_parameters
    beside = measured["peak_bytes"] - measured["before_bytes"]
    own = beside + resting  # as memory.device counts: without the interpreter and its libraries
    return {
        "step_s_predicted": predicted.step_s,
        "bytes_predicted": predicted.device_bytes,
        "time_error": predicted.step_s / measured["step_s"] - 1,
        "bytes_measured": own,
        "memory_error": predicted.device_bytes / own - 1,
        "error_beside_weights": (predicted.device_bytes - resting) / beside - 1,
    }


def measure(step: Step) -> dict[str, float]:
    """Seconds and bytes of a step, after one that is not counted."""
    import torch

    from furlong.calibrate.run import Bench, merged
    from furlong.kv.pools import Storage

    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = dict(MODELS[step.model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config).train()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        bench = Bench(
            model, compute_dtype=torch.float32, vocab_size=values["vocab_size"],
            storage=Storage(disk_dir=folder),
        )  # fmt: skip
        options = ChunkOptions(**step.options)
        bench.run((options.size + 1,), options)  # the first one pays for buffers and kernels
        found = merged([bench.run(step.seq_lens, options) for _ in range(_NUM_RUNS)])
    return {
        "step_s": found.step_s,
        "peak_bytes": found.peak_bytes,
        "before_bytes": found.before_bytes,
    }


def _calibrated(path: Path | None) -> Machine:
    if path is not None:
        threads = json.loads(path.read_text(encoding="utf-8"))["machine"]  # of measuring processes
        return replace(this_cpu(), card=threads).calibrated("float32", path)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "calibration.json")
        call = "import sys; from furlong.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", call, "calibrate", "--disk-dir", str(Path.cwd())]
        subprocess.run([*command, "--out", str(out)], check=True, env={**os.environ, **_THREADS})
        return _calibrated(out)


def _alone(arguments: list[str]) -> str:
    """The last line that this script prints in a process of its own."""
    finished = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **_THREADS},
    )  # fmt: skip
    if finished.returncode:
        raise RuntimeError(finished.stderr[-3000:])
    return finished.stdout.splitlines()[-1]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="take this one and measure no other"
    )
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
