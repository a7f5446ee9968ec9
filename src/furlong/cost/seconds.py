"""Seconds of passes of chunks through a stage, for all chunks of a table at once, and FLOPs.

One pass on one process of a sequence-parallel group:

    matrices + max(all-to-alls, attention of slices here alone) + attention of shared slices
    + waits for streamed K,V

at least its launches where a GPU computes while they go on; at least the weights that ZeRO-3
gathers with every pass, and gradients that it scatters.

    matrices    (tokens + half_tokens) * FLOPs per token / rate + saved bytes that pass / bandwidth;
                half_tokens are those of reading the matrices, of experts those that some token of
                the process visits; those in 4 bits are made whole first, whatever the tokens
    attention   attended keys * (1 / share + half_tokens / tokens) * FLOPs per key / rate; the share
                of the rate is that of a kind of calls: blocks without a mask, one causal square,
                or squares of several slices in one call

The all-to-alls of slices on several processes, one for every size of places, hide behind the
attention of slices on one (Skrull, Eq. 2). A group is as slow as its slowest process. A table may
be of a plan's chunks, or of anything whose sums a planner knows: a process before and after each of
many moves, all in one call. A slice on a place of n processes counts 1/n with each of these.

    P parts, C chunks, S processes of a group, W windows

FLOPs are exact: causal, windowed, grouped heads, experts. A multiplication and an addition are two.
Counted are the matrices and the two products of attention over exactly the (query, key) pairs that
the mask allows; norms, activations, softmax and the tiles that a kernel computes beyond the
diagonal are not: they end up in the efficiency.

    forward of a token through a matrix of P parameters   2 P
    backward                                              4 P   (2 P where the matrix is frozen)
    attention, per pair of query and key, forward         4 N H
    backward (flash: scores again, then four products)    10 N H
    scan of a recurrent layer                             by its inner chunks (`cost.shape`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from furlong.cost.machine import CALLS, Call, Collective, Efficiency, Link, Machine
from furlong.cost.memory import stage_bytes
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Layout, OffloadTarget, Slice, first_device, place_sizes
from furlong.plan.segments import NUM_HOT, segment_tokens

Array = NDArray[np.float64]
Keys = Mapping[tuple[int | None, Call], Array]
"""(window, kind of call) -> attended keys (S, C)."""

Work = Literal["forward", "to last kv", "first layers", "backward", "head", "head and back"]
"""to last kv: up to the last layer's K,V projection; first layers: forward of that many; head and
back: the language model head and the loss with their gradients."""


@dataclass(frozen=True, slots=True)
class PassPart:
    """Work of one kind that a pass does."""

    work: Work
    layers: int = 0
    """Number of the "first layers"."""
    remembered: int = 0
    """First layers whose attention does not run: its results are handed back."""


@cache
def parts_of(what: Pass, height: int) -> tuple[PassPart, ...]:
    """The parts that the executor runs for a pass over a stage of `height` layers."""
    match what.computes:
        case "nothing":
            return ()
        case "to last kv":
            return (PassPart("to last kv", remembered=what.remembered),)
        case "values" | "graph":
            head = (PassPart("head"),) if what.loss else ()
            return (PassPart("forward", remembered=what.remembered), *head)
        case "backward":
            head = (PassPart("head and back"),) if what.loss else ()
            layers, known = what.recompute_layers, what.remembered
            again = (PassPart("first layers", layers, known),) if layers else ()
            return (PassPart("backward"), *head, *again)


def cell_parts(
    stages: Sequence[int], stage: int, recompute_layers: int = 0
) -> tuple[tuple[PassPart, ...], tuple[PassPart, ...]]:
    """The parts of a Forward that keeps its graph, and those of its Backward, with the first layers
    of the stage checkpointed."""
    graph = Pass("graph", recompute_layers=recompute_layers)
    is_last = stage == len(stages) - 1
    backward = Pass("backward", recompute_layers=recompute_layers, loss=is_last)
    return parts_of(graph, stages[stage]), parts_of(backward, stages[stage])


Hidden = Literal["all-to-all", "gathers", "streams"]
"""Things that a computing action may wait for inside: the all-to-alls of slices on several
processes, the weights that ZeRO-3 gathers (and the gradients it scatters), K,V from another
target."""
HEADS = ("head", "head and back")
_ADAPTED = 1.3
"""Bytes that pass through a GPU's kernels for each saved one with adapters, over those without:
frozen products save less."""
_FUSED_HEAD_DIM = 128
_NO_WAIT = Link(0.0, float("inf"))


def _sums(factors: Array, rows: Array) -> Array:
    """(P, S, C) sums of K rows (K, S, C) times the factors (P, K) of each part: tensordot, without
    what it takes to be general."""
    found: Array = np.dot(factors, rows.reshape(len(rows), -1))
    return found.reshape(len(factors), *rows.shape[1:])


class StageSeconds:
    """Seconds of one stage: of passes through it, of its weights and of its gradients.

    `stages`: layers of each stage. `layout`: that of all devices; `ranks`: of its lists of actions
    those that hold the stage. `kv`: target of stored K,V. `free`: what takes no time. `unsharded`:
    whether an Unshard has gathered the weights before the passes.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Machine,
        training: Training,
        stages: tuple[int, ...],
        stage: int,
        *,
        layout: Layout,
        ranks: Sequence[int],
        kv: OffloadTarget = "none",
        free: Collection[Hidden] = (),
        unsharded: bool = False,
    ) -> None:
        self._shape, self._hardware, self._training = shape, hardware, training
        first, self._height = sum(stages[:stage]), stages[stage]
        self._layers = shape.layers[first : first + self._height]
        self._linear_flops = sum(layer.flops for layer in self._layers)
        """FLOPs of a token's forward through the layers."""
        self._head_flops = 2 * shape.embedding_parameters * (stage == len(stages) - 1)
        firsts = [first_device(rank, layout) for rank in ranks]
        self._groups = [range(first, first + layout.sp) for first in firsts]
        """Devices of each sequence-parallel group that holds the stage."""
        links, element, devices = hardware.links, training.compute_bytes, self._groups[0]
        self._sp_links = {
            size: _NO_WAIT if "all-to-all" in free else self._sp_link(size, devices)
            for size in place_sizes(layout.sp)
        }
        self._stream = None if kv == "none" or "streams" in free else links.to(kv)
        kv_token_bytes = shape.stored_size * element / layout.sp
        self._segment_tokens = segment_tokens(kv_token_bytes, hardware.device_type, kv != "none")
        self._weights = training.weights(shape, stages, frozenset((stage,)))
        adapters = self._weights.trained - self._weights.beside_trained
        self._lora = 2 * adapters if training.lora else 0
        """Forward FLOPs per token of the stage's adapters."""
        cell = stage_bytes(shape, stages, stage, training)
        self._saved = cell.graph_layers
        """Bytes per token that the graph of each layer saves."""
        self._logits = cell.logit * shape.vocab_size
        """Bytes per token of logits, with their gradients."""
        self._rate = hardware.peak_flops_per_s * hardware.linear.best
        self._windows = tuple(dict.fromkeys(layer.window for layer in self._layers))
        self._unvisited = tuple(
            dict.fromkeys(layer.unvisited for layer in self._layers if layer.idle_parameters)
        )
        """Shares of the experts that a token does not visit, of the layers with experts."""
        self._rows: dict[tuple[PassPart, ...], tuple[Array, ...]] = {}
        self.passes_gather = training.regathers and not unsharded
        """Whether every pass gathers its weights, and every backward reduces."""
        self._gathers = self.passes_gather and "gathers" not in free
        self.brought_s = self._moved_s(self._weights.brought_bytes(stage) / self._num_sharing)
        """Seconds in which an Unshard brings a device's part of the weights from CPU memory."""

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Equal in stages through which every pass takes the same time."""
        links, gathered = tuple(self._sp_links.items()), (0.0, 0.0)
        if self._gathers:
            gathered = self._gathered_s(backward=False), self._gathered_s(backward=True)
        return self._layers, self._head_flops, self._saved, self._lora, links, gathered

    def pass_seconds(self, parts: tuple[PassPart, ...], table: ChunkTable) -> Array:
        """(P, S, C) parts of a pass over the stage, on every process."""
        matrices, keys, attending, launches = self._factors(parts)
        tokens, busy = table.tokens, (table.tokens > 0).astype(float)
        # E experts of which a token visits k: n tokens visit E (1 - (1 - k/E)^n) on average
        visited = [1 - share ** np.maximum(tokens - 1, 0) for share in self._unvisited]
        local = _sums(keys, self._attended(table.local_keys, tokens))
        shared = _sums(keys, self._attended(table.shared_keys, tokens))
        exchanged = np.multiply.outer(attending, self._exchanges_s(table))
        seconds = _sums(matrices, np.stack([tokens, busy, *visited]))
        seconds += np.maximum(local, exchanged) + shared
        if self._stream is not None:
            seconds += np.stack([self._waits_s(part, table) for part in parts])
        launched = _sums(launches, np.stack([busy, table.num_slices]))
        # a GPU computes while its host launches what follows
        both = np.maximum if self._hardware.hides_launches else np.add
        both(seconds, launched, out=seconds)
        if self._gathers:
            # weights come with every pass, behind its computation (FSDP's prefetch)
            both = np.add if self._hardware.device_type == "cpu" else np.maximum
            for own_s, part in zip(seconds, parts, strict=True):
                if part.work not in HEADS:
                    both(own_s, self._gathered_s(backward=part.work == "backward"), out=own_s)
        return seconds

    def sequence_seconds(self, parts: tuple[PassPart, ...], seq_lens: Sequence[int]) -> list[float]:
        """Seconds of parts of passes of each whole sequence, with kernels at their best."""
        matrices, keys, *_ = self._factors(parts)
        token_s, key_s = matrices[:, 0].sum(), keys.sum(axis=0)
        full_s = dict(zip(product(self._windows, CALLS), key_s.tolist(), strict=False))
        return [
            token_s * n + sum(full_s[w, "full"] * attended_keys(0, n, w) for w in self._windows)
            for n in seq_lens
        ]

    def _factors(self, parts: tuple[PassPart, ...]) -> tuple[Array, ...]:
        """Arrays (P, ...) of the factors of each part, as of `_row`."""
        if parts not in self._rows:
            rows = zip(*map(self._row, parts), strict=True)
            self._rows[parts] = tuple(np.array(row, float) for row in rows)
        return self._rows[parts]

    def _row(self, part: PassPart) -> tuple[list[float], list[float], int, list[float]]:
        """Factors of one part: of tokens, of processes that have one, and of the experts that some
        of these visit, by the share that one token does not; of attended keys by window and kind
        of call, and of keys per token of the process by window; layers that exchange; of processes
        and calls launched."""
        hardware, back = self._hardware, part.work == "backward"
        linear, passed = self._per_token(part)
        layers, attending = self._num_layers(part), self._attending(part)
        if self._lora and hardware.device_type == "cuda" and part.work not in HEADS:
            passed *= _ADAPTED
        token_s = linear / self._rate + passed / hardware.activation_bytes_per_s
        process_s = linear * hardware.linear.half_tokens / self._rate + self._unpacking_s(part)
        matrices = [token_s, process_s]
        frozen = self._training.lora is not None
        passed_whole = self._layers[: layers - (part.work == "to last kv")]
        read_s = hardware.linear.half_tokens / self._rate * (1 + (back and not frozen))
        matrices += [
            sum(2 * o.idle_parameters * read_s for o in passed_whole if o.unvisited == share)
            for share in self._unvisited
        ]
        each_s = {call: self._key_s(part, call) for call in CALLS}
        key_s = {
            (window, call): sum(
                each_s[call][i] for i in attending if self._layers[i].window == window
            )
            for window, call in product(self._windows, CALLS)
        }
        half_tokens = self._attention(part).half_tokens
        keys = [*key_s.values(), *(half_tokens * key_s[w, "full"] for w in self._windows)]
        passes = part.work in ("forward", "to last kv", "backward")
        launches = [
            (1 + back) * hardware.layer_launch_s * layers + hardware.pass_launch_s * passes,
            (1 + back) * hardware.slice_launch_s * len(attending),
        ]
        return matrices, keys, len(attending), launches

    def _attended(self, keys: Keys, tokens: Array) -> Array:
        """(4 W, S, C) attended keys by window and kind of call, and keys per token by window:
        attention of few tokens is less efficient."""
        nothing = np.zeros_like(tokens)
        found = np.stack([keys.get(kind, nothing) for kind in product(self._windows, CALLS)])
        of_windows = found.reshape(len(self._windows), len(CALLS), *tokens.shape).sum(axis=1)
        return np.concatenate([found, of_windows / np.maximum(tokens, 1e-9)])

    def _exchanges_s(self, table: ChunkTable) -> Array:
        """(S, C) the all-to-alls of one layer, those of all sizes of the process's places."""
        total = np.zeros_like(table.tokens)
        for size, tokens in table.exchanged_tokens.items():
            total += 4 * self._sp_links[size].latency_s * (tokens > 0)
            total += self._exchange_s(size) * tokens
        return total

    @cached_property
    def unshard_s(self) -> float:
        """Seconds of the all-gather of the weights in compute dtype over their sharding group."""
        return self.gather_s(self._weights.floats)

    @cached_property
    def layer_gathers_s(self) -> float:
        """Seconds of the all-gathers of its layers, one after the other."""
        return sum(map(self.gather_s, self._weights.float_layers()))

    def gather_s(self, num_parameters: int) -> float:
        """Seconds of an all-gather of weights in compute dtype over the stage's sharding group."""
        return self._collective_s("all_gather", num_parameters * self._training.compute_bytes)

    @cached_property
    def reduce_s(self) -> float:
        """Seconds in which the gradients of trained weights are reduced."""
        return self.sum_s(self._weights.trained)

    @cached_property
    def late_share(self) -> float:
        """Share of the gradients that are of the embedding and the head."""
        return self._weights.beside_trained / max(1, self._weights.trained)

    def sum_s(self, num_parameters: int) -> float:
        """Seconds in which gradients are added up: a reduce-scatter where they or the optimizer are
        sharded, else an all-reduce."""
        kind: Collective = "reduce_scatter" if self._training.zero_stage else "all_reduce"
        num_bytes = num_parameters * self._training.gradient_bytes
        return self._collective_s(kind, num_bytes) + self._moved_s(num_bytes / self._num_sharing)

    def _moved_s(self, num_bytes: float) -> float:
        """Seconds in which bytes go to CPU memory where the weights lie there, or come from it."""
        is_there = self._training.offload_weights
        return self._hardware.links.host.seconds(num_bytes) if is_there else 0.0

    @cached_property
    def trained_gather_s(self) -> float:
        """Seconds of the all-gather of its trained weights in compute dtype."""
        return self.gather_s(self._weights.trained)

    def _collective_s(self, kind: Collective, num_bytes: float) -> float:
        """Seconds of a collective over all devices that hold the stage: over those of a group that
        holds all weights and, of gradients, of each part between these groups."""
        own_s = self._in_group_s(kind, num_bytes)
        return own_s if kind == "all_gather" else own_s + self._between_groups_s(num_bytes)

    def _in_group_s(self, kind: Collective, num_bytes: float) -> float:
        """Seconds of a collective in a group that holds all weights."""
        links, devices = self._hardware.links, self._devices
        own = devices[: self._num_sharing]
        return links.collective_s(kind, num_bytes, len(own), links.num_nodes(own))

    def _between_groups_s(self, num_bytes: float) -> float:
        """Seconds in which groups that each hold all weights add up gradients of so many bytes."""
        if self._num_groups == 1:
            return 0.0
        links, size = self._hardware.links, self._num_sharing
        alike = self._devices[::size]
        nodes = links.num_nodes(alike)
        return links.collective_s("all_reduce", num_bytes / size, len(alike), nodes)

    @property
    def _devices(self) -> list[int]:
        return [device for group in self._groups for device in group]

    @property
    def _num_groups(self) -> int:
        """Groups of devices that each hold all weights of the stage."""
        return min(self._training.replicate, len(self._groups))

    @cached_property
    def between_s(self) -> float:
        """Seconds in which groups that each hold all weights add up the gradients of the layers."""
        return self._between_groups_s(self._layer_gradients)

    @property
    def _layer_gradients(self) -> float:
        """Bytes of the gradients of all layers."""
        own = self._weights.trained - self._weights.beside_trained
        return own * self._training.gradient_bytes

    @property
    def _num_sharing(self) -> int:
        """Devices that share the stage's state."""
        return len(self._devices) // self._num_groups

    def _gathered_s(self, *, backward: bool) -> float:
        """Seconds of the weights that come with a pass, and of gradients that go with it."""
        if self._training.gathers:  # this runtime: those of the layers, in a group
            sums_s = self._in_group_s("reduce_scatter", self._layer_gradients) if backward else 0.0
            return self.layer_gathers_s + sums_s
        return self.unshard_s + (self.reduce_s if backward else 0.0)

    def _sp_link(self, size: int, devices: range) -> Link:
        """The link of the all-to-all of places of `size` among the `devices` of a sequence-parallel
        group, over the most nodes that a place of that size touches."""
        links = self._hardware.links
        starts = range(devices.start, devices.stop, size)
        nodes = max(links.num_nodes(range(at, at + size)) for at in starts)
        return links.effective("all_to_all", size, nodes)

    def _per_token(self, part: PassPart) -> tuple[float, float]:
        """FLOPs of matrices, and bytes of saved tensors that pass, per token."""
        linear, frozen = self._linear_flops, self._training.lora is not None
        match part.work:
            case "head":
                return self._head_flops, self._logits / 3
            case "head and back":
                return self._head_flops * (2 if frozen else 3), self._logits
            case "backward":
                return linear * (1 if frozen else 2) + 2 * self._lora, 2 * sum(self._saved)
            case "first layers":
                adapters = self._lora * part.layers / max(1, self._height)
                linear = sum(layer.flops for layer in self._layers[: part.layers])
                return linear + adapters, sum(self._saved[: part.layers])
            case "to last kv":
                # what is behind the last layer's K,V projection is left out
                last = self._layers[-1]
                tail = 2 * (last.matrices - last.before_kv)
                passed = sum(self._saved) - self._saved[-1] * tail / last.flops
                return linear + self._lora - tail, passed
            case _:
                return linear + self._lora, sum(self._saved)

    def _unpacking_s(self, part: PassPart) -> float:
        """Seconds in which the products of a part make their weights of codes in 4 bits."""
        training = self._training
        if training.packed_bytes is None:
            return 0.0
        weights = [layer.linear_parameters for layer in self._layers[: self._num_layers(part)]]
        if part.work == "to last kv":
            weights[-1] = min(weights[-1], self._layers[-1].before_kv)
        each_bytes = training.packed_bytes + 2 * training.compute_bytes
        return sum(weights) * each_bytes / self._hardware.unpacking_bytes_per_s

    def _num_layers(self, part: PassPart) -> int:
        """Layers that the part passes; none behind the last."""
        if part.work in HEADS:
            return 0
        return part.layers if part.work == "first layers" else self._height

    def _attending(self, part: PassPart) -> list[int]:
        """Layers of the stage whose attention runs."""
        first, stop = part.remembered, self._num_layers(part) - (part.work == "to last kv")
        if part.work == "backward":
            first = 0
        return [i for i in range(first, stop) if self._layers[i].attends]

    def _attention(self, part: PassPart) -> Efficiency:
        backward = part.work == "backward"
        return self._hardware.attention_backward if backward else self._hardware.attention_forward

    def _key_s(self, part: PassPart, call: Call = "full") -> list[float]:
        """Seconds of an attended key in each layer, in long calls of a kind. Fused kernels that
        take neither windows nor wide heads leave them to the kernel of packed slices."""
        times = ATTENTION_BACKWARD if part.work == "backward" else 1.0
        of, on_card = self._attention(part), self._hardware.device_type == "cuda"
        is_wide = self._shape.head_dim > _FUSED_HEAD_DIM
        rate = self._hardware.peak_flops_per_s * of.best
        apart = on_card and is_wide
        return [
            times * layer.key_flops
            / (rate * of.share("packed" if apart or (on_card and layer.window) else call))
            for layer in self._layers
        ]  # fmt: skip

    def _exchange_s(self, size: int) -> float:
        """Seconds per token of a place's slices in the exchanges of one layer, without latencies:
        q and the output stay within an inner group, K,V of the process's heads come from the whole
        place (all-to-all with gathered keys: DeepSpeed Ulysses' heads within LoongTrain's second
        dimension, whose ring is replaced). The backward moves as much: dO in, then dq, and dK,dV
        from every inner group."""
        shape, inner = self._shape, self._shape.inner_size(size)
        element = self._training.compute_bytes
        q_bytes = 2 * shape.q_size / size * (inner - 1) / inner * element
        kv_bytes = 2 * shape.kv_size * shape.kv_share(size) * (size - 1) / size * element
        link = self._sp_links[size]
        near = self._sp_links.get(inner, link)
        return q_bytes / near.bytes_per_s + kv_bytes / link.bytes_per_s

    def _waits_s(self, part: PassPart, table: ChunkTable) -> Array:
        """(S, C) seconds that the part waits for streamed K,V."""
        attending, tokens = self._attending(part), table.tokens
        total = np.zeros_like(tokens)
        if not attending:
            return total
        half_tokens = self._hardware.linear.half_tokens
        matrices = np.where(tokens > 0, tokens + half_tokens, 0.0)
        own_s = self._per_token(part)[0] * matrices / self._rate / len(attending)
        slower = 1 + self._attention(part).half_tokens / np.maximum(tokens, 1e-9)
        key_s, layers = self._key_s(part), self._layers
        kinds = Counter((layers[i].window, key_s[i]) for i in attending)
        for (window, each), count in kinds.items():
            keys_s = table.prefix_keys(window) * each * slower
            load_s = self._loads_s(table.prefix_tokens[window], part.work == "backward")
            total += count * self._stall_s(table.prefix_tokens[window], own_s, keys_s, load_s)
        return total

    def _stall_s(self, tokens: Array, own_s: Array, keys_s: Array, load_s: Array) -> Array:
        """(S, C) seconds that one layer waits for its prefix, cut into blocks (FPDT's two buffers:
        the first block loads while the layer's own part computes)."""
        blocks = np.maximum(np.ceil(tokens / self._segment_tokens), 1)
        load, block = load_s / blocks, keys_s / blocks
        waited = np.maximum(own_s, load) + (blocks - 1) * np.maximum(block, load) + block
        stall: Array = np.maximum(waited - own_s - blocks * block, 0.0) * (tokens > 0)
        return stall

    def _loads_s(self, tokens: Array, backward: bool) -> Array:
        """(S, C) seconds that one layer's prefix takes to arrive, in whole segments."""
        assert self._stream is not None
        training = self._training
        segments = np.ceil(tokens / self._segment_tokens)
        # gradients of all segments but the newest come in, and go out on the other direction
        cold = np.maximum(segments - NUM_HOT, 0) * backward
        each = self._segment_tokens * self._shape.stored_size
        loaded = each * (segments * training.compute_bytes + cold * training.kv_gradient_bytes)
        seconds: Array = (segments + cold) * self._stream.latency_s
        seconds += loaded / self._stream.bytes_per_s
        return seconds


