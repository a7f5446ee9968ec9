"""Figures of a plan on a cost model: seconds and their shares, bytes and their parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from furlong.cost.memory import MemoryCurve
from furlong.cost.model import CostModel, PlanCosts, update_s
from furlong.cost.seconds import Array, Hidden, PassPart
from furlong.plan.plan import COMPUTING, ON_DEVICE, ChunkPlan, Computing
from furlong.report.scene import Panel, ranks_per_replica
from furlong.simulate.clock import StepFigures, measure, simulate
from furlong.timeline import Timeline
from furlong.units import format_bytes

Wait = Literal["compute", "all_to_all", "collectives", "copies", "idle_and_p2p"]


@dataclass(frozen=True)
class PlanReport:
    """A plan on a cost model."""

    plan: ChunkPlan
    timeline: Timeline
    figures: StepFigures
    breakdown: dict[Wait, float]
    """The shares of all ranks' time, by what it goes into; they add up to 1."""
    pool_idle_ratio: float
    """Share of the processes' time inside passes in which they wait for the slowest process of
    their pool, 0..1. No other figure has it: a rank's time is that of its slowest process."""
    update_s: float
    """Seconds of the optimizer's step behind it, which no other figure counts."""
    budget_bytes: int
    """Budget of one device."""
    cpu_budget_bytes: int
    """A device's share of the CPU memory of its node."""
    num_processes: int
    """Processes that are there to run it."""
    memory: tuple[MemoryCurve, ...] = field(repr=False, compare=False)
    """The bytes of each rank while each of its actions runs, and what it moves."""

    @property
    def step_s(self) -> float:
        return self.figures.duration_s

    @property
    def tokens_per_s(self) -> float:
        return sum(self.plan.seq_lens) / self.step_s if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def missing(self) -> str:
        """The words for what the plan needs beyond the processes and their memory; empty where they
        run it."""
        needed = len(self.plan.actions) * self.plan.sp_size
        parts = self.lacks
        if self.plan.regathers and self.layout["pp"] > 1:
            parts.append("a pipeline that gathers its weights with every pass (ZeRO-3)")
        if needed != self.num_processes:
            parts.append(f"{needed} processes that run it by furlong.Engine.run")
        return ", ".join(parts)

    @property
    def lacks(self) -> list[str]:
        """The words for each memory of which a rank needs more than there is."""
        cpu_bytes = max(rank.peak_cpu_bytes for rank in self.memory)
        return [
            f"{format_bytes(needed)} on a {memory} that has {format_bytes(budget)}"
            for memory, needed, budget in (
                ("device", self.peak_bytes, self.budget_bytes),
                ("CPU", cpu_bytes, self.cpu_budget_bytes),
            )
            if needed > budget
        ]

    @property
    def layout(self) -> dict[str, Any]:
        """Sizes of the axes. A pool that shards no sequence is data parallelism, and counts as dp;
        `sp_size` is the plan's own."""
        pp = ranks_per_replica(self.plan)
        dp, sp_size = len(self.plan.actions) // pp, self.plan.sp_size
        sizes = self.plan.sizes_of_places
        dp, sp = (dp * sp_size, 1) if sizes == (1,) else (dp, sp_size)
        return {"dp": dp, "sp": sp, "pp": pp, "sp_size": sp_size, "sizes_of_places": sizes}

    def panel(self, title: str, note: str = "") -> Panel:
        """The plan as one panel of a picture."""
        if self.plan.sp_size > 1:
            idle = f"{self.pool_idle_ratio:.1%} of the processes' time in passes is idle"
            note = "; ".join(filter(None, (note, idle)))
        return Panel(self.timeline, self.plan, title, note, self.budget_bytes, self.memory)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "layout": self.layout,
            "step_s": self.step_s,
            "optimizer_s": self.update_s,
            "tokens_per_s": self.tokens_per_s,
            "bubble_ratio": self.figures.bubble_ratio,
            "pool_idle_ratio": self.pool_idle_ratio,
            "breakdown": self.breakdown,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "memory": [
                {
                    "rank": rank,
                    "device_bytes": own.peak_bytes,
                    "parts": own.peak,
                    "cpu_bytes": own.peak_cpu_bytes,
                    "disk_bytes": own.peak_disk_bytes,
                    "moved": own.traffic.to_json(),
                }
                for rank, own in enumerate(self.memory)
            ],
            "figures": self.figures.to_json(),
            "fits": not self.lacks,
            "runs_here": not self.missing,
            "missing_to_run": self.missing,
        }


