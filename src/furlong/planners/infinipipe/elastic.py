"""Elastic pipelines: the best plan that InfiniPipe knows of given chunks.

Wang et al. (arXiv 2509.21275), 3.3: chunks run in token-level 1F1B, sequences of most chunks first,
in one pipeline or in several, one after the other; each cell recomputes as few layers as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.plan.values import ON_DEVICE, ChunkPlan, Tiers
from furlong.planners.chunks.groups import Groups
from furlong.planners.infinipipe.checkpointing import (
    Array,
    Checkpointing,
    Mode,
    Problem,
    choose_layers,
    full_checkpointing,
    lacking_bytes,
    least_layers,
)
from furlong.planners.infinipipe.grouping import Grouping, Stretch, group_classes
from furlong.planners.infinipipe.mesh_fit import cell_seconds
from furlong.planners.infinipipe.stage_loads import BatchLoads
from furlong.planners.orders.pipeline import assemble, number_chunks, with_messages
from furlong.planners.orders.seq1f1b import plan_seq1f1b, seq1f1b_cells
from furlong.simulate.clock import time_actions

_ROUNDING_BYTES = 8
"""The walk rounds each part to a byte; what that hides is found in the walk of the plan itself."""
_MAX_REPAIRS = 3


@dataclass(frozen=True)
class Pipeline:
    """One of the pipelines that run one after the other."""

    counts: tuple[int, ...]
    """Chunks of each of its groups, in the order in which they run."""
    checkpointing: Checkpointing


@dataclass(frozen=True)
class ElasticPlan:
    plan: ChunkPlan
    pipelines: tuple[Pipeline, ...]
    predicted_s: float
    """The simulated step."""
    overhead_s: float
    """The paper's objective (Eq. 13) for these chunks: warm-ups, cool-downs and recomputation."""
    overhead_bound_s: float
    """No grouping and no checkpointing of these chunks has less."""

    @property
    def recomputed_layers(self) -> int:
        """Sum of the layers of all diagonals (Eq. 17)."""
        return sum(pipeline.checkpointing.total for pipeline in self.pipelines)

    @property
    def recomputed_layers_bound(self) -> float:
        """What is proven of it, for this grouping."""
        return sum(pipeline.checkpointing.bound for pipeline in self.pipelines)

    @property
    def gap(self) -> float:
        """Share of the overhead that may be too much, for these chunks, 0..1."""
        if not self.overhead_s:
            return 0.0
        return max(0.0, (self.overhead_s - self.overhead_bound_s) / self.overhead_s)


@dataclass(frozen=True)
class NoRoom:
    """These chunks fit in no way."""

    plan: ChunkPlan
    """That which lacks least: each class in a pipeline of its own, as checkpointed as may be."""
    lacking_bytes: float
    rank: int


