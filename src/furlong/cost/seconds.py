"""Seconds of passes of chunks through a stage, for all chunks of a table at once, and FLOPs.

The time of one pass on one process of a sequence-parallel group is

    matrices + max(all-to-alls, attention of local slices) + attention of sharded slices
    + waits for streamed K,V + waits for recurrent states of other processes

but at least the time of its kernel launches, since a GPU computes while its host launches, and at
least the time in which ZeRO-3 gathers weights and scatters gradients of the pass.

    matrices    (tokens + half_tokens) * FLOPs per token / rate + saved bytes / bandwidth, where
                half_tokens stand for reading the matrices (of experts, those that are active for
                some token of the process); 4-bit weights are dequantized first, whatever the tokens
    attention   attended keys * (1 / share + half_tokens / tokens) * FLOPs per key / rate, where the
                share of the rate depends on the kind of call: blocks without a mask, one causal
                square, or squares of several slices in one call

    states      a process of a place of n has to wait until the n - 1 others have computed their
                tokens in a recurrent layer. All layers up to the next attention follow in the same
                order, so the wait shows once for them; in each layer if the place is larger than
                the heads, where a process has early and late tokens

A place is the group of processes over which a slice is sharded. A slice on a place of n processes
counts 1/n for each of them. Slices on places of one size share an all-to-all; all-to-alls overlap
with attention of local slices (Skrull, Eq. 2). A group is as slow as its slowest process. A
`ChunkTable` describes the work of the chunks of a plan, or of any other tokens that a planner
compares in one call, such as those of a process before and after each of many moves.

    P parts, C chunks, S processes of a group, W windows

FLOPs are exact for causal masks, windows, grouped heads and experts; a multiply-add counts as two.
Counted are the matrices and the two products of attention over exactly the (query, key) pairs that
the mask allows. Norms, activations, softmax and masked parts of a kernel's tiles are not counted:
they lower the measured efficiency instead.

    forward of a token through a matrix of P parameters   2 P
    backward                                              4 P   (2 P if the matrix is frozen)
    attention, per pair of query and key, forward         4 N H
    backward (flash: scores again, then four products)    10 N H
    scan of a recurrent layer                             as `models.describe` counts it
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

from furlong.cost.machine import CALLS, AttentionCall, Collective, Efficiency, Link, Machine
from furlong.cost.memory import stage_bytes
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Layout, OffloadTarget, Slice, first_device, place_sizes
from furlong.plan.segments import NUM_HOT, segment_tokens

Array = NDArray[np.float64]
Keys = Mapping[tuple[int | None, AttentionCall], Array]
"""(window, kind of call) -> attended keys (S, C)."""

Work = Literal["forward", "to last kv", "first layers", "backward", "head", "head and back"]
"""to last kv: forward up to the last layer's K,V projection; first layers: forward of
`PassPart.layers` layers; head and back: LM head and loss, forward and backward."""


@dataclass(frozen=True, slots=True)
class PassPart:
    """One kind of work in a pass over a stage."""

    work: Work
    layers: int = 0
    """Number of layers of "first layers"."""
    remembered: int = 0
    """Number of first layers that reuse saved attention outputs."""


@cache
def pass_parts(what: Pass, height: int) -> tuple[PassPart, ...]:
    """Return the parts (kinds of work) of which the pass `what` consists, over a stage of `height`
    layers."""
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
    """Return two tuples of parts, for a stage of which the first `recompute_layers` layers are
    checkpointed: the parts of a Forward that keeps its graph, and the parts of its Backward."""
    graph = Pass("graph", recompute_layers=recompute_layers)
    is_last = stage == len(stages) - 1
    backward = Pass("backward", recompute_layers=recompute_layers, loss=is_last)
    return pass_parts(graph, stages[stage]), pass_parts(backward, stages[stage])


Hidden = Literal["all-to-all", "gathers", "streams"]
"""Waits inside a computing action: for all-to-alls of sharded slices; for the weights that ZeRO-3
gathers and the gradients that it scatters; for K,V streamed from an offload target."""
HEADS = ("head", "head and back")
_ADAPTED = 1.3
"""Factor for adapters of the bytes moved by a GPU's kernels per saved byte: frozen linear layers
save fewer tensors."""
_FUSED_HEAD_DIM = 128
_NO_WAIT = Link(0.0, float("inf"))


def _sums(factors: Array, rows: Array) -> Array:
    """Return (P, S, C): factors (P, K) times rows (K, S, C), as tensordot without its overhead."""
    found: Array = np.dot(factors, rows.reshape(len(rows), -1))
    return found.reshape(len(factors), *rows.shape[1:])


class StageSeconds:
    """Seconds of one stage: of its passes, and of gathers and reductions of its parameters.

    Args:
        shape, hardware, training: the model, the machine, and the training setup.
        stages: number of layers of each stage.
        stage: index of this stage.
        layout: layout of all devices.
        ranks: ranks of the layout that hold the stage.
        kv: offload target of stored K,V.
        free: kinds of waits that are counted as taking no time.
        unsharded: whether an Unshard gathers the weights before the passes.
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
        """Forward FLOPs per token of the layers."""
        self._head_flops = 2 * shape.embedding_parameters * (stage == len(stages) - 1)
        firsts = [first_device(rank, layout) for rank in ranks]
        self._groups = [range(first, first + layout.sp) for first in firsts]
        """Devices of each sequence-parallel group that holds the stage."""
        links, element, devices = hardware.links, training.compute_bytes, self._groups[0]
        self._sp_links = {
            size: _NO_WAIT if "all-to-all" in free else self._sp_link(size, devices)
            for size in place_sizes(layout.sp)
        }
        self._has_free_exchange = "all-to-all" in free
        self._stream = None if kv == "none" or "streams" in free else links.to(kv)
        kv_token_bytes = shape.stored_size * element / layout.sp
        self._segment_tokens = segment_tokens(kv_token_bytes, hardware.device_type, kv != "none")
        self._weights = training.weights(shape, stages, frozenset((stage,)))
        adapters = self._weights.trained - self._weights.beside_trained
        self._lora = 2 * adapters if training.lora else 0
        """Forward FLOPs per token of the stage's adapters."""
        cell = stage_bytes(shape, stages, stage, training)
        self._saved = cell.graph_layers
        """Bytes per token that each layer's graph saves."""
        self._logits = cell.logit * shape.vocab_size
        """Bytes per token of logits, with their gradients."""
        self._rate = hardware.peak_flops_per_s * hardware.linear.best
        self._windows = tuple(dict.fromkeys(layer.window for layer in self._layers))
        self._unvisited = tuple(
            dict.fromkeys(layer.unvisited for layer in self._layers if layer.idle_parameters)
        )
        """Distinct shares of experts that are inactive for a token, over layers with experts."""
        self._rows: dict[tuple[PassPart, ...], tuple[Array, ...]] = {}
        self.passes_gather = training.regathers and not unsharded
        """Whether each pass gathers its weights, and each backward reduces gradients."""
        self._gathers = self.passes_gather and "gathers" not in free
        self.brought_s = self._moved_s(self._weights.brought_bytes(stage) / self._num_sharing)
        """Seconds in which an Unshard copies a device's part of the weights from CPU memory."""

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """A key for caches: two stages whose keys are equal have passes of equal times."""
        links, gathered = tuple(self._sp_links.items()), (0.0, 0.0)
        if self._gathers:
            gathered = self._gathered_s(backward=False), self._gathered_s(backward=True)
        return self._layers, self._head_flops, self._saved, self._lora, links, gathered

    def pass_seconds(self, parts: tuple[PassPart, ...], table: ChunkTable) -> Array:
        """Return (P, S, C): seconds of each of `parts` on each process, for each chunk."""
        matrices, keys, attending, launches = self._factors(parts)
        tokens, busy = table.tokens, (table.tokens > 0).astype(float)
        # with k of E experts active per token, n tokens visit E (1 - (1 - k/E)^n) on average
        visited = [1 - share ** np.maximum(tokens - 1, 0) for share in self._unvisited]
        local = _sums(keys, self._attended(table.local_keys, tokens))
        shared = _sums(keys, self._attended(table.shared_keys, tokens))
        exchanged = np.multiply.outer(attending, self._exchanges_s(table))
        seconds = _sums(matrices, np.stack([tokens, busy, *visited]))
        seconds += np.maximum(local, exchanged) + shared
        if self._stream is not None:
            seconds += np.stack([self._waits_s(part, table) for part in parts])
        if self._shape.is_recurrent and not self._has_free_exchange:
            seconds += np.stack([self._relays_s(part, table) for part in parts])
        launched = _sums(launches, np.stack([busy, table.num_slices]))
        # a GPU computes while its host launches the next kernels
        both = np.maximum if self._hardware.hides_launches else np.add
        both(seconds, launched, out=seconds)
        if self._gathers:
            # FSDP prefetches weights during the computation of each pass
            both = np.add if self._hardware.device_type == "cpu" else np.maximum
            for own_s, part in zip(seconds, parts, strict=True):
                if part.work not in HEADS:
                    both(own_s, self._gathered_s(backward=part.work == "backward"), out=own_s)
        return seconds

    def sequence_seconds(self, parts: tuple[PassPart, ...], seq_lens: Sequence[int]) -> list[float]:
        """Return the seconds of `parts` for each whole sequence, at best kernel efficiency."""
        matrices, keys, *_ = self._factors(parts)
        token_s, key_s = matrices[:, 0].sum(), keys.sum(axis=0)
        full_s = dict(zip(product(self._windows, CALLS), key_s.tolist(), strict=False))
        return [
            token_s * n + sum(full_s[w, "full"] * attended_keys(0, n, w) for w in self._windows)
            for n in seq_lens
        ]

    def _factors(self, parts: tuple[PassPart, ...]) -> tuple[Array, ...]:
        """Return four arrays of factors, one for each group of factors that `_row` lists. Each
        array has P rows, one for each part."""
        if parts not in self._rows:
            rows = zip(*map(self._row, parts), strict=True)
            self._rows[parts] = tuple(np.array(row, float) for row in rows)
        return self._rows[parts]

    def _row(self, part: PassPart) -> tuple[list[float], list[float], int, list[float]]:
        """Return the factors by which `pass_seconds` multiplies a part's work, in four groups:

        1. seconds per token; seconds per process with any token; and, for each entry of
           `_unvisited` (a share of inactive experts), seconds for reading the inactive experts of
           all layers with this share;
        2. seconds per attended key, by window and kind of call; and seconds per attended key
           divided by the process's tokens, by window;
        3. number of layers with attention, each of which has all-to-alls;
        4. launch seconds per process with any token, and per call of attention.
        """
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
        """Return (4 W, S, C): numbers of keys that a process's tokens attend to, in two forms.

        1. 3 W entries: attended keys, by window and kind of attention call;
        2. W entries: attended keys by window, divided by the process's tokens. They stand for the
           lower efficiency of attention with few tokens.
        """
        nothing = np.zeros_like(tokens)
        found = np.stack([keys.get(kind, nothing) for kind in product(self._windows, CALLS)])
        of_windows = found.reshape(len(self._windows), len(CALLS), *tokens.shape).sum(axis=1)
        return np.concatenate([found, of_windows / np.maximum(tokens, 1e-9)])

    def _exchanges_s(self, table: ChunkTable) -> Array:
        """Return (S, C): seconds of one layer's all-to-alls in all sequence-parallel groups."""
        total = np.zeros_like(table.tokens)
        for size, tokens in table.exchanged_tokens.items():
            total += 4 * self._sp_links[size].latency_s * (tokens > 0)
            total += self._exchange_s(size) * tokens
        return total

    def _relays_s(self, part: PassPart, table: ChunkTable) -> Array:
        """Return (S, C): seconds in which a process waits for recurrent states that others pass on,
        from the process of a slice's first tokens to that of its last."""
        total = np.zeros_like(table.tokens)
        waits: list[tuple[float, int]] = []  # of each layer, by the attention layer before it
        linear, passed = (1, 1)
        if part.work == "backward":
            linear, passed = 2 - (self._training.lora is not None), 2
        num_attending = 0
        for layer, saved in zip(self._layers[: self._num_layers(part)], self._saved, strict=False):
            if share := layer.mixer_share:
                token_s = linear * layer.flops / self._rate
                token_s += passed * saved / self._hardware.activation_bytes_per_s
                waits.append((share * token_s, num_attending))
            num_attending += layer.attends
        if not waits:
            return total
        num_bytes = max(layer.state_bytes(self._training.compute_bytes) for layer in self._layers)
        for size, tokens in table.exchanged_tokens.items():
            longest = {at: max(s for s, own in waits if own == at) for _, at in waits}
            in_each_layer = num_attending and self._shape.inner_size(size) < size
            own = [s for s, _ in waits] if in_each_layer else [*longest.values()]
            total += sum(own) * (1 - 1 / size) * tokens
            message_s = self._sp_links[size].seconds(num_bytes)
            total += len(own) * (size - 1) * message_s * (tokens > 0)
        return total

    @cached_property
    def unshard_s(self) -> float:
        """Seconds of the all-gather of all weights in compute dtype over their sharding group."""
        return self.gather_s(self._weights.floats)

    @cached_property
    def layer_gathers_s(self) -> float:
        """Seconds of the all-gathers of the layers, one after the other."""
        return sum(map(self.gather_s, self._weights.float_layers()))

    def gather_s(self, num_parameters: int) -> float:
        """Return the seconds of an all-gather of weights in compute dtype over their sharding
        group."""
        return self._collective_s("all_gather", num_parameters * self._training.compute_bytes)

    @cached_property
    def reduce_s(self) -> float:
        """Seconds of reducing the gradients of all trained weights."""
        return self.sum_s(self._weights.trained)

    @cached_property
    def late_share(self) -> float:
        """Share of the stage's trained parameters that are in embedding and head. Their gradients
        are reduced last."""
        return self._weights.beside_trained / max(1, self._weights.trained)

    def sum_s(self, num_parameters: int) -> float:
        """Return the seconds of reducing the gradients of `num_parameters` parameters: a
        reduce-scatter under ZeRO, else an all-reduce."""
        kind: Collective = "reduce_scatter" if self._training.zero_stage else "all_reduce"
        num_bytes = num_parameters * self._training.gradient_bytes
        return self._collective_s(kind, num_bytes) + self._moved_s(num_bytes / self._num_sharing)

    def _moved_s(self, num_bytes: float) -> float:
        """Return the seconds of a copy to or from CPU memory; 0 unless weights are offloaded."""
        is_there = self._training.offload_weights
        return self._hardware.links.host.seconds(num_bytes) if is_there else 0.0

    @cached_property
    def trained_gather_s(self) -> float:
        """Seconds of the all-gather of the trained weights in compute dtype."""
        return self.gather_s(self._weights.trained)

    def _collective_s(self, kind: Collective, num_bytes: float) -> float:
        """Return the seconds of a collective over all devices of the stage. It runs within each
        sharding group, whose devices together hold all weights. A collective on gradients also runs
        between these groups (HSDP)."""
        own_s = self._in_group_s(kind, num_bytes)
        return own_s if kind == "all_gather" else own_s + self._between_groups_s(num_bytes)

    def _in_group_s(self, kind: Collective, num_bytes: float) -> float:
        """Return the seconds of a collective within one sharding group."""
        links, devices = self._hardware.links, self._devices
        own = devices[: self._num_sharing]
        return links.collective_s(kind, num_bytes, len(own), links.num_nodes(own))

    def _between_groups_s(self, num_bytes: float) -> float:
        """Return the seconds of the all-reduce of gradients between sharding groups."""
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
        """Number of sharding groups. The devices of each group share one copy of the weights."""
        return min(self._training.replicate, len(self._groups))

    @cached_property
    def between_s(self) -> float:
        """Seconds of the all-reduce of layer gradients between sharding groups."""
        return self._between_groups_s(self._layer_gradients)

    @property
    def _layer_gradients(self) -> float:
        """Bytes of the gradients of all layers."""
        own = self._weights.trained - self._weights.beside_trained
        return own * self._training.gradient_bytes

    @property
    def _num_sharing(self) -> int:
        """Number of devices that share the stage's weights and optimizer state."""
        return len(self._devices) // self._num_groups

    def _gathered_s(self, *, backward: bool) -> float:
        """Return the seconds of the collectives of one pass: it gathers weights and, if `backward`,
        also reduces gradients."""
        if self._training.gathers:  # this runtime: of the layers only, within a group
            sums_s = self._in_group_s("reduce_scatter", self._layer_gradients) if backward else 0.0
            return self.layer_gathers_s + sums_s
        return self.unshard_s + (self.reduce_s if backward else 0.0)

    def _sp_link(self, size: int, devices: range) -> Link:
        """Return the link for all-to-alls of sequence-parallel groups of `size` processes, into
        which `devices` are divided. It is the link of the slowest group, the one that spans most
        nodes."""
        links = self._hardware.links
        starts = range(devices.start, devices.stop, size)
        nodes = max(links.num_nodes(range(at, at + size)) for at in starts)
        return links.effective("all_to_all", size, nodes)

    def _per_token(self, part: PassPart) -> tuple[float, float]:
        """Return two numbers per token: FLOPs of matrix products, and bytes of saved tensors that
        are read or written."""
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
                # without the last layer's matrices after its K,V projection
                last = self._layers[-1]
                tail = 2 * (last.matrices - last.before_kv)
                passed = sum(self._saved) - self._saved[-1] * tail / last.flops
                return linear + self._lora - tail, passed
            case _:
                return linear + self._lora, sum(self._saved)

    def _unpacking_s(self, part: PassPart) -> float:
        """Return the seconds in which a part dequantizes the stage's 4-bit weights."""
        training = self._training
        if training.packed_bytes is None:
            return 0.0
        weights = [layer.linear_parameters for layer in self._layers[: self._num_layers(part)]]
        if part.work == "to last kv":
            weights[-1] = min(weights[-1], self._layers[-1].before_kv)
        each_bytes = training.packed_bytes + 2 * training.compute_bytes
        return sum(weights) * each_bytes / self._hardware.unpacking_bytes_per_s

    def _num_layers(self, part: PassPart) -> int:
        """Return the number of layers that the part runs; 0 for the head."""
        if part.work in HEADS:
            return 0
        return part.layers if part.work == "first layers" else self._height

    def _attending(self, part: PassPart) -> list[int]:
        """Return the indices of the stage's layers whose attention the part computes."""
        first, stop = part.remembered, self._num_layers(part) - (part.work == "to last kv")
        if part.work == "backward":
            first = 0
        return [i for i in range(first, stop) if self._layers[i].attends]

    def _attention(self, part: PassPart) -> Efficiency:
        backward = part.work == "backward"
        return self._hardware.attention_backward if backward else self._hardware.attention_forward

    def _key_s(self, part: PassPart, call: AttentionCall = "full") -> list[float]:
        """Return the seconds per attended key in each layer, for attention calls of the kind `call`
        with many tokens. On a card, layers with a window or wide heads always get the rate of
        packed slices, since the card's fastest kernels lack windows and wide heads."""
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
        """Return the seconds per token for exchanging slices in one layer, in sequence-parallel
        groups of `size`, without latencies.

        A group consists of inner groups, whose processes divide the heads among them. A process
        exchanges queries and outputs with its inner group, and gathers the K,V of its heads from
        the whole group. This is the two-dimensional attention of LoongTrain, with a gather in place
        of the ring. The backward moves as many bytes: dO, dq, and dK,dV from each inner group.
        """
        shape, inner = self._shape, self._shape.inner_size(size)
        element = self._training.compute_bytes
        q_bytes = 2 * shape.q_size / size * (inner - 1) / inner * element
        kv_bytes = 2 * shape.kv_size * shape.kv_share(size) * (size - 1) / size * element
        link = self._sp_links[size]
        near = self._sp_links.get(inner, link)
        return q_bytes / near.bytes_per_s + kv_bytes / link.bytes_per_s

    def _waits_s(self, part: PassPart, table: ChunkTable) -> Array:
        """Return (S, C): seconds that a part of a pass waits for streamed K,V."""
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
        """Return (S, C): seconds that one layer waits for the K,V of a prefix.

        The prefix is loaded in blocks with two buffers, as in FPDT: the first block loads while the
        chunk's own tokens compute, each later block during attention to the block before it.

        Args:
            tokens: tokens of the prefix.
            own_s: seconds in which the chunk's own tokens compute.
            keys_s: seconds of attention to the prefix.
            load_s: seconds of loading the prefix.
        """
        blocks = np.maximum(np.ceil(tokens / self._segment_tokens), 1)
        load, block = load_s / blocks, keys_s / blocks
        waited = np.maximum(own_s, load) + (blocks - 1) * np.maximum(block, load) + block
        stall: Array = np.maximum(waited - own_s - blocks * block, 0.0) * (tokens > 0)
        return stall

    def _loads_s(self, tokens: Array, backward: bool) -> Array:
        """Return (S, C): seconds for loading one layer's prefix of `tokens`, in whole segments."""
        assert self._stream is not None
        training = self._training
        segments = np.ceil(tokens / self._segment_tokens)
        # gradients of all but the newest segments are loaded; writing them back overlaps
        cold = np.maximum(segments - NUM_HOT, 0) * backward
        each = self._segment_tokens * self._shape.stored_size
        loaded = each * (segments * training.compute_bytes + cold * training.kv_gradient_bytes)
        seconds: Array = (segments + cold) * self._stream.latency_s
        seconds += loaded / self._stream.bytes_per_s
        return seconds


