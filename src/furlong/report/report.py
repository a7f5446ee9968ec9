"""Predicted figures of a plan: seconds and their breakdown, bytes and their parts."""

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
from furlong.simulate.clock import SimulatedStep, measure, simulate
from furlong.timeline import Timeline
from furlong.units import format_bytes

Wait = Literal["compute", "all_to_all", "collectives", "copies", "idle_and_p2p"]


@dataclass(frozen=True)
class PlanReport:
    """Figures of a plan, predicted by a cost model."""

    plan: ChunkPlan
    timeline: Timeline
    figures: SimulatedStep
    breakdown: dict[Wait, float]
    """Shares of all ranks' time, by activity; they add up to 1."""
    pool_idle_ratio: float
    """Share of the processes' time inside passes in which they wait for the slowest process of
    their pool (the `sp_size` processes of a rank), 0..1. Other figures leave it out: they time a
    rank by its slowest process."""
    model: CostModel = field(repr=False, compare=False)
    """Cost model; `hardware.host_bytes` is the budget of CPU memory per device."""
    budget_bytes: int
    """Budget of one device."""
    disk_budget_bytes: int | None
    """Budget of disk per process; None: no limit."""
    num_processes: int
    """Number of processes available to run the plan."""
    refused: str
    """Reason for which `furlong train` refuses the run, whatever its plan; empty if none."""
    gathers_s: float
    """Seconds on the links for gathering weights, on the rank with the most."""
    memory: tuple[MemoryCurve, ...] = field(repr=False, compare=False)
    """For each rank, the bytes in use during each action, and its copies."""

    @property
    def step_s(self) -> float:
        return self.figures.duration_s

    @cached_property
    def update_s(self) -> float:
        """Seconds of the optimizer's step, which no other figure but `whole_step_s` includes."""
        return update_s(self.model, self.plan)

    @property
    def whole_step_s(self) -> float:
        """Seconds of the step, the optimizer's update included."""
        return self.step_s + self.update_s

    @cached_property
    def weights(self) -> RankWeights:
        """The weights of the rank that holds the most bytes of weights."""
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
        """Bytes of weights that a step copies from CPU memory to a device, for the rank with the
        most weights."""
        own = self.weights
        actions = self.plan.actions[self.plan.held.index(tuple(sorted(own.held)))]
        return round(sum(own.brought_bytes(a.stage) for a in actions if isinstance(a, Unshard)))

    @property
    def lost(self) -> dict[str, float]:
        """Time lost as counted in the bubble ratio, by cause: {words: share of the ranks' time}."""
        return lost_shares(self.figures)

    def mfu(self, *, masked: bool = True) -> float | None:
        """Return model FLOPs (`cost.seconds.step_flops`) of the whole step over the peak FLOPs of
        all devices, 0..1. `masked`: count only query-key pairs inside the causal mask.

        None if some chunks have no Backward, and on a CPU without a measured peak.
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
        """Text: everything that the plan needs and the available processes do not have; empty if
        nothing."""
        needed = len(self.plan.actions) * self.plan.sp_size
        parts = self.lacks
        if self.plan.regathers and not self.plan.replicated:
            parts.append("weights that are gathered with every pass (ZeRO-3)")
        if needed != self.num_processes:
            parts.append(f"{needed} processes that run it by furlong.Engine.run")
        return ", ".join(parts)

    @property
    def lacks(self) -> list[str]:
        """One text for each memory (device, CPU, disk) whose budget at least one rank exceeds. The
        text has the needed and the available bytes."""
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
        """Sizes of data, sequence and pipeline parallelism, as `dp`, `sp`, `pp`, and of the plan's
        pools.

        A pool is a group of `sp_size` devices that forms one rank. If no pool shards a sequence,
        its devices count as data parallelism: `sp` is 1, and `dp` is multiplied by `sp_size`.
        """
        pp = ranks_per_replica(self.plan)
        dp, sp_size = len(self.plan.actions) // pp, self.plan.sp_size
        sizes = self.plan.sizes_of_places
        dp, sp = (dp * sp_size, 1) if sizes == (1,) else (dp, sp_size)
        return {"dp": dp, "sp": sp, "pp": pp, "sp_size": sp_size, "sizes_of_places": sizes}

    def panel(self, title: str, note: str = "") -> Panel:
        """Return the plan's timeline as one panel of a picture. `note`: a line under the title."""
        if self.pool_idle_ratio >= 5e-4:
            idle = f"{self.pool_idle_ratio:.1%} of the processes' time in passes is idle"
            note = "; ".join(filter(None, (note, idle)))
        return Panel(self.timeline, self.plan, title, note, self.budget_bytes, self.memory)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
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
    """Simulate a plan that has passed `plan.check`; return its figures.

    Args:
        plan: The plan.
        model: Its cost model.
        budget_bytes: Budget of one device; None: that of the cost model.
        disk_budget_bytes: Budget of disk per process; None: no limit.
        num_processes: Number of processes available to run the plan.
        refused: Reason for which `furlong train` refuses the run; empty if none.
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
    plan: ChunkPlan, model: CostModel, costs: PlanCosts, figures: SimulatedStep
) -> dict[Wait, float]:
    """Return the shares of a simulated step's time by activity, {activity: 0 to 1}.

    Waits within forwards and backwards are measured by difference: computing times are predicted
    again without one kind of wait, then without two, and so on. The share of a kind is the time
    that is saved by leaving it out, so each second counts once.
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
        # of the slowest process of each pool, without its waits inside passes
        "compute": 1 - figures.idle_ratio - sum(inside.values()) if figures.ranks else 0.0,
        "all_to_all": inside["all-to-all"],  # the part that attention does not hide
        # gathers of weights and reduction of gradients, the part that computation does not hide
        "collectives": shares["collectives"] + inside["gathers"],
        "copies": shares["copies"] + inside["streams"],  # likewise
        "idle_and_p2p": shares["messages"] + shares["waiting"],
    }


def _pool_idle_ratio(plan: ChunkPlan, model: CostModel) -> float:
    """Return the share of time that the processes of a pool (a sequence-parallel group) wait for
    the slowest process, 0 to 1. For each kind of work in each pass, take the mean and the maximum
    of the processes' seconds; the result is 1 - (sum of means) / (sum of maxima).

    Gathers of weights are left out, since they take all processes of a pool equally long.
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
    """Return the seconds of all forwards, backwards and recomputes, summed over the ranks."""
    return sum(costs.compute_s(action, rank) for action, rank in _computing(plan))


def _computing(plan: ChunkPlan) -> Iterator[tuple[Computing, int]]:
    """Yield (action, rank) of each forward, backward and recompute."""
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if isinstance(action, COMPUTING):
                yield action, rank
