"""The search of `auto` on one device: over orders, stage heights, chunk sizes, keeps and tiers.

    found = search_device(Space(model, ...), Limits(24 * 2**30, disk_bytes=10**12))
    found.best.options, found.best.step_s, found.best.needs

Every candidate has closed forms (`auto.estimate`): those whose least bytes exceed a budget are left
out, the others are taken by their estimated seconds, simulated, and walked on the longest sequence,
which must fit. Work is bounded by counts, never by a clock: equal questions have equal answers.

Where the given dials sample, seconds are those of a draw, which is the same for all candidates; but
memory must hold the exact plan, for any draw may be of all chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from furlong.cost.memory import MemoryCurve
from furlong.plan.plan import Chunk, Tiers
from furlong.planners.auto.byte_bound import ByteBound, Share
from furlong.planners.auto.candidates import Space, options_of, sizes
from furlong.planners.auto.estimate import TimeEstimate
from furlong.planners.auto.steps import (
    busiest_groups,
    busiest_s,
    deal_steps,
    longest_step,
    one_list,
    plan_of,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import stages_of
from furlong.planners.predict import Needs, needs_of
from furlong.planners.question import Limits

SLACK = 0.02
"""Plans whose times differ by less are alike: no prediction is better."""
_NEAR = 0.005
"""Share by which the size named in a message of what would fit may be wrong."""
_MAX_ACTIONS = 16_000
"""Actions that are walked and simulated in all once a plan fits, twice as many while none does:
then the search ends."""


@dataclass(frozen=True)
class Tried:
    """One plan, simulated and walked."""

    options: ChunkOptions
    step_s: float
    """Seconds of all steps of the search's batch together."""
    needs: Needs
    curve: MemoryCurve
    """Bytes over the step of the longest sequence."""


@dataclass(frozen=True)
class Searched:
    """The outcome of a search."""

    tried: tuple[Tried, ...]
    """The plans that fit, the chosen one first, then by their seconds."""
    refused: tuple[Tried, ...]
    """The plans that do not fit after all, the one that lacks least first."""
    alike: int
    """Plans of the chosen one's order, heights and tiers within the slack of its time."""
    num_pruned: int
    """Candidates that were left out by their bounds: their least bytes, or their seconds."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the search took."""

    @property
    def best(self) -> Tried:
        return self.tried[0]


def search_device(space: Space, budgets: Limits) -> Searched:
    """The fastest plan that fits; of those alike the one that needs least memory on the device.
    Where none fits, not with four times as many chunks and cells either, nothing is in `tried`."""
    started_s = time.monotonic()
    state = _Search(space, budgets)
    if not state.run():
        finer = replace(space, most_chunks=4 * space.most_chunks, most_cells=4 * space.most_cells)
        state = _Search(finer, budgets)
        if not state.run():
            state.try_least()
    return state.found(started_s)


