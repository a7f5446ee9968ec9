"""Figures of a plan on a cost model: seconds and their shares, bytes and their parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from furlong.cost.memory import MemoryCurve
from furlong.cost.model import CostModel, PlanCosts, update_s
from furlong.cost.seconds import Array, Hidden, PassPart, step_flops
from furlong.cost.training import RankWeights
from furlong.plan.plan import COMPUTING, ON_DEVICE, Backward, ChunkPlan, Computing, Unshard
from furlong.report.scene import Panel, lost_shares, ranks_per_replica
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
    model: CostModel = field(repr=False, compare=False)
    """Its host's bytes are the budget of the CPU memory that a device may use."""
    budget_bytes: int
    """Budget of one device."""
    disk_budget_bytes: int | None
    """Bytes of the disk that a process may use; None: no limit."""
    num_processes: int
    """Processes that are there to run it."""
    refused: str
    """Why `furlong train` refuses the run, whatever its plan; empty where it does not."""
    gathers_s: float
    """Seconds of links in which weights are gathered, of the rank that takes longest."""
    memory: tuple[MemoryCurve, ...] = field(repr=False, compare=False)
    """The bytes of each rank while each of its actions runs, and what it moves."""

    @property
    def step_s(self) -> float:
        return self.figures.duration_s

    @cached_property
    def update_s(self) -> float:
        """Seconds of the optimizer's step, which no other figure of time counts."""
        return update_s(self.model, self.plan)

    @property
    def whole_step_s(self) -> float:
        """Seconds of the step with that of the optimizer."""
        return self.step_s + self.update_s

    @cached_property
    def weights(self) -> RankWeights:
        """The weights of the rank that holds most of them."""
        plan, training = self.plan, self.model.training
        found = (
            training.weights(
                self.model.shape, plan.stages, frozenset(held),
                len(plan.holders[held[0]]) * plan.sp_size * training.replicas,
            )
            for held in filter(None, plan.held)
        )  # fmt: skip
        return max(found, key=lambda own: own.share_bytes)

    @property
    def brought_bytes(self) -> int:
        """Bytes of weights that a step brings from CPU memory to that rank's device."""
        own = self.weights
        actions = self.plan.actions[self.plan.held.index(tuple(sorted(own.held)))]
        return round(sum(own.brought_bytes(a.stage) for a in actions if isinstance(a, Unshard)))

    @property
    def lost(self) -> dict[str, float]:
        """The parts of `bubble_ratio`, shares of the ranks' time, by the words of a page."""
        return lost_shares(self.figures)

    def mfu(self, *, masked: bool = True) -> float | None:
        """Model FLOPs (`cost.seconds.step_flops`) over those of all devices at the peak of
        `model.hardware` in the whole step, 0..1; `masked`: without the pairs of the causal mask.

        None where chunks have no backward, and on a CPU whose peak nobody has measured.
        """
        machine, plan, training = self.model.hardware, self.plan, self.model.training
        trained = {a.chunk for own in plan.actions for a in own if isinstance(a, Backward)}
        is_whole = len(trained) == sum(not chunk.is_dummy for chunk in plan.chunks)
        is_known = machine.device_type != "cpu" or "peak_flops_per_s" in machine.measurements
        if not (is_whole and is_known and self.step_s):
            return None
        flops = step_flops(
            self.model.shape, plan.seq_lens, has_frozen_base=training.lora is not None,
            masked=masked,
        )  # fmt: skip
        num_devices = len(plan.actions) * plan.sp_size
        return flops / (self.whole_step_s * machine.peak_flops_per_s * num_devices)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.plan.seq_lens) / self.step_s if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def runs_here(self) -> bool:
        return not (self.refused or self.missing)

    @property
    def missing(self) -> str:
        """The words for what the plan needs beyond the processes and their memory; empty where they
        run it."""
        needed = len(self.plan.actions) * self.plan.sp_size
        parts = self.lacks
        if self.plan.regathers and not self.plan.replicated:
            parts.append("weights that are gathered with every pass (ZeRO-3)")
        if needed != self.num_processes:
            parts.append(f"{needed} processes that run it by furlong.Engine.run")
        return ", ".join(parts)

    @property
    def lacks(self) -> list[str]:
        """The words for each memory of which a rank needs more than there is."""
        cpu_bytes = max(rank.peak_cpu_bytes for rank in self.memory)
        disk_bytes = max(rank.peak_disk_bytes for rank in self.memory)
        return [
            f"{format_bytes(needed)} on a {memory} that has {format_bytes(budget)}"
            for memory, needed, budget in (
                ("device", self.peak_bytes, self.budget_bytes),
                ("CPU", cpu_bytes, self.model.hardware.host_bytes),
                ("disk", disk_bytes, self.disk_budget_bytes),
            )
            if budget is not None and needed > budget
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
        if self.pool_idle_ratio >= 5e-4:
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
            "whole_step_s_between": self.model.hardware.seconds_between(self.whole_step_s),
            "weights": {
                "num_sharing": self.weights.group_size,
                "share_bytes": self.weights.share_bytes,
                "start_bytes": self.weights.start_bytes,
                "host_bytes": self.weights.host_bytes,
                "brought_bytes": self.brought_bytes,
                "whole_bytes": self.weights.whole_at_a_time(reshards=self.plan.reshards),
                "reshard": self.plan.reshards or self.plan.regathers,
                "gathers_s": self.gathers_s,
            },
            "mfu": self.mfu(),
            "mfu_unmasked": self.mfu(masked=False),
            "peak_flops_per_s": self.model.hardware.peak_flops_per_s,
            "bubble_ratio": self.figures.bubble_ratio,
            "lost": self.lost,
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
            "runs_here": self.runs_here,
            "missing_to_run": self.missing,
            "refused": self.refused,
        }


def report_plan(
    plan: ChunkPlan,
    model: CostModel,
    budget_bytes: int | None = None,
    *,
    disk_budget_bytes: int | None = None,
    num_processes: int = 1,
    refused: str = "",
) -> PlanReport:
    """Simulate a plan that has passed `plan.check` and measure it.

    `budget_bytes`: of a device. `disk_budget_bytes`: of the disk, None for no limit.
    `num_processes`: those that are there to run it. `refused`: why no run would.
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
        model=model,
        budget_bytes=memory.device_budget_bytes,
        disk_budget_bytes=disk_budget_bytes,
        num_processes=num_processes,
        refused=refused,
        gathers_s=max(
            sum(costs.gathers_s(action, rank) for action in own)
            for rank, own in enumerate(plan.actions)
        ),
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