@dataclass(frozen=True)
class ChunkTable:
    """Arrays of one shape, (S, C) in general."""

    tokens: Array
    """Tokens that each process holds of each chunk."""
    num_slices: Array
    """Calls of attention on each process: one for a slice, two where inner groups divide its rows,
    of which each takes an early and a late part, so that all have equally many keys."""
    exchanged_tokens: dict[int, Array]
    """size of a place, more than 1 -> tokens of the slices on the process's place of that size."""
    local_keys: Keys
    """Keys of slices on one process that are computed: the attended ones, and those that share a
    tile with them behind the mask. What is missing are none."""
    shared_keys: Keys
    """The process's part of the computed keys of slices on larger places."""
    prefix_tokens: dict[int | None, Array]
    """window -> stored tokens that the process reads before its slices, in units of whole heads: of
    a prefix it counts the share of the heads that it keeps."""

    def prefix_keys(self, window: int | None) -> Array:
        """(S, C) attended keys that lie in those prefixes, in the same units."""
        found: Array = self.local_keys[window, "full"] + self.shared_keys[window, "full"]
        return found


def chunk_table(
    chunks: Sequence[Chunk],
    model: ModelShape,
    sp_size: int,
    tile_tokens: int = 0,
    position: Callable[[Slice], int] = attrgetter("start"),
) -> ChunkTable:
    """The table of a model's chunks. `tile_tokens`: keys of a tile of attention; of the one that
    the diagonal cuts, on average half is computed in vain. `position`: that of a slice's first
    token, for sequences that branch."""
    kinds = list(dict.fromkeys(model.windows))
    shape = (sp_size, len(chunks))
    sizes = {piece.place.size for chunk in chunks for piece in chunk.slices} - {1}
    calls = {size: calls_of(model, size) for size in (1, *sizes)}
    tokens, num_slices = np.zeros(shape), np.zeros(shape)
    exchanged = {size: np.zeros(shape) for size in sorted(sizes)}
    prefix = {window: np.zeros(shape) for window in kinds}
    local, shared = ({kind: np.zeros(shape) for kind in product(kinds, CALLS)} for _ in range(2))
    for c, chunk in enumerate(chunks):
        if chunk.is_dummy:
            tokens[:, c] = num_slices[:, c] = 1
        before, together = -1, Counter(piece.place for piece in chunk.slices)
        for piece in chunk.slices:
            n, start, size = piece.num_tokens, position(piece), piece.place.size
            diagonal: Call = "packed" if together[piece.place] > 1 else "square"
            keys = shared if size > 1 else local
            who = slice(piece.place.first, piece.place.stop)
            tokens[who, c] += n / size
            num_slices[who, c] += calls[size]
            if size > 1:
                exchanged[size][who, c] += n
            for window in kinds:
                own = attended_keys(0, n, window)
                keys[window, diagonal][who, c] += (own + n * min(n, tile_tokens) / 2) / size
                if start:
                    seen = start if window is None else min(start, window - 1)
                    if piece.seq_id != before:  # branches of one parent read it once
                        prefix[window][who, c] += seen * model.kv_share(size)
                    earlier = attended_keys(start, start + n, window) - own
                    keys[window, "full"][who, c] += earlier / size
            before = piece.seq_id
    return ChunkTable(tokens, num_slices, exchanged, local, shared, prefix)