class _Search:
    def __init__(self, space: Space, budgets: Limits) -> None:
        self._space, self._budgets = space, budgets
        self._dealt = deal_steps(space)
        self._groups: dict[int, list[list[list[Chunk]]]] = {}
        self._fitting: list[Tried] = []
        self._refused: list[Tried] = []
        self._num_actions = 0
        self._all = list(self._candidates())

    def run(self) -> bool:
        """Whether a plan fits."""
        open_ones = [c for c in self._all if self._budgets.hold(c[1])]
        open_ones.sort(key=lambda c: (c[0], _num_lowered(c[2].tiers), c[1]))
        for estimate_s, _, options in open_ones:
            if self._is_done(estimate_s):
                break
            self._try(options)
        return bool(self._fitting)

    def found(self, started_s: float) -> Searched:
        num_tried = len(self._fitting) + len(self._refused)
        tried, alike = self._ranked()
        refused = sorted(self._refused, key=lambda t: self._budgets.lacking(t.needs))
        return Searched(
            tried, tuple(refused), alike, len(self._all) - num_tried,
            seconds=time.monotonic() - started_s,
        )  # fmt: skip

    def try_least(self) -> None:
        """Finds what lacks least, for the message that no plan fits."""
        lacks = self._budgets.lacking
        known = {tried.options for tried in self._refused}
        for _, needs, options in sorted(self._all, key=lambda c: (lacks(c[1]), c[0])):
            nearest = min((lacks(t.needs) for t in self._refused), default=inf)
            if self._fitting or nearest <= lacks(needs) + _NEAR * sum(needs):
                break
            if options not in known:
                self._try(options)

    def _is_done(self, estimate_s: float) -> bool:
        if self._num_actions > _MAX_ACTIONS * (1 if self._fitting else 2):
            return True
        if len(self._fitting) < 2 or "sample" in self._space.given:
            return False  # the estimates are of whole backwards
        return estimate_s > self._fastest.step_s * (1 + SLACK)

    @property
    def _fastest(self) -> Tried:
        return min(self._fitting, key=lambda t: (t.step_s, _num_lowered(t.options.tiers)))

    def _ranked(self) -> tuple[tuple[Tried, ...], int]:
        """The plans that fit, the chosen one first, then by seconds; and how many are alike."""
        if not self._fitting:
            return (), 0
        fastest = self._fastest
        alike = [
            tried
            for tried in self._fitting
            if _walk_of(tried.options) == _walk_of(fastest.options)
            and tried.step_s <= fastest.step_s * (1 + SLACK)
        ]
        best = min(alike, key=lambda tried: (tried.needs, tried.step_s))
        others = sorted((t for t in self._fitting if t is not best), key=lambda t: t.step_s)
        return (best, *others), len(alike)

    def _try(self, options: ChunkOptions) -> None:
        space = self._space
        plan = plan_of(space, options, longest_step(space, options.size))
        memory = space.model.memory()
        curves = [memory.curve(plan, rank) for rank in range(len(plan.actions))]
        curve = max(curves, key=lambda curve: self._budgets.lacking(needs_of(curve)))
        needs = Needs(*map(max, zip(*map(needs_of, curves), strict=True)))
        self._num_actions += sum(map(len, plan.actions))
        if not self._budgets.hold(needs):
            self._refused.append(Tried(options, 0.0, needs, curve))
            return
        groups = self._chunks(options.size)
        step_s = busiest_s(space, groups, options)
        self._num_actions += sum(map(len, one_list(groups))) * self._simulated(options)
        self._fitting.append(Tried(options, step_s, needs, curve))

    def _candidates(self) -> Iterator[tuple[float, Needs, ChunkOptions]]:
        """For each candidate its seconds, about, its least bytes, and its options."""
        space = self._space
        for size in sizes(space):
            steps = self._chunks(size)
            estimate = TimeEstimate(
                space.model, one_list(steps), sp_size=space.layout.sp, stages=space.stages,
                num_steps=len(steps),
            )  # fmt: skip
            bounds = bounds_of(space, size)
            for options in options_of(space, size, self._budgets.lower_tiers):
                needs = Needs(*map(max, zip(*(b.needs(options) for b in bounds), strict=True)))
                yield estimate.seconds(options), needs, options

    def _simulated(self, options: ChunkOptions) -> int:
        """Number of actions of a chunk in a simulation, about: layer-first those of four stages, of
        a draw of all."""
        if options.order == "chunk-first":
            return 3 * max(1, 2 * len(self._space.stages))
        num_stages = len(stages_of(self._space.model.shape.num_layers, options))
        return 14 if options.sampling is None else 4 * num_stages

    def _chunks(self, size: int) -> list[list[list[Chunk]]]:
        if size not in self._groups:
            self._groups[size] = busiest_groups(self._space, self._dealt, size)
        return self._groups[size]


def bounds_of(space: Space, size: int) -> list[ByteBound]:
    """Bounds of the bytes of a device; of a pipeline those of the first and the last stage."""
    layout, stages = space.layout, space.stages
    longest, *others = longest_step(space, size)
    share = -longest % size and others.pop(0) if others else 0
    first = Share(stages=stages, sp_size=layout.sp, group_size=layout.dp * layout.sp)
    shares = [first]
    if stages:
        ahead = sum(others) // layout.sp
        shares = [replace(first, ahead_tokens=ahead), replace(first, stage=len(stages) - 1)]
    return [ByteBound(space.model, longest, size, share, one) for one in shares]


def _walk_of(options: ChunkOptions) -> tuple[object, ...]:
    return options.order, options.stage_layers, options.tiers


def _num_lowered(tiers: Tiers) -> int:
    """Number of kinds of memory that leave the device: of two plans as fast, fewer are better."""
    kinds = (tiers.kv, tiers.inputs, tiers.attention, tiers.graphs)
    return sum(tier != "device" for tier in kinds)
