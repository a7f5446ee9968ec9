"""How fast plans are made, without torch, in seconds of CPU: others may compute beside it.

Promises (median of --rounds):
  Skrull       micro-batches and placements of 64 sequences on dp 4 x sp 8: 10 ms
  InfiniPipe   512 sequences of the github preset up to 192K, 4 stages, at a 2 % gap: 5 s
  search       1,024 sequences on 1,024 devices: 20 s
  simulate     100,000 actions: 2 s
  check        the same: 1 s
  liveness     of 25,000 chunks of one sequence: 1 s
  pack         100,000 sequences: 3 s
  join         128 replicas of 8 stages, 80,000 actions: 2.5 s
  import       `import furlong`, and `furlong train --help`: 0.5 s each
Exits 1 on a miss.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness import Promise, console, machine, print_promises

sys.path.append(str(Path(__file__).resolve().parents[1] / "research"))

from papers.chunkflow_plan import plan_chunkflow
from papers.published.chunks import by_order
from papers.unit_costs import UnitCosts
from papers.whole_sequences import schedule_skrull

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.check import check
from furlong.plan.passes import kv_frees
from furlong.plan.plan import ChunkPlan
from furlong.planners import infinipipe
from furlong.planners.chunks import pack, sequence_work
from furlong.planners.layouts import cut_layers, mean_attended_keys
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas
from furlong.planners.question import Limits, Question
from furlong.planners.search import search
from furlong.simulate.clock import simulate

_NUM_ACTIONS = 100_000
_CONTEXT_TOKENS = 192 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    plan = _large_plan()
    promises = [
        _at_most("Skrull: seconds", _skrull(), 20 * rounds, 0.01),
        _at_most("InfiniPipe: seconds", _infinipipe, rounds, 5),
        _at_most("search: seconds", _search, rounds, 20),
        _at_most(f"simulate {_NUM_ACTIONS:,} actions: seconds",
                 lambda: simulate(plan, UnitCosts(plan)), rounds, 2),
        _at_most(f"check {_NUM_ACTIONS:,} actions: seconds",
                 lambda: check(replace(plan)), rounds, 1),
        _at_most("liveness of 25,000 chunks: seconds", _liveness(), rounds, 1),
        _at_most("pack 100,000 sequences: seconds", _pack(), rounds, 3),
        _at_most("join 1,024 ranks: seconds", _join(), rounds, 2.5),
        _at_most("import furlong: seconds", _python("-c", "import furlong"), rounds, 0.5),
        _at_most("furlong train --help: seconds",
                 _python(str(Path(sys.executable).with_name("furlong")), "train", "--help"),
                 rounds, 0.5),
    ]  # fmt: skip
    print_promises(promises)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return int(any(promise.verdict == "MISSED" for promise in promises))


def _at_most(name: str, run: Callable[[], object], rounds: int, bound_s: float) -> Promise:
    seconds = []
    for _ in range(rounds):
        start_s = _cpu_s()
        run()
        seconds.append(_cpu_s() - start_s)
    return Promise(name, tuple(seconds), "<=", bound_s)


def _cpu_s() -> float:
    """Seconds of CPU of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def _skrull() -> Callable[[], object]:
    shape = model_shape("Qwen2.5-0.5B")
    lens = sample_lengths("chatqa2", 64)
    work = sequence_work(lens, shape)
    return lambda: schedule_skrull(lens, work, dp_size=4, sp_size=8, bucket_tokens=26 * 1024)


def _infinipipe() -> None:
    lens = [min(n, _CONTEXT_TOKENS) for n in sample_lengths("github", 512)]
    model = CostModel(model_shape("GPT-13B"), Machine.named("A800"), Training(zero_stage=3))
    stages = cut_layers(model, 4, mean_attended_keys(lens))
    made = infinipipe.plan_infinipipe(lens, model, stages=stages, sp_size=8)
    num_slices = max(map(len, made.groups.values()))
    console.print(f"InfiniPipe: {num_slices} slices, {len(made.chunks)} chunks")


def _search() -> None:
    lens = [min(n, _CONTEXT_TOKENS) for n in sample_lengths("github", 1024)]
    model = CostModel(model_shape("Llama-3-8B"), Machine.named("H100"))
    spec = model.hardware
    limits = Limits(spec.budget_bytes, int(spec.host_bytes))
    found = search(Question([lens], model, limits, num_devices=1024))
    best = found.best
    console.print(
        f"search: {best.method}, {best.layout}, {best.step_s:.3g} s per step; "
        f"{len(found.tried)} tried, {found.num_pruned} left out by their bounds"
    )


def _liveness() -> Callable[[], object]:
    plan = plan_chunkflow([100_000], ChunkOptions(size=4, keep="kv"), stages=(1,))
    return lambda: kv_frees(plan, 0)


def _pack() -> Callable[[], object]:
    draw = random.Random(0)
    seq_lens = {seq_id: draw.randint(1, 4096) for seq_id in range(100_000)}
    return lambda: pack(seq_lens, 4096)


def _join() -> Callable[[], object]:
    lens = [64] * (128 * 20)
    dealt = by_order(len(lens), 128)
    plan = plan_chunkflow([64] * 20, ChunkOptions(size=64), stages=(4,) * 8)
    return lambda: join_replicas([plan] * 128, dealt, lens)


def _large_plan() -> ChunkPlan:
    """A pipeline of 16 stages with at least that many actions."""
    options = ChunkOptions(size=1024, keep="kv")
    num_tokens = _NUM_ACTIONS
    while True:
        plan = plan_chunkflow((num_tokens,), options, stages=(2,) * 16)
        if sum(map(len, plan.actions)) >= _NUM_ACTIONS:
            return plan
        num_tokens *= 2


def _python(*arguments: str) -> Callable[[], object]:
    return lambda: subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, timeout=60
    )


if __name__ == "__main__":
    sys.exit(main())