@dataclass(frozen=True)
class ChunkTable:
    """The work of each process on each chunk: FLOPs are computed from these numbers of tokens and
    keys. All arrays have one shape, usually (S, C)."""

    tokens: Array
    """Tokens of the chunk on the process."""
    num_slices: Array
    """Calls of attention: one per slice, two if inner places (`calls_of`) divide its rows."""
    exchanged_tokens: dict[int, Array]
    """size of a place (2 or more) -> tokens of slices on the process's place of that size."""
    local_keys: Keys
    """Computed keys of slices on one process: attended ones, and masked ones in the same tiles.
    A missing entry means none."""
    shared_keys: Keys
    """The process's share of the computed keys of slices on larger places."""
    prefix_tokens: dict[int | None, Array]
    """window -> stored tokens that the process reads as prefixes, each times the share of the heads
    that the process stores."""

    def prefix_keys(self, window: int | None) -> Array:
        """Return (S, C): numbers of keys in prefixes to which a chunk's slices attend on each
        process, in layers with the attention window `window`."""
        found: Array = self.local_keys[window, "full"] + self.shared_keys[window, "full"]
        return found


def chunk_table(
    chunks: Sequence[Chunk],
    model: ModelShape,
    sp_size: int,
    tile_tokens: int = 0,
    position: Callable[[Slice], int] = attrgetter("start"),
) -> ChunkTable:
    """Return the work of each of `sp_size` processes on each of `chunks`.

    Args:
        tile_tokens: keys per tile of the attention kernel. On average half of the tile on the
            diagonal is masked, but computed all the same.
        position: function that returns the position id of a slice's first token, which differs from
            `start` in sequences that branch.
    """
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
            diagonal: AttentionCall = "packed" if together[piece.place] > 1 else "square"
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
    """Return the number of attention calls per slice on each process of a sequence-parallel group
    of `size` processes.

    If the heads are divided over all processes, the number is 1. Otherwise the group consists of c
    inner groups: the rows of a slice are divided over inner groups, and the heads over the
    processes of each inner group. The number is then 2, since an inner group has two parts of the
    rows: of 2c parts inner group b has the parts b and 2c-1-b. This zigzag balances causal
    attention, as in context parallelism.
    """
    return 1 + (model.inner_size(size) < size)


ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five matrix products for two."""


def attended_keys(start: int, stop: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of tokens [start, stop) of one sequence. Token t sees
    min(t + 1, window) keys, also those before `start`."""
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    full = min(max(window, start), stop)  # from this token on the window is full
    below = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return below + (stop - full) * window


def sequence_flops(shape: ModelShape, seq_len: int) -> tuple[float, float]:
    """Return (FLOPs of matrices, FLOPs of attention) of a forward of one whole sequence through the
    model with head."""
    keys = {window: float(attended_keys(0, seq_len, window)) for window in {*shape.windows}}
    attention = sum(layer.key_flops * keys[layer.window] for layer in shape.layers)
    return float(shape.token_flops * seq_len), attention


def step_flops(
    shape: ModelShape, seq_lens: Iterable[int], *, has_frozen_base: bool, masked: bool = True
) -> float:
    """Return the model FLOPs of a step's forwards and backwards over whole sequences, for MFU.

    They are counted as in PaLM (Chowdhery et al., 2022, appendix B) and torchtitan
    (`num_flops_per_token`): 6 per token and parameter of a matrix, including the head, and 12 *
    layers * heads * head dim * T for attention over the T keys of each sequence. A backward counts
    as two forwards, recomputation does not count. Matrices of a frozen base have no gradient: they
    count 4 instead of 6, and adapters are left out.

    `masked`: count only keys inside the causal mask and windows, about half of PaLM's count.
    Otherwise each token attends to T keys, or to the window of a layer that has one.
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
