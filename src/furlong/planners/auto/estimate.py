"""Closed forms for the search of `auto`: about the seconds of any walk, and least bytes of a tier.

The seconds order the candidates, the bytes prune them; what is chosen has been simulated and walked
action by action.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np

from furlong.cost.memory.cells import TOKEN_BYTES
from furlong.cost.model import CostModel, PlanCosts
from furlong.cost.seconds.chunks import chunk_table
from furlong.cost.seconds.rates import Part, parts_of
from furlong.plan.passes import passes
from furlong.plan.segments import NUM_HOT, segment_tokens
from furlong.plan.values import Chunk, ChunkPlan, Reduce, Reshard, Slice, Tier, Unshard
from furlong.planners.chunks.groups import Groups
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import stages_of, walk_group
from furlong.planners.predict import Needs, count_kinds


class TimeEstimate:
    """Seconds of one set of chunks under any options with their size.

    Chunks of a group take the same passes but for the last one, which nobody reads, and those that
    are retained. So a walk of two or three chunks tells the passes of all, and a sum of the cost
    model's seconds of a pass for all chunks at once their time.
    """

    def __init__(self, model: CostModel, groups: Groups) -> None:
        self._model, self._num_layers = model, model.shape.num_layers
        behind = np.array([len(group) - 1 - i for group in groups for i in range(len(group))])
        order = np.argsort(behind, kind="stable")
        chunks = [chunk for group in groups for chunk in group]
        chunks = [chunks[i] for i in order]
        self._behind = behind[order]
        """Chunks behind each one in its group, ascending."""
        tile_tokens = model.hardware.tile_tokens
        self._table = chunk_table(chunks, model.shape, 1, tile_tokens)
        self._tokens = float(sum(chunk.num_tokens for chunk in chunks))
        self._prefix_tokens = float(sum(chunk.slices[0].start for chunk in chunks))
        self._costs: dict[tuple[int, ...], PlanCosts] = {}
        self._sums: dict[tuple[tuple[int, ...], int, Part], list[float]] = {}
        self._compute: dict[ChunkOptions, float] = {}

    def seconds(self, options: ChunkOptions) -> float:
        """Seconds of the step, about: what computes, or what is copied if that is longer."""
        on_device = replace(options, tier="device", sample=None)
        if on_device not in self._compute:
            self._compute[on_device] = self._compute_s(on_device)
        return max(self._compute[on_device], self._copies_s(options))

    def _compute_s(self, options: ChunkOptions) -> float:
        """Seconds of all passes."""
        shape = self._model.shape
        stages = stages_of(self._num_layers, options)
        counts, walked = count_kinds(shape, stages)
        some = range(2 if options.num_retained < 2 else 3)
        few = replace(options, num_retained=min(options.num_retained, 2))
        actions = walk_group(some, stages, few, only=walked)
        pieces = tuple(Chunk((Slice(0, i, i + 1),)) for i in some)
        plan = ChunkPlan((len(some),), pieces, stages, (tuple(actions),))
        # of the chunks by those behind them: the last ones of groups, the retained ones, the others
        ends = np.searchsorted(self._behind, (0, 1, max(1, options.num_retained), inf)).tolist()
        firsts = {some[-1]: 0, some[-2]: 1, 0: 2}
        total = 0.0
        for action, what in zip(actions, passes(plan, 0), strict=True):
            if isinstance(action, (Reduce, Unshard, Reshard)) or action.stage not in counts:
                continue
            stage, at = action.stage, firsts[action.chunk]
            for part in parts_of(what, stages[stage]):
                sums = self._sums_of(stages, stage, part)
                total += counts[stage] * (sums[ends[at + 1]] - sums[ends[at]])
        return total

    def _sums_of(self, stages: tuple[int, ...], stage: int, part: Part) -> list[float]:
        """Seconds of a part of a pass for the first n chunks, by n."""
        key = stages, stage, part
        if key not in self._sums:
            if stages not in self._costs:
                self._costs[stages] = self._model.costs(ChunkPlan((), (), stages, ((),)))
            costs = self._costs[stages]
            seconds = costs.process_seconds((part,), stage, self._table)[0, 0]
            self._sums[key] = [0.0, *np.cumsum(seconds).tolist()]
        return self._sums[key]

    def _copies_s(self, options: ChunkOptions) -> float:
        """Least seconds of the busiest link in its busier direction; operations take none."""
        layers, cell = self._num_layers, self._model.memory().cell((self._num_layers,), 0)
        num_stages = len(stages_of(layers, options))
        tiers, keep = options.tiers, options.keep
        read: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        written = dict(read)
        if keep == "attention":
            remembered = self._tokens * (layers - layers / num_stages) * cell.attention
            read[tiers.attention] += remembered
            written[tiers.attention] += remembered
        if keep != "all":
            delivered = self._tokens * (num_stages - 1) * cell.message
            read[tiers.inputs] += 3 * delivered
            written[tiers.inputs] += 2 * delivered
        if tiers.kv != "device":
            times = {"input": 3, "kv": 3, "attention": 2, "all": 2}[keep]
            each = segment_tokens(cell.kv_layer, self._model.device_type)
            cold = max(0.0, self._prefix_tokens - NUM_HOT * each * len(self._behind))
            gradients = cold * layers * cell.kv_gradient_layer
            read[tiers.kv] += times * self._prefix_tokens * (layers - 1) * cell.kv_layer
            read[tiers.kv] += gradients
            written[tiers.kv] += gradients
        host, disk = self._model.hardware.links.host, self._model.hardware.links.disk
        return max(
            max(moved["host"] / host.bytes_per_s, moved["disk"] / disk.bytes_per_s)
            for moved in (read, written)
        )


class ByteBound:
    """Least bytes of the longest sequence alone, in chunks of one size: those at the first backward
    of the last stage, when everything that the forward has kept is there."""

    def __init__(self, model: CostModel, longest: int, size: int, others: int = 0) -> None:
        """`others`: tokens of short sequences that share the last chunk."""
        memory, shape = model.memory(), model.shape
        self._shape, self._memory, self._size = shape, memory, size
        self._num_chunks = -(-longest // size)
        self._stored = (self._num_chunks - 1) * size
        self._last = longest - self._stored + others
        self._cell = cache(lambda stages: memory.cell(stages, len(stages) - 1))
        state = model.training.state_bytes(shape, (shape.num_layers,), frozenset((0,)), 1)
        self._static_bytes = state.total + memory.overhead_bytes
        kv_layer = self._cell((shape.num_layers,)).kv_layer
        self._segment = segment_tokens(kv_layer, memory.device_type)

    def needs(self, options: ChunkOptions) -> Needs:
        """Bytes in each tier, of which no plan with these options needs less."""
        moments = [self._at(options, self._last, done=0)]
        if self._num_chunks > 1 and self._last < self._size:
            # the chunk before is larger
            moments.append(self._at(options, self._size, done=self._last))
        segment = self._segment
        if (
            options.tiers.kv != "device"
            and self._stored >= 5 * segment
            and segment % self._size == 0
        ):
            # a chunk at the border of two segments: its own gradients are there too
            done = self._last + -(-2 * segment // self._size) * self._size
            moments.append(self._at(options, self._size, done=done, num_hot=NUM_HOT + 1))
        return Needs(*map(max, zip(*moments, strict=True)))

    def _at(
        self, options: ChunkOptions, current: int, *, done: int, num_hot: int = NUM_HOT
    ) -> Needs:
        """Bytes while the last stage's backward of a chunk of `current` tokens runs, when those of
        `done` tokens have run."""
        num_layers, tokens = self._shape.num_layers, self._stored + self._last
        stages = stages_of(num_layers, options)
        cell, num_below = self._cell(stages), len(stages) - 1
        tiers, keep, height = options.tiers, options.keep, stages[-1]
        used: dict[Tier, float] = {"device": self._static_bytes, "host": 0.0, "disk": 0.0}
        used["device"] += (tokens - done) * TOKEN_BYTES
        used["device"] += current * (cell.working + cell.message)
        used["device"] += self._memory.loss_bytes(cell, current, backward=True)
        if keep == "all":
            whole = self._cell((num_layers,))
            again = min(num_layers, options.recompute_layers * len(stages))
            graphs = sum(sorted(whole.graph_layers)[: num_layers - again])
            used[tiers.graphs] += (tokens - done) * (graphs + again * whole.checkpointed)
        else:
            num_done = -(-done // self._size)
            num_retained = max(0, min(options.num_retained, self._num_chunks) - num_done)
            graph_tokens = current + max(0, num_retained - 1) * self._size
            graph = cell.graph(min(options.recompute_layers, height))
            used[tiers.graphs if num_retained > 0 else "device"] += graph_tokens * graph
            if num_below:
                # the inputs of cells whose graph is there are its leaves
                used[tiers.inputs] += (num_below * tokens - graph_tokens) * cell.message
                used["device"] += graph_tokens * cell.message
            if keep == "attention":
                dropped = max(0, tokens - done - graph_tokens)
                known = (num_layers - height) * tokens + (height - 1) * dropped
                used[tiers.attention] += known * cell.attention
        held = height if num_below and keep in ("input", "attention") else num_layers
        used[tiers.kv] += self._stored_tokens(held) * cell.kv_layer
        sent_back = self._stored_tokens(height, seen=True)
        if tiers.kv == "device":
            used["device"] += sent_back * cell.kv_gradient_layer
        else:
            # the newest segments of gradients stay, others and those of K,V pass by
            each, prefix = self._segment, tokens - done - current
            cold = max(0.0, sent_back - num_hot * height * each)
            used[tiers.kv] += cold * cell.kv_gradient_layer
            used["device"] += min(2 * each, prefix) * cell.kv_layer
            hot = self._stored_tokens(height, seen=True, most=(num_hot - 1) * each)
            sees_all = None in self._shape.windows[num_layers - height :]
            passing = min(2 * each, max(0, prefix - num_hot * each)) if sees_all else 0
            used["device"] += (hot + passing) * cell.kv_gradient_layer
        return Needs(*map(int, used.values()))

    def _stored_tokens(self, height: int, *, seen: bool = False, most: float = inf) -> float:
        """Tokens times layers of the last `height` ones, at most so many in each; `seen`: only
        those that the last chunk sees."""
        total = 0.0
        for window in self._shape.windows[self._shape.num_layers - height :]:
            stored = self._stored
            if window is not None and seen:
                stored = min(stored, window - 1)
            elif window is not None:
                stored = (self._num_chunks - 1) * min(self._size, window - 1)
            total += min(stored, most)
        return total