def calls_of(model: ModelShape, size: int) -> int:
    """Calls of attention of a slice on each process of a place: zigzag balances causal attention,
    as in context parallelism: where inner groups divide a slice's rows, group b of c has the parts
    b and 2 c - 1 - b of 2 c."""
    return 1 + (model.inner_size(size) < size)


ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five matrix products for two."""


def attended_keys(start: int, stop: int, window: int | None = None) -> int:
    """(query, key) pairs of tokens [start, stop) of one sequence: token t sees min(t + 1, window)
    keys, those of its prefix included."""
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    full = min(max(window, start), stop)  # from this token on the window is full
    below = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return below + (stop - full) * window


def sequence_flops(shape: ModelShape, seq_len: int) -> tuple[float, float]:
    """FLOPs of one whole sequence's forward through the whole model, head included: those of
    matrices, and those of attention."""
    keys = {window: float(attended_keys(0, seq_len, window)) for window in {*shape.windows}}
    attention = sum(layer.key_flops * keys[layer.window] for layer in shape.layers)
    return float(shape.token_flops * seq_len), attention


def step_flops(
    shape: ModelShape, seq_lens: Iterable[int], *, has_frozen_base: bool, masked: bool = True
) -> float:
    """Model FLOPs of a step's forwards and backwards over whole sequences, for an MFU.

    As PaLM counts them (Chowdhery et al., 2022, appendix B), and torchtitan after it
    (`num_flops_per_token`): 6 per token and parameter of a matrix, the head included, and
    12 * layers * heads * head dim * T for attention over T keys, here T of each sequence. A
    backward is two forwards; what is recomputed does not count. Matrices of a frozen base have no
    gradient: 4 in the place of 6, and adapters are left out.

    `masked`: count the keys alone that the causal mask and windows leave, about half of PaLM's.
    Without it a token attends T keys, or the window of a layer that has one.
    """
    linear, total = 2 if has_frozen_base else 3, 0.0
    for seq_len in seq_lens:
        matrices, attention = sequence_flops(shape, seq_len)
        if not masked:
            attention = sum(
                seq_len * min(seq_len, layer.window or seq_len) * layer.key_flops
                for layer in shape.layers
            )
        total += linear * matrices + 3 * attention
    return total
