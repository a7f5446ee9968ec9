"""Elastic pipelines: the best plan that InfiniPipe knows of given chunks.

Wang et al. (arXiv 2509.21275), 3.3: chunks run in token-level 1F1B, sequences of most chunks first,
in one pipeline or in several, one after the other; each cell recomputes as few layers as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.plan.values import ON_DEVICE, Action, ChunkPlan, Tiers
from furlong.planners.cells import cell_seconds
from furlong.planners.chunks.groups import Groups
from furlong.planners.infinipipe.checkpointing import (
    Array,
    Checkpointing,
    Mode,
    PipelineLoads,
    choose_layers,
    lacking_bytes,
    least_layers,
)
from furlong.planners.infinipipe.grouping import Grouping, Stretch, group_classes
from furlong.planners.infinipipe.stage_loads import BatchLoads
from furlong.planners.orders.pipeline import assemble, number_chunks, with_messages
from furlong.planners.orders.seq1f1b import plan_seq1f1b, seq1f1b_cells
from furlong.simulate.clock import time_actions

_ROUNDING_BYTES = 8
"""Bytes of slack: the walk rounds each part; what that hides, the walk of the plan itself finds."""
_MAX_REPAIRS = 3


@dataclass(frozen=True, kw_only=True)
class InfiniPipePlan:
    """A plan of InfiniPipe's, with what is proven of it."""

    plan: ChunkPlan
    pipelines: tuple[Checkpointing, ...]
    """Checkpointed layers of each of the pipelines that run one after the other."""
    predicted_s: float
    """Simulated seconds of the step."""
    overhead_s: float
    """The paper's objective (Eq. 13) for these chunks: warm-ups, cool-downs and recomputation."""
    overhead_bound_s: float
    """Seconds that no grouping and no checkpointing of these chunks undercuts."""
    num_slices: int = 0
    """Chunks of the longest sequence."""
    tried: tuple[tuple[int, float], ...] = ()
    """(num_slices, predicted_s) of every candidate that was worked out."""

    @property
    def recomputed_layers(self) -> int:
        """Sum of the layers of all diagonals (Eq. 17)."""
        return sum(pipeline.total for pipeline in self.pipelines)

    @property
    def recomputed_layers_bound(self) -> float:
        """Sum of layers that is proven to be the least for this grouping."""
        return sum(pipeline.bound for pipeline in self.pipelines)

    @property
    def gap(self) -> float:
        """Share of the overhead that may be too much, for these chunks, 0..1."""
        excess_s = max(0.0, self.overhead_s - self.overhead_bound_s)
        return excess_s / self.overhead_s if self.overhead_s else 0.0


@dataclass(frozen=True)
class NoRoom:
    """Chunks that fit in no way."""

    plan: ChunkPlan
    """The closest attempt: each class in a pipeline of its own, as checkpointed as may be."""
    lacking_bytes: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class PipelineSetting:
    """Facts and limits that all candidate plans of one batch share."""

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

    @property
    def layout(self) -> dict[str, Any]:
        """Keywords of those who make plans of groups."""
        return {"stages": self.stages, "sp_size": self.sp_size, "tiers": self.tiers}


def plan_elastic(
    setting: PipelineSetting, groups: Groups, *, beat_s: float = inf
) -> InfiniPipePlan | NoRoom | float:
    """The best plan of these groups, which are listed by falling numbers of chunks; instead of one
    that cannot take less than `beat_s`, the seconds that it takes at least."""
    memory, num_stages = setting.memory, len(setting.stages)
    counts = [len(group) for group in groups]
    plain = plan_seq1f1b(setting.seq_lens, groups, **setting.layout)
    if beat_s < inf:
        least_s = time_actions(plain, setting.model.costs(plain)).duration_s
        if least_s >= beat_s:
            return least_s
    cells_s = cell_seconds(plain.chunks, setting.seq_lens, model=setting.model, **setting.layout)
    loads = BatchLoads.of(plain, counts, memory)
    room = np.full(num_stages, float(memory.device_budget_bytes + _ROUNDING_BYTES))
    times_s = {
        "ends_s": (num_stages - 1) * float(cells_s.sum(axis=2).mean()),
        "layer_s": float(cells_s[..., 0].mean()) * num_stages / sum(setting.stages),
    }
    starts = [i for i, n in enumerate(counts) if not i or n != counts[i - 1]] + [len(counts)]
    for _ in range(_MAX_REPAIRS):
        grouping = _group(setting, loads, starts, room, times_s)
        if grouping is None:
            break
        ranges = [(starts[first], starts[stop]) for first, stop in grouping.stretches]
        plan = in_a_row(setting, groups, ranges, grouping.chosen)
        used = [max(memory.peak_bytes_of_actions(plan, rank)) for rank in range(num_stages)]
        excess = np.array(used) - memory.device_budget_bytes
        if excess.max() <= 0:
            return InfiniPipePlan(
                plan=plan, pipelines=grouping.chosen,
                predicted_s=time_actions(plan, setting.model.costs(plan)).duration_s,
                overhead_s=grouping.overhead_s, overhead_bound_s=grouping.bound_s,
            )  # fmt: skip
        room -= np.maximum(excess, 0)
    return _least_lacking(setting, groups, loads, starts)


def _group(
    setting: PipelineSetting,
    loads: BatchLoads,
    starts: Sequence[int],
    room: Array,
    times_s: dict[str, float],
) -> Grouping | None:
    @cache
    def pipeline(stretch: Stretch) -> PipelineLoads:
        return loads.pipeline(starts[stretch[0]], starts[stretch[1]], room)

    def least(stretch: Stretch) -> float:
        return least_layers(pipeline(stretch), mode=setting.mode)

    def solve(stretch: Stretch) -> Checkpointing | None:
        return choose_layers(
            pipeline(stretch), setting.mode, mip_gap=setting.mip_gap, max_nodes=setting.max_nodes
        )

    return group_classes(len(starts) - 1, least=least, solve=solve, gap=setting.mip_gap, **times_s)


def in_a_row(
    setting: PipelineSetting,
    groups: Groups,
    ranges: Sequence[tuple[int, int]],
    chosen: Sequence[Checkpointing],
) -> ChunkPlan:
    """Token-level 1F1B of each range of groups, one after the other."""
    numbered = number_chunks(groups)
    num_stages = len(setting.stages)
    parts = [numbered[first:stop] for first, stop in ranges]
    spread = [
        found.on_stages([len(chunks) for chunks in part], setting.stages)
        for part, found in zip(parts, chosen, strict=True)
    ]
    lists = []
    for stage in range(num_stages):
        cells: list[Action] = []
        for part, layers in zip(parts, spread, strict=True):
            cells += seq1f1b_cells(part, num_stages, stage, layers[stage])
        lists.append(with_messages(cells, stage, num_stages))
    return assemble(setting.seq_lens, groups, lists=lists, **setting.layout)


def _least_lacking(
    setting: PipelineSetting, groups: Groups, loads: BatchLoads, starts: Sequence[int]
) -> NoRoom:
    ranges = list(pairwise(starts))
    chosen, lacking = [], []
    for first, stop in ranges:
        pipeline = loads.pipeline(first, stop, setting.memory.device_budget_bytes)
        layers = pipeline.all_layers(0 if setting.mode == "none" else max(setting.stages))
        chosen.append(Checkpointing(layers, 0.0))
        lacking += [(lack, rank) for rank, lack in enumerate(lacking_bytes(pipeline, layers))]
    return NoRoom(in_a_row(setting, groups, ranges, chosen), *max(lacking))
