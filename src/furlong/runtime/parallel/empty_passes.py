"""Passes of a process that has failed: it takes part in their exchanges and computes nothing.

The others of its pool wait for its rows in every layer. They get zeros, of the sizes that a pass
would have sent and in the order in which it would have sent them, until all know of the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from furlong.models.causal_lm import CausalLM
from furlong.ops.level_attention import LevelAttention
from furlong.plan.passes import Pass, passes
from furlong.plan.plan import Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.plan.rows import ChunkRows, Level
from furlong.runtime.cells.layout import chunk_pieces, rows_on
from furlong.runtime.parallel.exchange import AllToAll

Way = Literal["store", "forward", "backward", "known backward"]
"""One layer's exchanges: of keys and values to be stored, of a forward, of a backward, and of one
whose attention was remembered."""
_QKV = ("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query", "key", "value")


class EmptyPasses:
    """The exchanges of one process's list of a plan."""

    def __init__(
        self, model: CausalLM, exchange: AllToAll, rank: int, process: int, plan: ChunkPlan
    ) -> None:
        self._model, self._plan, self._rank, self._exchange = model, plan, rank, exchange
        self._rows_of = rows_on(model, plan, process, exchange)
        self._before = exchange.num_started

    def are_known(self, first: int) -> bool:
        """Whether the exchanges from action number `first` on can be taken part in: all layers have
        one form, and what has been exchanged so far is what was expected."""
        self._ways = _ways_of(self._model, self._plan, self._rank)
        if self._ways is None or len(self._exchange.forms) != 1 or not _are_alike(self._model):
            return False
        done = sum(map(self._num_starts, range(first)))
        self._first, self._num_begun = first, self._exchange.num_started - self._before - done
        return 0 <= self._num_begun <= self._num_starts(first)

    def join(self, index: int, gather: Callable[[int], None]) -> None:
        """Take part in the exchanges of an action, those that have begun left out. `gather` is
        called with each layer before its own: its weights may be gathered on the way."""
        assert self._ways is not None
        self._exchange.settle()
        left = self._num_begun if index == self._first else 0
        for layer, way in self._ways[index]:
            gather(layer)
            for start in self._rounds(index, way):
                begun, left = min(left, len(start)), max(0, left - len(start))
                waits = [begin() for begin in start[begun:]]
                for wait in waits:
                    wait()

    def _num_starts(self, index: int) -> int:
        assert self._ways is not None
        return sum(len(start) for _, way in self._ways[index] for start in self._rounds(index, way))

    def _rounds(self, index: int, way: Way) -> Iterator[list[Callable[[], Callable[[], object]]]]:
        """The starts of a layer's ways in, then those of its ways back."""
        levels = self._levels(index, way)
        yield [lambda own=own: self._start(own, way) for own in levels]  # type: ignore[misc]
        if way != "store":
            yield [lambda own=own: self._return(own, way) for own in levels]  # type: ignore[misc]

    def _levels(self, index: int, way: Way) -> Sequence[Level]:
        action = self._plan.actions[self._rank][index]
        assert isinstance(action, (Forward, Recompute, RebuildKV, Backward))
        rows: ChunkRows = self._rows_of(self._plan.chunks[action.chunk])
        if way != "store":
            return rows.exchanged
        pieces = chunk_pieces(self._plan, action.chunk)
        kept = {number for number, piece in pieces.items() if piece.continues}
        return [x for x in rows.exchanged if any(placed.index in kept for placed in x.slices)]

    def _start(self, level: Level, way: Way) -> Callable[[], object]:
        num_heads, num_kv_heads = self._model.heads
        ((head_dim, dtype),) = self._exchange.forms
        nothing = torch.zeros((), dtype=dtype, device=self._model.device)
        q = nothing.expand(num_heads, level.local[1], head_dim)
        k = nothing.expand(num_kv_heads, level.local[1], head_dim)
        own = LevelAttention(level, self._exchange, 0 if way == "store" else num_heads, k.shape[0])
        if way == "known backward":
            own.start((q, q, q), (k, k))
        else:
            own.start(() if way == "store" else (q,), () if way == "backward" else (k, k))
        return own.wait

    def _return(self, level: Level, way: Way) -> Callable[[], object]:
        num_heads, num_kv_heads = self._model.heads
        ((head_dim, dtype),) = self._exchange.forms
        nothing = torch.zeros((), dtype=dtype, device=self._model.device)
        own = LevelAttention(level, self._exchange, num_heads, num_kv_heads)
        own.send_nothing_back(nothing.expand(head_dim), gradients=way != "forward")
        return own.wait


