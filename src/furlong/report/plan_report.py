"""Figures of a plan on a cost model: seconds and their shares, bytes and their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.cost.memory.curve import MemoryCurve
from furlong.cost.memory.levels import PARTS, Part
from furlong.cost.memory.traffic import PlanTraffic, tier_of
from furlong.cost.model import CostModel, Hidden, PlanCosts
from furlong.plan.runnable import missing_to_run
from furlong.plan.values import ON_DEVICE, Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.report.pictures.scene import Panel
from furlong.simulate.clock import simulate
from furlong.simulate.figures import StepFigures, measure
from furlong.timeline import Timeline

_WAITS: tuple[Hidden, ...] = ("streams", "all-to-all", "gathers")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Shares of all ranks' time; they add up to 1."""

    compute: float
    """Forwards, backwards and recomputation, without what they wait for inside."""
    all_to_all: float
    """Exchanges of sharded slices, as far as no attention hides them."""
    collectives: float
    """FSDP: weights gathered, gradients reduced, as far as no computation hides it."""
    copies: float
    """Copies between tiers, as far as no computation hides them."""
    idle_and_p2p: float
    """Idle, or waiting for a message."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak of one rank."""

    parts: dict[Part, int]
    """On its device, at the action that needs most."""
    host_bytes: int
    """In the host's memory, at its own peak."""
    disk_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlanReport:
    """A plan on a cost model."""

    plan: ChunkPlan
    timeline: Timeline
    figures: StepFigures
    breakdown: Breakdown
    memory: tuple[RankMemory, ...]
    """One per rank; of a rank's processes the one that needs most."""
    traffic: tuple[PlanTraffic, ...]
    """One per rank; of a rank's processes the one that moves most."""
    budget_bytes: int
    """Budget of one device."""
    num_tokens: int
    """Tokens of the batch, padding left out."""
    curves: tuple[MemoryCurve, ...] = field(repr=False, compare=False)
    """The bytes of each rank while each of its actions runs."""

    @property
    def step_s(self) -> float:
        return self.figures.duration_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        return max(rank.device_bytes for rank in self.memory)

    @property
    def missing(self) -> str:
        """The words for what the plan needs beyond one process; empty where that runs it."""
        return missing_to_run(self.plan, self.num_tokens)

    def panel(self, title: str, note: str = "") -> Panel:
        """The plan as one panel of a picture."""
        limits = (self.budget_bytes,) * len(self.memory)
        return Panel(self.timeline, self.plan, title, limits, note=note, memory=self.curves)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        breakdown = {name: getattr(self.breakdown, name) for name in Breakdown.__slots__}
        return {
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "bubble_ratio": self.figures.bubble_ratio,
            "breakdown": breakdown,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "memory": [
                {"rank": rank, "device_bytes": own.device_bytes, "host_bytes": own.host_bytes}
                | {"disk_bytes": own.disk_bytes, "parts": own.parts}
                | {"moved": _moved_json(self.traffic[rank])}
                for rank, own in enumerate(self.memory)
            ],
            "figures": self.figures.to_json(),
            "runs_here": not self.missing,
            "missing_to_run": self.missing,
        }


def report_plan(
    plan: ChunkPlan,
    model: CostModel,
    budget_bytes: int | None = None,
    num_tokens: int | None = None,
) -> PlanReport:
    """Simulate a plan that has passed `plan.check` and measure it.

    `budget_bytes`: of a device. `num_tokens`: of the batch; None: as many as the plan has, which
    may pad.
    """
    costs, memory = model.costs(plan), model.memory(budget_bytes)
    walks = [memory.walk(plan, rank) for rank in range(len(plan.actions))]
    curves = [curve for curve, _ in walks]
    timeline = simulate(
        plan, costs,
        copies=None if plan.tiers == ON_DEVICE else costs,
        memory=_Known([curve.device_bytes for curve in curves], memory.device_budget_bytes),
        host_memory=_Known([curve.lower_bytes for curve in curves], 0),
    )  # fmt: skip
    figures = measure(timeline)
    return PlanReport(
        plan=plan,
        timeline=timeline,
        figures=figures,
        breakdown=break_down(plan, model, figures),
        memory=tuple(_rank_memory(curve) for curve in curves),
        traffic=tuple(traffic for _, traffic in walks),
        budget_bytes=memory.device_budget_bytes,
        num_tokens=sum(plan.seq_lens) if num_tokens is None else num_tokens,
        curves=tuple(curves),
    )


def break_down(plan: ChunkPlan, model: CostModel, figures: StepFigures) -> Breakdown:
    """The shares of a simulated step's time.

    A wait inside computing actions is what they take less when it is free; the waits are freed one
    after the other, so that each second is counted once.
    """
    shares = figures.shares()
    total_s = figures.duration_s * len(figures.ranks) or 1.0
    inside: dict[Hidden, float] = {}
    before_s = _computing_s(plan, model.costs(plan, free=_WAITS))
    for number, wait in enumerate(_WAITS, start=1):
        after_s = _computing_s(plan, model.costs(plan, free=_WAITS[number:]))
        inside[wait] = (after_s - before_s) / total_s
        before_s = after_s
    computing = shares["forward"] + shares["backward"] + shares["recompute"]
    return Breakdown(
        compute=computing - sum(inside.values()),
        all_to_all=inside["all-to-all"],
        collectives=shares["collectives"] + inside["gathers"],
        copies=shares["copies"] + inside["streams"],
        idle_and_p2p=shares["messages"] + shares["waiting"],
    )


def _moved_json(traffic: PlanTraffic) -> dict[str, dict[str, Any]]:
    return {
        kind: {"tier": tier_of(traffic.tiers, kind), "read_bytes": read, "written_bytes": written}
        for kind, (read, written) in traffic.by_kind().items()
    }


def _rank_memory(curve: MemoryCurve) -> RankMemory:
    peak = curve.peak
    lower = (int(tier.max(initial=0)) for tier in (curve.host, curve.disk))
    return RankMemory({part: peak[part] for part in PARTS}, *lower)


def _computing_s(plan: ChunkPlan, costs: PlanCosts) -> float:
    """Seconds of all cells of all ranks."""
    cells = (Forward, Recompute, Backward, RebuildKV)
    return sum(
        costs.compute_s(action, rank)
        for rank, actions in enumerate(plan.actions)
        for action in actions
        if isinstance(action, cells)
    )


class _Known:
    """Bytes that have been counted, as the clock asks for them."""

    def __init__(self, in_use: Sequence[Sequence[int]], budget_bytes: int) -> None:
        self._in_use, self._budget_bytes = in_use, budget_bytes

    def budget_bytes(self, rank: int) -> int:
        return self._budget_bytes

    def bytes_after(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        return self._in_use[rank]