def report_plan(
    plan: ChunkPlan,
    model: CostModel,
    budget_bytes: int | None = None,
    *,
    num_processes: int = 1,
) -> PlanReport:
    """Simulate a plan that has passed `plan.check` and measure it.

    `budget_bytes`: of a device. `num_processes`: those that are there to run it.
    """
    costs, memory = model.costs(plan), model.memory(budget_bytes)
    curves = [memory.curve(plan, rank) for rank in range(len(plan.actions))]
    timeline = simulate(
        plan, costs,
        copies=None if plan.offload == ON_DEVICE else costs,
        device_bytes=[curve.device_bytes for curve in curves],
        offloaded_bytes=[curve.lower_bytes for curve in curves],
    )  # fmt: skip
    figures = measure(timeline, plan)
    return PlanReport(
        plan, timeline, figures,
        breakdown=_break_down(plan, model, costs, figures),
        pool_idle_ratio=_pool_idle_ratio(plan, model),
        update_s=update_s(model, plan),
        budget_bytes=memory.device_budget_bytes,
        cpu_budget_bytes=int(model.hardware.host_bytes),
        num_processes=num_processes,
        memory=tuple(curves),
    )  # fmt: skip


def _break_down(
    plan: ChunkPlan, model: CostModel, costs: PlanCosts, figures: StepFigures
) -> dict[Wait, float]:
    """The shares of a simulated step's time.

    A wait inside computing actions is what they take less when it is free; the waits that the plan
    may have are freed one after the other, so that each second is counted once.
    """
    shares, total_s = figures.shares(), figures.duration_s * len(figures.ranks) or 1.0
    may_be: dict[Hidden, bool] = {
        "gathers": plan.regathers or model.training.zero_stage == 3,
        "all-to-all": plan.sp_size > 1,
        "streams": plan.offload.kv != "none",
    }
    inside = dict.fromkeys(may_be, 0.0)
    free: list[Hidden] = []
    with_s = _computing_s(plan, costs)
    for wait in (wait for wait, may in may_be.items() if may):
        free.append(wait)
        without_s = _computing_s(plan, model.costs(plan, free=free))
        inside[wait], with_s = (with_s - without_s) / total_s, without_s
    return {
        # the slowest process of each pool, without what it waits for inside
        "compute": 1 - figures.idle_ratio - sum(inside.values()) if figures.ranks else 0.0,
        "all_to_all": inside["all-to-all"],  # as far as no attention hides it
        # weights gathered and gradients reduced, as far as no computation hides it
        "collectives": shares["collectives"] + inside["gathers"],
        "copies": shares["copies"] + inside["streams"],  # as far as no computation hides them
        "idle_and_p2p": shares["messages"] + shares["waiting"],
    }


def _pool_idle_ratio(plan: ChunkPlan, model: CostModel) -> float:
    """1 - mean / max of the seconds of a pool's processes, over all parts of all passes.

    Gathering weights is left out: all processes of a pool do it alike, however few tokens they
    have.
    """
    if plan.sp_size == 1:
        return 0.0
    gathers: Hidden = "gathers"
    costs = model.costs(plan, free=[gathers])
    times: dict[tuple[PassPart, int], Array] = defaultdict(lambda: np.zeros(len(plan.chunks)))
    for action, _ in _computing(plan):
        for part in costs.parts(action):
            times[part, action.stage][action.chunk] += 1
    busy_s = pool_s = 0.0
    for (part, stage), counts in times.items():
        (seconds,) = costs.process_seconds((part,), stage, costs.table)
        busy_s += float(seconds.mean(axis=0) @ counts)
        pool_s += float(seconds.max(axis=0) @ counts)
    return max(0.0, 1 - busy_s / pool_s) if pool_s else 0.0  # a mean of equals may round up


def _computing_s(plan: ChunkPlan, costs: PlanCosts) -> float:
    """Seconds of all cells of all ranks."""
    return sum(costs.compute_s(action, rank) for action, rank in _computing(plan))


def _computing(plan: ChunkPlan) -> Iterator[tuple[Computing, int]]:
    """(action, rank) of everything that computes a cell."""
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if isinstance(action, COMPUTING):
                yield action, rank
