"""A closed form for the search of `auto`: about the seconds of any walk.

It orders the candidates; what is chosen has been simulated action by action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from furlong.cost.model import CostModel, PlanCosts
from furlong.cost.seconds import PassPart, chunk_table, parts_of
from furlong.plan.passes import passes
from furlong.plan.plan import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Slice,
    Tier,
)
from furlong.plan.segments import NUM_HOT, segment_tokens
from furlong.planners.chunks import Groups
from furlong.planners.layouts import first_alike
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import schedule_group, stages_of, walk_group
from furlong.planners.predict import count_kinds


class TimeEstimate:
    """Seconds of one set of chunks under any options with their size.

    Chunks of a group take the same passes but for the last one, which nobody reads, and those that
    are retained. So a walk of two or three chunks tells the passes of all, and a sum of the cost
    model's seconds of a pass for all chunks at once their time.
    """

    def __init__(
        self,
        model: CostModel,
        groups: Groups,
        *,
        sp_size: int = 1,
        stages: tuple[int, ...] = (),
        num_steps: int = 1,
    ) -> None:
        """`sp_size`: processes of the pool on whose places the slices are; `stages`: those of a
        pipeline, which each of the `num_steps` fills and drains."""
        self._model, self._num_layers = model, model.shape.num_layers
        self._sp_size, self._stages, self._num_steps = sp_size, stages, num_steps
        behind = np.array([len(group) - 1 - i for group in groups for i in range(len(group))])
        order = np.argsort(behind, kind="stable")
        chunks = [chunk for group in groups for chunk in group]
        chunks = [chunks[i] for i in order]
        self._behind = behind[order]
        """Chunks behind each one in its group, ascending."""
        tile_tokens = model.hardware.tile_tokens
        self._table = chunk_table(chunks, model.shape, sp_size, tile_tokens)
        self._tokens = sum(chunk.num_tokens for chunk in chunks) / sp_size
        self._prefix_tokens = sum(chunk.slices[0].start for chunk in chunks) / sp_size
        self._costs: dict[tuple[int, ...], PlanCosts] = {}
        self._sums: dict[tuple[tuple[int, ...], int, PassPart], list[float]] = {}
        self._compute: dict[ChunkOptions, float] = {}

    def seconds(self, options: ChunkOptions) -> float:
        """Seconds of the step, about: what computes, or what is copied if that is longer."""
        on_device = replace(options, tier="device", sample=None)
        if on_device not in self._compute:
            compute_s = self._pipeline_s if self._stages else self._compute_s
            self._compute[on_device] = compute_s(on_device)
        return max(self._compute[on_device], self._copies_s(options))

    def _compute_s(self, options: ChunkOptions) -> float:
        """Seconds of all passes."""
        stages = stages_of(self._num_layers, options)
        counts, walked = count_kinds(self._model.shape, stages)
        some, few = self._some(options)
        seconds = self._stage_seconds(
            walk_group(some, stages, few, only=walked), some, stages, options
        )
        return sum(count * seconds[stage] for stage, count in counts.items())

    def _pipeline_s(self, options: ChunkOptions) -> float:
        """Seconds of the slowest stage, and those in which a pipeline fills and drains."""
        stages = self._stages
        some, few = self._some(options)
        actions = [
            action
            for stage in dict.fromkeys(first_alike(self._model.shape, stages))
            for action in schedule_group(
                some, num_retained=few.num_retained, keep=few.kept, stage=stage
            )
        ]
        slowest_s = max(self._stage_seconds(actions, some, stages, options).values())
        return slowest_s * (1 + self._num_steps * (len(stages) - 1) / len(self._behind))

    def _some(self, options: ChunkOptions) -> tuple[range, ChunkOptions]:
        """Few chunks, and options under which they take all passes that there are."""
        few = replace(options, num_retained=min(options.num_retained, 2))
        return range(2 if options.num_retained < 2 else 3), few

    def _stage_seconds(
        self,
        actions: Sequence[Action],
        some: range,
        stages: tuple[int, ...],
        options: ChunkOptions,
    ) -> dict[int, float]:
        """Seconds of each stage over all chunks, where a walk of `some` has these actions."""
        pieces = tuple(Chunk((Slice(0, i, i + 1),)) for i in some)
        plan = ChunkPlan((len(some),), pieces, stages, (tuple(actions),))
        # of the chunks by those behind them: the last ones of groups, the retained ones, the others
        ends = np.searchsorted(self._behind, (0, 1, max(1, options.num_retained), inf)).tolist()
        firsts = {some[-1]: 0, some[-2]: 1, 0: 2}
        total: dict[int, float] = defaultdict(float)
        for action, what in zip(actions, passes(plan, 0), strict=True):
            if isinstance(action, Forward | Recompute | Backward | RebuildKV):
                at = firsts[action.chunk]
                for part in parts_of(what, stages[action.stage]):
                    sums = self._sums_of(stages, action.stage, part)
                    total[action.stage] += sums[ends[at + 1]] - sums[ends[at]]
        return total

    def _sums_of(self, stages: tuple[int, ...], stage: int, part: PassPart) -> list[float]:
        """Seconds of a part of a pass for the first n chunks, by n."""
        key = stages, stage, part
        if key not in self._sums:
            if stages not in self._costs:
                self._costs[stages] = self._model.costs(
                    ChunkPlan((), (), stages, ((),), sp_size=self._sp_size)
                )
            costs = self._costs[stages]
            seconds = costs.process_seconds((part,), stage, self._table)[0].max(axis=0)
            self._sums[key] = [0.0, *np.cumsum(seconds).tolist()]
        return self._sums[key]

    def _copies_s(self, options: ChunkOptions) -> float:
        """Least seconds of the busiest link in its busier direction; operations take none."""
        cell = self._model.memory().cell((self._num_layers,), 0)
        layers = self._num_layers / max(1, len(self._stages))
        num_stages = len(stages_of(self._num_layers, options))
        tiers, keep = options.tiers, options.keep
        read: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        written = dict(read)
        if keep == "attention":
            remembered = self._tokens * (1 - 1 / num_stages) * cell.attention(range(round(layers)))
            read[tiers.attention] += remembered
            written[tiers.attention] += remembered
        if keep != "all":
            delivered = self._tokens * (num_stages - 1) * cell.message
            read[tiers.inputs] += 3 * delivered
            written[tiers.inputs] += 2 * delivered
        if tiers.kv != "device":
            attending = layers / self._num_layers
            attending *= sum(layer.attends for layer in self._model.shape.layers)
            times = {"input": 3, "kv": 3, "attention": 2, "all": 2}[keep]
            each = segment_tokens(cell.kv_layer, self._model.device_type)
            cold = max(0.0, self._prefix_tokens - NUM_HOT * each * len(self._behind))
            gradients = cold * attending * cell.kv_gradient_layer
            read[tiers.kv] += times * self._prefix_tokens * max(0, attending - 1) * cell.kv_layer
            read[tiers.kv] += gradients
            written[tiers.kv] += gradients
        host, disk = self._model.hardware.links.host, self._model.hardware.links.disk
        return max(
            max(moved["host"] / host.bytes_per_s, moved["disk"] / disk.bytes_per_s)
            for moved in (read, written)
        )
