"""Closed forms for the search of `auto`: about the seconds of any walk, and least bytes of a tier.

The seconds order the candidates, the bytes prune them; what is chosen has been simulated and walked
action by action. One layer's passes over every chunk are asked of the cost model once per chunk
size; all orders, stage heights and keeps are sums of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory.cells import TOKEN_BYTES, StageBytes, stage_bytes
from furlong.cost.model import CostModel
from furlong.plan.segments import NUM_HOT, segment_tokens
from furlong.plan.values import Action, Backward, ChunkPlan, Forward, Recompute, Tier
from furlong.planners.chunks.groups import Groups
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.one_device import stages_of
from furlong.planners.predict import Needs

_Array = NDArray[np.float64]


class TimeEstimate:
    """Seconds of one set of chunks under any options with their size."""

    def __init__(self, model: CostModel, seq_lens: Sequence[int], groups: Groups) -> None:
        self._model, self._num_layers = model, model.shape.num_layers
        # counted by passes, for a pass over a high stage takes it once
        self._pass_s = 0.0 if model.hardware.hides_launches else model.hardware.pass_launch_s
        bare_hardware = replace(
            model.hardware, pass_launch_s=model.hardware.pass_launch_s - self._pass_s
        )
        self._layers_alone = replace(model, hardware=bare_hardware)
        chunks = tuple(chunk for group in groups for chunk in group)
        self._tokens = float(sum(chunk.num_tokens for chunk in chunks))
        self._prefix_tokens = float(sum(chunk.slices[0].start for chunk in chunks))
        behind = [len(group) - 1 - i for group in groups for i in range(len(group))]
        self._behind = np.array(behind)
        """Chunks behind each one in its group."""
        self._measure(ChunkPlan(tuple(seq_lens), chunks, self._stages, ((),)))

    @property
    def _stages(self) -> tuple[int, ...]:
        """All layers but one, and the last: the first of them is no last stage."""
        return (self._num_layers - 1, 1) if self._num_layers > 1 else (1,)

    def _measure(self, bare: ChunkPlan) -> None:
        chunks, stages = range(len(bare.chunks)), range(len(bare.stages))
        last = len(stages) - 1
        backward = [[Backward(c, s) for c in chunks] for s in stages]
        again = [[Recompute(c, s) for c in chunks] for s in stages]
        graphs = [[Forward(c, s, "all") for c in chunks] for s in stages]
        keeps = [[Forward(c, s, "attention" if s < last else "kv") for c in chunks] for s in stages]
        forward_s = self._seconds(bare, [*graphs, *backward])
        known_s = self._seconds(bare, [*keeps, *again, *backward])
        num_below = max(1, bare.stages[0])
        self._whole_s = (forward_s[0] if last == 0 else forward_s[0] + forward_s[1]) / max(
            1, self._num_layers
        )
        """(chunks,) of one layer's forward."""
        self._known_s = known_s[len(stages)] / num_below if last else self._whole_s
        """(chunks,) of one layer's forward whose attention is remembered."""
        self._to_kv_s = known_s[last]
        """(chunks,) of one layer up to its K,V projection, where a later chunk reads them."""
        below_s = forward_s[len(stages)] / num_below
        self._backward_s = below_s if last else np.zeros(len(bare.chunks))
        self._head_s = forward_s[-1] - self._backward_s
        """(chunks,) head, loss, and their backward."""

    @cached_property
    def _cell(self) -> StageBytes:
        """Bytes of a cell that holds all layers in one stage."""
        return stage_bytes(self._model.shape, (self._num_layers,), 0, self._model.training)

    def _seconds(self, bare: ChunkPlan, rows: Sequence[Sequence[Action]]) -> list[_Array]:
        plan = ChunkPlan(
            bare.seq_lens, bare.chunks, bare.stages, (tuple(a for row in rows for a in row),)
        )
        costs = self._layers_alone.costs(plan)
        return [np.array([costs.compute_s(action, 0) for action in row]) for row in rows]

    def seconds(self, options: ChunkOptions) -> float:
        """About the step's; of stages with different windows their mean."""
        stages = stages_of(self._num_layers, options)
        height = self._num_layers / len(stages)
        compute_s = self._of_last_stage(options, height)
        if len(stages) > 1:
            compute_s += (len(stages) - 1) * self._of_a_stage(options, height)
        layers = self._num_layers
        if options.recompute_layers:
            compute_s += (
                min(options.recompute_layers, height) * len(stages) * self._sum_again(options)
            )
        compute_s += float((layers * self._backward_s + self._head_s).sum())
        compute_s += self._pass_s * self._num_passes(options, len(stages))
        return max(compute_s, self._copies_s(options, len(stages)))

    def _num_passes(self, options: ChunkOptions, num_stages: int) -> int:
        """Passes of all chunks over all stages: forwards, rebuilds, recomputes, backwards."""
        num_chunks, num_read = len(self._behind), int((self._behind > 0).sum())
        if options.keep == "all":
            return 2 * num_stages * num_chunks
        num_retained = int((self._behind < options.num_retained).sum())
        num_dropped = num_chunks - num_retained
        num_read_dropped = int((self._behind >= max(1, options.num_retained)).sum())
        rebuilt = num_read_dropped if options.keep == "input" else 0
        last = 2 * num_retained + num_read_dropped + rebuilt + 2 * num_dropped
        again = num_read if options.keep in ("input", "attention") else 0
        return last + (num_stages - 1) * (3 * num_chunks + again)

    def _sum_again(self, options: ChunkOptions) -> float:
        again = self._known_s if options.keep == "attention" else self._whole_s
        return float(again.sum())

    def _of_last_stage(self, options: ChunkOptions, height: float) -> float:
        """Forward and recompute of the stage whose backward comes next."""
        if options.keep == "all":
            return height * float(self._whole_s.sum())
        dropped = self._behind >= options.num_retained
        read = dropped & (self._behind > 0)
        to_kv_s = (height - 1) * self._whole_s + self._to_kv_s
        seconds = height * float(self._whole_s[~dropped].sum()) + float(to_kv_s[read].sum())
        if options.keep == "input" and options.order == "chunk-first":
            seconds += float(to_kv_s[read].sum())
        again_s = height * self._whole_s
        if options.keep == "attention":
            again_s = np.where(read, (height - 1) * self._known_s + self._whole_s, again_s)
        return seconds + float(again_s[dropped].sum())

    def _of_a_stage(self, options: ChunkOptions, height: float) -> float:
        """Forward, rebuilt K,V and recompute of any other stage."""
        forward_s = height * float(self._whole_s.sum())
        if options.keep == "all":
            return forward_s
        one_s = self._known_s if options.keep == "attention" else self._whole_s
        seconds = forward_s + height * float(one_s.sum())
        if options.keep in ("input", "attention"):
            read = self._behind > 0
            seconds += float(((height - 1) * one_s + self._to_kv_s)[read].sum())
        return seconds

    def _copies_s(self, options: ChunkOptions, num_stages: int) -> float:
        """Least seconds of the busiest link in its busier direction; operations take none."""
        layers, cell = self._num_layers, self._cell
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
        self._model, self._memory = model, model.memory()
        self._tokens, self._size = longest, size
        self._num_chunks = -(-longest // size)
        self._stored = (self._num_chunks - 1) * size
        self._last = longest - self._stored + others
        self._cells: dict[tuple[int, ...], StageBytes] = {}

    @cached_property
    def _state_bytes(self) -> float:
        """Weights, gradients, optimizer, and what a framework takes."""
        state = self._model.training.state_bytes(
            self._model.shape, (self._model.shape.num_layers,), frozenset((0,)), 1
        )
        return state.weights + state.gradients + state.optimizer + self._memory.overhead_bytes

    def needs(self, options: ChunkOptions) -> Needs:
        """No plan with these options needs less in any tier."""
        needs = self._at(options, self._last, done=0)
        if self._num_chunks > 1 and self._last < self._size:
            # the chunk before is larger
            later = self._at(options, self._size, done=self._last)
            needs = Needs(*map(max, needs, later))
        each = segment_tokens(
            self._cell((self._model.shape.num_layers,)).kv_layer, self._model.device_type
        )
        if options.tiers.kv != "device" and self._stored >= 5 * each and each % self._size == 0:
            # a chunk at the border of two segments: its own gradients are there too
            done = self._last + -(-2 * each // self._size) * self._size
            later = self._at(options, self._size, done=done, num_hot=NUM_HOT + 1)
            needs = Needs(*map(max, needs, later))
        return needs

    def _at(
        self, options: ChunkOptions, current: int, *, done: int, num_hot: int = NUM_HOT
    ) -> Needs:
        """Bytes while the last stage's backward of a chunk of `current` tokens runs, when those of
        `done` tokens have run."""
        num_layers = self._model.shape.num_layers
        stages = stages_of(num_layers, options)
        cell, num_below = self._cell(stages), len(stages) - 1
        tiers, keep, height = options.tiers, options.keep, stages[-1]
        tokens = self._stored + self._last
        used: dict[Tier, float] = {"device": self._state_bytes, "host": 0.0, "disk": 0.0}
        used["device"] += (tokens - done) * TOKEN_BYTES
        used["device"] += current * (cell.working + cell.message) + self._logits(cell, current)
        if keep == "all":
            whole = self._cell((num_layers,))
            again = min(num_layers, options.recompute_layers * len(stages))
            graphs = sum(sorted(whole.graph_layers)[: num_layers - again])
            used[tiers.graphs] += (tokens - done) * (graphs + again * whole.checkpointed)
        else:
            num_done = -(-done // self._size)
            num_retained = max(0, min(options.num_retained, self._num_chunks) - num_done)
            retained = max(0, num_retained - 1) * self._size  # besides the current one
            graph = cell.graph(min(options.recompute_layers, height))
            used[tiers.graphs if num_retained > 0 else "device"] += (current + retained) * graph
            if num_below:
                leaves = current + retained  # inputs of cells whose graph is there
                used[tiers.inputs] += (num_below * tokens - leaves) * cell.message
                used["device"] += leaves * cell.message
            if keep == "attention":
                dropped = max(0, self._stored + self._last - done - current - retained)
                known = (num_layers - height) * tokens + (height - 1) * dropped
                used[tiers.attention] += known * cell.attention
        held = height if num_below and keep in ("input", "attention") else num_layers
        used[tiers.kv] += self._stored_tokens(num_layers - held) * cell.kv_layer
        sent_back = self._stored_tokens(num_layers - height, seen=True)
        if tiers.kv == "device":
            used["device"] += sent_back * cell.kv_gradient_layer
        else:
            # the newest segments of gradients stay, others and those of K,V pass by
            each = segment_tokens(cell.kv_layer, self._model.device_type)
            cold = max(0.0, sent_back - num_hot * height * each)
            used[tiers.kv] += cold * cell.kv_gradient_layer
            prefix = tokens - done - current
            used["device"] += min(2 * each, prefix) * cell.kv_layer
            hot = self._stored_tokens(num_layers - height, seen=True, most=(num_hot - 1) * each)
            passing = 0
            if None in self._model.shape.windows[num_layers - height :]:
                passing = min(2 * each, max(0, prefix - num_hot * each))
            used["device"] += (hot + passing) * cell.kv_gradient_layer
        return Needs(*(int(used[tier]) for tier in ("device", "host", "disk")))

    def _cell(self, stages: tuple[int, ...]) -> StageBytes:
        """Bytes of a cell of the last stage."""
        if stages not in self._cells:
            model = self._model
            self._cells[stages] = stage_bytes(
                model.shape, stages, len(stages) - 1, model.training,
                factor=model.activation_factor,
            )  # fmt: skip
        return self._cells[stages]

    def _stored_tokens(self, first: int, *, seen: bool = False, most: float = inf) -> float:
        """Tokens times layers from `first` on, at most so many in each; `seen`: only those that the
        last chunk sees."""
        total = 0.0
        for window in self._model.shape.windows[first:]:
            if window is None:
                stored = self._stored
            elif seen:
                stored = min(self._stored, window - 1)
            else:
                stored = (self._num_chunks - 1) * min(self._size, window - 1)
            total += min(stored, most)
        return total

    def _logits(self, cell: StageBytes, num_tokens: int) -> float:
        """A tile of the loss, with the gradient of the head that it makes."""
        tile = min(num_tokens, self._memory.tile_tokens or num_tokens)
        return cell.logit * self._model.shape.vocab_size * tile + cell.head_gradient
