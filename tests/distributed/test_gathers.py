"""Gathers of weights that run beside cells, of four processes whose links take their time.

Time is virtual: links and layers take seconds that each process adds up, so that what is waited for
follows from the order in which the runtime gathers, computes and waits, on a machine of any load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import NUM_LAYERS, llama
from helpers.batches import batch
from helpers.ranks import run_all
from torch import Tensor

import furlong
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.plan.plan import ChunkPlan, Forward, Unshard
from furlong.planners.orders import join_kept, plan_replica
from furlong.runtime.distributed.fsdp import reshard, shard
from furlong.runtime.distributed.mesh import make_ranks
from furlong.simulate.clock import simulate

LENS = ((21, 4, 40, 7), (5, 9), (64,), (8, 8, 8, 8))
TOKEN_S = 1e-6
"""Of a forward through one layer; a gather takes 20e-6."""
ORDERS = (
    {"order": "chunk-first"},
    *({"order": "layer-first", "stage_layers": n} for n in (1, 2)),
    *({"order": "layer-first", "stage_layers": n, "reshard": True} for n in (1, 2)),
)


def plan_of(order: dict[str, Any], size: int) -> ChunkPlan:
    options = furlong.ChunkOptions(size=size, keep="all", **order)
    # without backwards, whose last ones wait for others' gradients
    plans = [plan_replica(own, options, num_layers=NUM_LAYERS, backward=False) for own in LENS]
    lens = [n for own in LENS for n in own]
    starts = [sum(map(len, LENS[:d])) for d in range(len(LENS))]
    ids = [list(range(at, at + len(own))) for at, own in zip(starts, LENS, strict=True)]
    return join_kept(plans, ids, lens, len(LENS))


@dataclass
class VirtualTime:
    """Seconds of one process within it; gathers take the links' one after the other."""

    model: CostModel
    now_s: float = 0.0
    waited_s: float = 0.0
    free_s: float = 0.0
    """When the links are free."""
    under_way: dict[int, tuple[list[dist.Work], Tensor, float]] = field(default_factory=dict)
    """The gathers that have been started and not been waited for, nor any that was started later:
    what brings them, when each process came to them, and their seconds."""
    ended_s: dict[int, float] = field(default_factory=dict)
    num_gathers: int = 0
    num_beside: int = 0
    """The most of them that were under way beside a layer."""

    def __enter__(self) -> VirtualTime:
        self._name = next(n for n in ("all_gather_single", "all_gather_into_tensor")
                          if hasattr(dist, n))  # fmt: skip
        self._own = getattr(dist, self._name)
        setattr(dist, self._name, self._gather)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(dist, self._name, self._own)

    def compute(self, num_tokens: int) -> None:
        """A layer runs."""
        self.now_s += num_tokens * TOKEN_S
        self.num_beside = max(self.num_beside, len(self.under_way))

    def _gather(
        self, output_tensor: Tensor, input_tensor: Tensor, **given: Any
    ) -> dist.Work | None:
        num_bytes = output_tensor.numel() * self.model.training.compute_bytes
        links, each = self.model.hardware.links, torch.tensor([self.now_s])
        seconds = links.collective_s("all_gather", num_bytes, len(LENS))
        come = torch.empty(len(LENS))
        works = [
            self._own(**tensors, **given | {"async_op": True})
            for tensors in (
                {"output_tensor": output_tensor, "input_tensor": input_tensor},
                {"output_tensor": come, "input_tensor": each},
            )
        ]
        self.num_gathers += 1
        number = self.num_gathers
        self.under_way[number] = works, come, seconds
        ended_s = self.ended_s

        def wait() -> None:
            # those that were started before have the links before it
            for earlier in [n for n in self.under_way if n <= number]:
                works, come, seconds = self.under_way.pop(earlier)
                for work in works:
                    work.wait()
                self.free_s = max(self.free_s, float(come.max())) + seconds
                ended_s[earlier] = self.free_s
            self.waited_s += max(0.0, ended_s[number] - self.now_s)
            self.now_s = max(self.now_s, ended_s[number])

        if given["async_op"]:
            return Delayed(wait)
        return wait()


class Delayed(dist.Work):
    """A gather that is over when its links have brought all."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True


def waits(rank: int) -> list[tuple[float, float, int]]:
    """Of each plan the seconds in which this process waited for gathers, those of the clock, and
    the most gathers that were under way beside a layer."""
    torch.set_default_dtype(torch.float64)
    model, found = llama(), []
    machine = Machine.named("H100")
    costs_of = CostModel(describe(model.config), machine, Training(zero_stage=1, gathers=True))
    engine = furlong.Engine(model, ranks=make_ranks(len(LENS), 1, 1, "cpu"))
    sequences = batch([n for own in LENS for n in own])
    running: list[VirtualTime] = []

    def compute(module: Any, given: Any, x: Tensor) -> None:
        for time in running:
            time.compute(x.numel() // x.shape[-1])

    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(compute)
    for order in ORDERS:
        for size in (8, 64):
            plan = plan_of(order, size)
            engine.run(plan, sequences)  # checks the model in these stages
            with VirtualTime(costs_of) as time:
                running[:] = [time]
                engine.run(plan, sequences)
            running.clear()
            assert not time.under_way and time.num_gathers == NUM_LAYERS + 3
            records = simulate(plan, Costs(plan, costs_of)).records
            cells = [r for r in records if r.rank == rank and isinstance(r.action, Forward)]
            worked_s = sum(r.stop_s - r.start_s for r in cells)
            found.append((time.waited_s, max(r.stop_s for r in cells) - worked_s, time.num_beside))
    return found


class Costs:
    """The cost model's gathers, and forwards of as many seconds as they have tokens."""

    def __init__(self, plan: ChunkPlan, model: CostModel) -> None:
        self._plan, self._costs = plan, model.costs(plan)
        self.blocking_s, self.link_s = self._costs.blocking_s, self._costs.link_s
        self.head_s = self._costs.head_s

    def compute_s(self, action: Any, rank: int) -> float:
        if isinstance(action, Unshard):
            return self._costs.compute_s(action, rank)
        if isinstance(action, Forward):
            layers = self._plan.stages[action.stage]
            return self._plan.chunks[action.chunk].num_tokens * layers * TOKEN_S
        return 0.0


def left_over(rank: int) -> tuple[float, float]:
    """A weight of a layer whose gather no pass has waited for, before and after an update."""
    model, ranks = llama(), make_ranks(len(LENS), 1, 1, "cpu")
    layer, *_ = model.model.layers
    shard(model, model.model.layers, (), ranks.shard_mesh)
    before = float(layer.input_layernorm.weight.full_tensor()[0])
    layer.unshard(async_op=True)
    reshard(model)
    with torch.no_grad():
        layer.input_layernorm.weight.to_local().add_(1)
    layer.unshard()
    return before, float(layer.input_layernorm.weight[0])


@pytest.mark.slow
def test_processes_wait_for_gathers_as_long_as_the_clock_says_and_none_outlives_its_step():
    waited, left = run_all(waits, left_over, num_ranks=len(LENS), limit_s=120)
    for found in waited:
        for measured_s, simulated_s, num_beside in found:
            assert measured_s == pytest.approx(simulated_s, rel=0.01)
            assert 0 < num_beside <= NUM_LAYERS  # the other layers and the head
    for before, after in left:
        assert after == before + 1