def _ways_of(model: CausalLM, plan: ChunkPlan, rank: int) -> list[list[tuple[int, Way]]] | None:
    """The exchanges of each action, each with its layer; None where it is not known which layers
    get gradients."""
    found: list[list[tuple[int, Way]]] = []
    graphs: dict[tuple[int, int], Pass] = {}
    trained: dict[int, list[bool] | None] = {}
    for action, what in zip(plan.actions[rank], passes(plan, rank), strict=True):
        ways: list[tuple[int, Way]] = []
        if isinstance(action, (Forward, Recompute, RebuildKV)):
            ways = _forward_ways(what, plan.stages[action.stage])
            if what.computes == "graph":
                graphs[action.chunk, action.stage] = what
        elif isinstance(action, Backward):
            if action.stage not in trained:
                trained[action.stage] = _trained_layers(model, plan, action.stage)
            if (layers := trained[action.stage]) is None:
                return None
            ways = _backward_ways(graphs[action.chunk, action.stage], layers)
        first = 0 if not ways else sum(plan.stages[: action.stage])  # type: ignore[union-attr]
        found.append([(first + layer, way) for layer, way in ways])
    return found


def _forward_ways(what: Pass, height: int) -> list[tuple[int, Way]]:
    if what.computes == "nothing":
        return []
    ways: list[tuple[int, Way]] = []
    for layer in range(height):
        is_end = what.computes == "to last kv" and layer == height - 1
        if what.writes_kv and (is_end or layer < what.remembered):
            ways.append((layer, "store"))
        if not is_end and layer >= what.remembered:
            ways.append((layer, "forward"))
    return ways


def _backward_ways(graph: Pass, trained: Sequence[bool]) -> list[tuple[int, Way]]:
    ways: list[tuple[int, Way]] = []
    for layer in reversed(range(len(trained))):
        is_known = layer < graph.remembered
        if layer < graph.recompute_layers and not is_known and trained[layer]:
            ways.append((layer, "forward"))
        if trained[layer]:
            ways.append((layer, "known backward" if is_known else "backward"))
    return ways


def _trained_layers(model: CausalLM, plan: ChunkPlan, stage: int) -> list[bool] | None:
    """By layer of a stage, whether its attention gets gradients; None where that is not known."""
    layers = model.stages(plan.stages)[stage].layers
    is_trained = stage > plan.frozen_stages
    if not stage:
        beside = {id(p) for layer in model.layers for p in layer.parameters()}
        others = [p for p in model.decoder.parameters() if id(p) not in beside]
        is_trained = bool(model.base.get_input_embeddings().weight.requires_grad)
        if not is_trained and any(p.requires_grad for p in others):
            return None
    found = []
    for index in layers:
        own = [p.requires_grad for p in model.layers[index].parameters()]
        if not is_trained and any(own):
            if not (all(own) or _trains_qkv(model.layers[index])):
                return None
            is_trained = True
        found.append(is_trained)
    return found


def _trains_qkv(layer: nn.Module) -> bool:
    named = layer.named_parameters()
    return any(p.requires_grad and any(part in name for part in _QKV) for name, p in named)


def _are_alike(model: CausalLM) -> bool:
    """Whether the attention of all layers has the same form."""
    forms = {
        (type(module), *((n, p.shape) for n, p in module.named_parameters() if "lora_" not in n))
        for module in model.attention_modules
    }
    return len(forms) == len({kind for kind, *_ in forms})
