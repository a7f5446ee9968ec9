"""The search of `auto` over several devices: the dials of every layout, and their steps compared.

    found = search_layouts(Space(model, ...), [Layout(dp=2), Layout(sp=2)], budgets)
    found.best.layout, found.best.options, found.best.step_s

Each layout has a search of its own (`auto.search`), which times the replica with most work; the
best dials of each are then timed with all replicas and the sum of their gradients. Layouts are
opened by a bound of their time, until no other can be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from furlong.cost.training import ZeroStage
from furlong.plan.plan import Layout, Order
from furlong.planners.auto.candidates import Space
from furlong.planners.auto.search import SLACK, Searched, Tried, search_device
from furlong.planners.auto.steps import Dealt, deal_steps, mean_step_s
from furlong.planners.layouts import cut_layers
from furlong.planners.options import ChunkOptions
from furlong.planners.published.bounds import least_s
from furlong.planners.question import Limits

_MOST_WALKS = 4
"""Orders and heights of stages of which the replicas of a layout are joined and timed."""


@dataclass(frozen=True)
class FittingLayout:
    """A layout with its best dials."""

    space: Space
    searched: Searched
    step_s: float
    """Seconds of a step, on average."""

    @property
    def layout(self) -> Layout:
        return self.space.layout

    @property
    def options(self) -> ChunkOptions:
        return self.searched.best.options


@dataclass(frozen=True)
class TooLarge:
    """A layout of which no plan fits."""

    space: Space
    state_bytes: int
    """Weights, gradients and optimizer of the device that has most of them."""
    searched: Searched | None
    """Plans that were tried; None where the state alone does not fit."""

    @property
    def layout(self) -> Layout:
        return self.space.layout

    @property
    def nearest(self) -> Tried | None:
        """The plan that lacks least; None where none was tried."""
        return None if self.searched is None else self.searched.refused[0]


@dataclass(frozen=True)
class Slower:
    """A layout that was not opened."""

    layout: Layout
    least_s: float
    """No step of it is faster."""


@dataclass(frozen=True)
class SearchedLayouts:
    """The outcome over all layouts."""

    fitting: tuple[FittingLayout, ...]
    """The chosen one first, then by their seconds."""
    too_large: tuple[TooLarge, ...]
    slower: tuple[Slower, ...]

    budgets: Limits

    @property
    def best(self) -> FittingLayout:
        return self.fitting[0]

    @property
    def nearest(self) -> TooLarge:
        """The layout, where none fits, that lacks least."""
        return min(self.too_large, key=self.lacking_bytes)

    def lacking_bytes(self, layout: TooLarge) -> int:
        """Bytes that its nearest plan lacks, or its state alone."""
        if layout.nearest is not None:
            return self.budgets.lacking(layout.nearest.needs)
        return layout.state_bytes - self.budgets.limit_bytes


def search_layouts(space: Space, found: Sequence[Layout], budgets: Limits) -> SearchedLayouts:
    """The layouts with their best dials; of those alike in time the one with fewest stages, then
    with the smallest pools, comes first. `space` says all but layout and stages."""
    bounded: list[tuple[float, int, Space, Dealt]] = []
    for layout in found:
        own = space_of(space, layout)
        dealt = deal_steps(own)
        bounded.append((_least_s(own, dealt), len(bounded), own, dealt))
    fitting: list[FittingLayout] = []
    too_large: list[TooLarge] = []
    slower: list[Slower] = []
    for bound_s, _, own, dealt in sorted(bounded, key=lambda entry: entry[:2]):
        state_bytes = state_of(own)
        if state_bytes > budgets.limit_bytes:
            too_large.append(TooLarge(own, state_bytes, None))
        elif bound_s >= min((f.step_s for f in fitting), default=inf):
            slower.append(Slower(own.layout, bound_s))
        else:
            searched = search_device(own, budgets)
            if searched.tried:
                fitting.append(_joined(own, dealt, searched))
            else:
                too_large.append(TooLarge(own, state_bytes, searched))
    return SearchedLayouts(_ranked(fitting), tuple(too_large), tuple(slower), budgets)


def _joined(space: Space, dealt: Dealt, searched: Searched) -> FittingLayout:
    """The layout with the plan first whose replicas together are fastest, of the best one and the
    fastest of each other walk: the more stages a walk has, the more often replicas meet."""
    walks: dict[tuple[Order, int | None], Tried] = {}
    for tried in searched.tried if space.layout.dp > 1 else searched.tried[:1]:
        walks.setdefault((tried.options.order, tried.options.stage_layers), tried)
    some = list(walks.values())[:_MOST_WALKS]
    seconds = [mean_step_s(space, dealt, tried.options) for tried in some]
    step_s = min(seconds)
    best = some[seconds.index(step_s)]
    others = tuple(tried for tried in searched.tried if tried is not best)
    return FittingLayout(space, replace(searched, tried=(best, *others)), step_s)


def space_of(space: Space, layout: Layout) -> Space:
    """The space in a layout, in which all processes of a stage share its state."""
    shape, training = space.model.shape, space.model.training
    zero: ZeroStage = 1 if layout.dp * layout.sp > 1 else 0
    training = replace(training, zero_stage=zero, gathers=bool(zero), replicas=layout.dp)
    stages = cut_layers(shape, layout.pp, space.mean_keys) if layout.pp > 1 else ()
    model = replace(space.model, training=training)
    return replace(space, model=model, layout=layout, stages=stages)


def state_of(space: Space) -> int:
    """Bytes of weights, gradients and optimizer on the device that has most of them."""
    model, layout = space.model, space.layout
    stages = space.stages or (model.shape.num_layers,)
    state = model.training.state_bytes
    return max(
        state(model.shape, stages, frozenset((stage,)), layout.dp * layout.sp).total
        for stage in range(len(stages))
    )


def _ranked(fitting: Sequence[FittingLayout]) -> tuple[FittingLayout, ...]:
    if not fitting:
        return ()
    limit_s = min(f.step_s for f in fitting) * (1 + SLACK)
    alike = [f for f in fitting if f.step_s <= limit_s]
    best = min(alike, key=lambda f: (f.layout.pp, f.layout.sp, f.step_s))
    return (best, *sorted((f for f in fitting if f is not best), key=lambda f: f.step_s))


def _least_s(space: Space, dealt: Dealt) -> float:
    """Seconds below which no step of the layout gets, on average."""
    stages = space.stages or (space.model.shape.num_layers,)
    seconds = sum(
        least_s([space.seq_lens[i] for i in own[0]], stages, space.layout.sp, space.model)
        for own in dealt
    )
    return seconds * space.sequences_per_step / len(space.seq_lens)