@dataclass(frozen=True)
class TooSlow:
    """These chunks take no less than what is to be beaten, even with nothing recomputed."""

    least_s: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all candidates of one batch share."""

    seq_lens: tuple[int, ...]
    model: CostModel
    memory: PlanMemory
    stages: tuple[int, ...]
    sp_size: int = 1
    tiers: Tiers = ON_DEVICE
    mode: Mode = "adaptive"
    mip_gap: float = 0.02
    max_nodes: int = 10_000
    """Nodes of the tree of each integer program."""


def plan_elastic(
    setting: Setting, groups: Groups, *, beat_s: float = float("inf")
) -> ElasticPlan | NoRoom | TooSlow:
    """The best plan of these groups, which are listed by falling numbers of chunks, unless none can
    take less than `beat_s`."""
    counts = [len(group) for group in groups]
    plain = plan_seq1f1b(
        setting.seq_lens,
        groups,
        stages=setting.stages,
        tiers=setting.tiers,
        sp_size=setting.sp_size,
    )
    forward_s, backward_s = cell_seconds(setting.model, plain)
    cell_s = forward_s + backward_s
    if beat_s < float("inf"):
        least_s = time_actions(plain, setting.model.costs(plain)).duration_s
        if least_s >= beat_s:
            return TooSlow(least_s)
    loads = BatchLoads.of(plain, counts, setting.memory)
    room = np.full(len(setting.stages), float(setting.memory.device_budget_bytes + _ROUNDING_BYTES))
    ends_s = (len(setting.stages) - 1) * float(cell_s.mean())
    layer_s = float(forward_s.mean()) * len(setting.stages) / sum(setting.stages)
    starts = [i for i, n in enumerate(counts) if not i or n != counts[i - 1]] + [len(counts)]
    for _ in range(_MAX_REPAIRS):
        grouping = _group(setting, loads, starts, room, ends_s=ends_s, layer_s=layer_s)
        if grouping is None:
            break
        ranges = [(starts[first], starts[stop]) for first, stop in grouping.stretches]
        plan = in_a_row(setting, groups, ranges, grouping.chosen)
        used = [max(setting.memory.bytes_after(plan, r)) for r in range(len(setting.stages))]
        excess = np.array(used) - setting.memory.device_budget_bytes
        if excess.max() <= 0:
            return ElasticPlan(
                plan=plan,
                pipelines=tuple(
                    Pipeline(tuple(counts[first:stop]), chosen)
                    for (first, stop), chosen in zip(ranges, grouping.chosen, strict=True)
                ),
                predicted_s=time_actions(plan, setting.model.costs(plan)).duration_s,
                overhead_s=grouping.overhead_s,
                overhead_bound_s=grouping.bound_s,
            )
        room -= np.maximum(excess, 0)
    return _least_lacking(setting, groups, loads, starts)


def _group(
    setting: Setting,
    loads: BatchLoads,
    starts: Sequence[int],
    room: Array,
    *,
    ends_s: float,
    layer_s: float,
) -> Grouping | None:
    problems: dict[Stretch, Problem] = {}

    def of(stretches: Sequence[Stretch]) -> list[Problem]:
        for first, stop in stretches:
            if (first, stop) not in problems:
                problems[first, stop] = loads.problem(starts[first], starts[stop], room)
        return [problems[stretch] for stretch in stretches]

    def solve(stretches: Sequence[Stretch]) -> Iterable[Checkpointing | None]:
        choose = partial(
            choose_layers,
            mode=setting.mode,
            mip_gap=setting.mip_gap,
            max_nodes=setting.max_nodes,
        )
        return map(choose, of(stretches))

    bound = partial(least_layers, mode=setting.mode)
    return group_classes(
        len(starts) - 1,
        ends_s=ends_s,
        layer_s=layer_s,
        least=lambda stretches: map(bound, of(stretches)),
        solve=solve,
        gap=setting.mip_gap,
    )


def in_a_row(
    setting: Setting,
    groups: Groups,
    ranges: Sequence[tuple[int, int]],
    chosen: Sequence[Checkpointing],
) -> ChunkPlan:
    """Token-level 1F1B of each range of groups, one after the other."""
    numbered = number_chunks(groups)
    num_stages = len(setting.stages)
    spread = [
        found.on_stages([len(group) for group in groups[first:stop]], setting.stages)
        for (first, stop), found in zip(ranges, chosen, strict=True)
    ]
    lists = []
    for stage in range(num_stages):
        cells = [
            cell
            for (first, stop), layers in zip(ranges, spread, strict=True)
            for cell in seq1f1b_cells(numbered[first:stop], num_stages, stage, layers[stage])
        ]
        lists.append(with_messages(cells, stage, num_stages))
    return assemble(
        setting.seq_lens,
        groups,
        setting.stages,
        lists,
        tiers=setting.tiers,
        sp_size=setting.sp_size,
    )


def _least_lacking(
    setting: Setting, groups: Groups, loads: BatchLoads, starts: Sequence[int]
) -> NoRoom:
    ranges = list(pairwise(starts))
    chosen, lacking = [], []
    for first, stop in ranges:
        problem = loads.problem(first, stop, setting.memory.device_budget_bytes)
        layers = full_checkpointing(problem)
        if setting.mode == "none":
            layers = (0,) * len(layers)
        chosen.append(Checkpointing(layers, 0.0))
        lacking += [(lack, rank) for rank, lack in enumerate(lacking_bytes(problem, layers))]
    return NoRoom(in_a_row(setting, groups, ranges, chosen), *max(lacking))
