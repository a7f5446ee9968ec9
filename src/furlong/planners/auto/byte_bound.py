"""A closed form for the search of `auto`: the least bytes that a walk needs in each tier.

It prunes the candidates; what is chosen has been walked action by action.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from furlong.cost.memory import TOKEN_BYTES, StageBytes
from furlong.cost.model import CostModel
from furlong.plan.plan import Tier
from furlong.plan.segments import NUM_HOT, segment_tokens
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import stages_of
from furlong.planners.predict import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a model and of its chunks that one device has."""

    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; empty without one."""
    stage: int = 0
    """Its stage of them."""
    sp_size: int = 1
    """Devices that share every chunk."""
    group_size: int = 1
    """Devices that share the optimizer's state."""
    ahead_tokens: int = 0
    """Tokens of chunks of other sequences that its stage has begun meanwhile."""


_ALL = Share()


class ByteBound:
    """Least bytes of the longest sequence alone, in chunks of one size: those at the first backward
    of the last stage, when everything that the forward has kept is there."""

    def __init__(
        self, model: CostModel, longest: int, size: int, others: int = 0, share: Share = _ALL
    ) -> None:
        """`others`: tokens of short sequences that share the last chunk."""
        memory, shape, sp_size = model.memory(), model.shape, share.sp_size
        self._memory, self._size, self._share = memory, max(1, size // sp_size), share
        self._cells: dict[tuple[int, ...], StageBytes] = {}
        self._num_chunks = -(-longest // size)
        self._stored = (self._num_chunks - 1) * self._size
        self._last = (longest - (self._num_chunks - 1) * size + others) // sp_size
        own = share.stages or (shape.num_layers,)
        first = sum(own[: share.stage])
        self._num_layers = own[share.stage]
        self._windows = tuple(
            None if window is None else -(-window // sp_size)
            for window in shape.windows[first : first + self._num_layers]
        )
        self._attends = tuple(layer.attends for layer in shape.layers[first:][: self._num_layers])
        """Whether each layer has attention."""
        held = frozenset((share.stage,))
        state = model.training.state_bytes(shape, own, held, share.group_size)
        self._static_bytes = state.total + memory.overhead_bytes
        self._segment = segment_tokens(self._cell((self._num_layers,)).kv_layer, memory.device_type)

    def _cell(self, stages: tuple[int, ...]) -> StageBytes:
        """The cells of the last of these stages, or of a pipeline's."""
        if stages not in self._cells:
            share = self._share
            whole, stage = (share.stages, share.stage) if share.stages else (stages, -1)
            self._cells[stages] = self._memory.cell(whole, stage % len(whole))
        return self._cells[stages]

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
        num_layers, tokens = self._num_layers, self._stored + self._last
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
                whole, own = (self._cell((num_layers,)), num_layers - height)
                known = tokens * whole.attention(range(own))
                known += dropped * whole.attention(range(own, num_layers - 1))
                used[tiers.attention] += known
        if keep == "all" or options.num_retained:
            ahead_tokens, again = self._share.ahead_tokens, min(options.recompute_layers, height)
            used[tiers.graphs] += ahead_tokens * cell.graph(again)
        held = height if num_below and keep in ("input", "attention") else num_layers
        used[tiers.kv] += self._stored_tokens(held) * cell.kv_layer
        used[tiers.kv] += max(0, self._num_chunks - 1 - -(-done // self._size)) * cell.state
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
            sees_all = None in self._windows[num_layers - height :]
            passing = min(2 * each, max(0, prefix - num_hot * each)) if sees_all else 0
            used["device"] += (hot + passing) * cell.kv_gradient_layer
        return Needs(*map(int, used.values()))

    def _stored_tokens(self, height: int, *, seen: bool = False, most: float = inf) -> float:
        """Tokens times layers of the last `height` ones, at most so many in each; `seen`: only
        those that the last chunk sees."""
        total = 0.0
        first = self._num_layers - height
        for window, attends in zip(self._windows[first:], self._attends[first:], strict=True):
            if not attends:
                continue
            stored = self._stored
            if window is not None and seen:
                stored = min(stored, window - 1)
            elif window is not None:
                stored = (self._num_chunks - 1) * min(self._size, window - 1)
            total += min(stored, most)
        return total
