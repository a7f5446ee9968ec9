"""Seconds of chunk passes through one stage, for all chunks of a table at once.

One pass on one process of a pool:

    linear + max(all-to-alls, local attention) + shared attention + waits for streamed K,V

The fixed time of matrices is that of reading them: of experts those that some token of a process
visits. The all-to-alls of slices on several processes, one for every size of places, hide behind
the attention of slices on one (Skrull, Eq. 2). A pool is as slow as its slowest process.
Efficiencies saturate with the process's tokens; under tensor parallelism with tokens / tp_size,
since each device's matrices are that much narrower.

    P parts, C chunks, S processes of a pool

Seconds of parts of passes as sums of products: what a table says times what a stage takes.

The table may be of a plan's chunks, or of anything whose sums a planner knows: a process of a pool
before and after each of many moves, all in one call.

    P parts, C chunks, S processes of a pool

The chunks of a plan as arrays: tokens, attended keys and prefixes, per process of a pool.

C chunks, S processes of a pool; a slice on a place of n processes counts 1/n with each of these

Exact FLOPs of chunk-wise training: causal, windowed, grouped heads, experts.

A multiplication and an addition are two FLOPs. Counted are the matrices and the two products of
attention over exactly the (query, key) pairs that the mask allows; norms, activations, softmax and
the tiles that a kernel computes beyond the diagonal are not: they end up in the efficiency.

    forward of a token through a matrix of P parameters   2 P
    backward                                              4 P   (2 P where the matrix is frozen)
    attention, per pair of query and key, forward         4 N H
    backward (flash: scores again, then four products)    10 N H
    scan of a recurrent layer                             by its inner chunks (`shapes.recurrent`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from furlong.cost.machine import Efficiency, HardwareSpec, Link
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Slice
from furlong.plan.segments import NUM_HOT

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


@dataclass(frozen=True)
class StageRates:
    """The seconds of passes through one stage."""

    shape: ModelShape
    hardware: HardwareSpec
    training: Training
    flops: StageFlops
    sp_links: Mapping[int, Link]
    """size of a place -> the link of its all-to-all."""
    tp_link: Link
    stream: Link | None = None
    """Link over which K,V come, if not from the device."""
    segment_tokens: int = 8192
    """Tokens of a segment of K,V, which travels as one."""
    lora_per_token: int = 0
    """Forward FLOPs of the stage's adapters."""
    saved_per_token: tuple[float, ...] = ()
    """Bytes that the graph of each layer saves."""
    logits_per_token: float = 0.0
    """Bytes of logits, with their gradients."""
    _terms: dict[tuple[PassPart, ...], Terms] = field(default_factory=dict, compare=False)

    def seconds(self, parts: tuple[PassPart, ...], table: ChunkTable) -> Array:
        """(P, S, C) parts of a pass over the stage, on every process."""
        waits_s: Array | float = 0.0
        if self.stream is not None:
            waits_s = np.stack([self._waits_s(part, table) for part in parts])
        if parts not in self._terms:
            self._terms[parts] = self._terms_of(parts)
        return self._terms[parts].seconds(table, waits_s)

    def _terms_of(self, parts: Sequence[PassPart]) -> Terms:
        """Factors of the sums of a table in the seconds of some parts."""
        hardware, tp = self.hardware, self.training.tp_size
        rate = hardware.peak_flops_per_s * hardware.linear.best
        linear, passed = np.array([self._per_token(part) for part in parts], float).T
        layers = np.array([self._num_layers(part) for part in parts])
        attending = [self._attending(part) for part in parts]
        called = np.array([len(layers) for layers in attending])
        keys = [*map(self._key_s, parts)]
        seen = self.flops.windows
        times = np.array([2 if part.work == "backward" else 1 for part in parts])
        passes = np.array([part.work in ("forward", "to last kv", "backward") for part in parts])
        tp_call_s, tp_token_s = self._tp_s()
        return Terms(
            token_s=(linear / rate + passed / hardware.activation_bytes_per_s) / tp
            + layers * tp_token_s,
            process_s=linear * hardware.linear.half_tokens / rate + layers * tp_call_s,
            idle_s=self._idle_s(parts),
            key_s={
                window: np.array(
                    [
                        sum(some[layer] for layer in layers if seen[layer] == window)
                        for layers, some in zip(attending, keys, strict=True)
                    ]
                )
                for window in dict.fromkeys(seen)
            },
            half_tokens=np.array([self._attention(part).half_tokens * tp for part in parts]),
            exchanges=called,
            launch_s=times * hardware.layer_launch_s * layers + hardware.pass_launch_s * passes,
            call_s=times * hardware.slice_launch_s * called,
            exchange_s={
                size: (4 * link.latency_s, self._exchange_s(size))
                for size, link in self.sp_links.items()
            },
            hides_launches=hardware.hides_launches,
        )

    def _per_token(self, part: PassPart) -> tuple[float, float]:
        """FLOPs of matrices, and bytes of saved tensors that pass, per token."""
        flops, lora, height = self.flops, self.lora_per_token, len(self.flops.windows)
        frozen = self.training.lora is not None
        match part.work:
            case "head":
                return flops.head_per_token, self.logits_per_token / 3
            case "head and back":
                return flops.head_per_token * (2 if frozen else 3), self.logits_per_token
            case "backward":
                linear = flops.linear_per_token * (1 if frozen else 2) + 2 * lora
                return linear, 2 * sum(self.saved_per_token)
            case "first layers":
                linear = sum(flops.layer_linear_per_token[: part.layers])
                return linear + lora * part.layers / max(1, height), self._saved(part)
            case _:
                left_out = flops.tail_per_token if part.work == "to last kv" else 0
                return flops.linear_per_token + lora - left_out, self._saved(part)

    def _idle_s(self, parts: Sequence[PassPart]) -> dict[float, Array]:
        """share of experts that a token does not visit -> (P,) seconds of reading those."""
        hardware, frozen = self.hardware, self.training.lora is not None
        read_s = hardware.linear.half_tokens / hardware.peak_flops_per_s / hardware.linear.best
        found: dict[float, Array] = {}
        for number, part in enumerate(parts):
            layers = self._num_layers(part) - (part.work == "to last kv")
            times = 2 if part.work == "backward" and not frozen else 1
            for unvisited, flops in self.flops.layer_idle[:layers]:
                if flops:
                    own = found.setdefault(unvisited, np.zeros(len(parts)))
                    own[number] += times * flops * read_s
        return found

    def _num_layers(self, part: PassPart) -> int:
        """Layers that the part passes; none behind the last."""
        if part.work in ("head", "head and back"):
            return 0
        return part.layers if part.work == "first layers" else len(self.flops.windows)

    def _saved(self, part: PassPart) -> float:
        """Bytes per token that a forward passes."""
        saved, flops = self.saved_per_token, self.flops
        if part.work == "first layers":
            return sum(saved[: part.layers])
        if part.work == "to last kv" and saved:
            return sum(saved) - saved[-1] * flops.tail_per_token / flops.layer_linear_per_token[-1]
        return sum(saved)

    def _attending(self, part: PassPart) -> list[int]:
        """Layers of the stage whose attention runs."""
        height = len(self.flops.windows)
        match part.work:
            case "forward":
                layers = range(part.remembered, height)
            case "to last kv":
                layers = range(part.remembered, height - 1)
            case "first layers":
                layers = range(part.remembered, part.layers)
            case "backward":
                layers = range(height)
            case _:
                layers = range(0)
        return [layer for layer in layers if self.flops.attention_per_key[layer]]

    def _attention(self, part: PassPart) -> Efficiency:
        backward = part.work == "backward"
        return self.hardware.attention_backward if backward else self.hardware.attention_forward

    def _key_s(self, part: PassPart) -> list[float]:
        """Seconds of an attended key in each layer, at the best efficiency."""
        times = ATTENTION_BACKWARD if part.work == "backward" else 1.0
        rate = self.hardware.peak_flops_per_s * self._attention(part).best
        times /= self.training.tp_size * rate
        return [times * flops for flops in self.flops.attention_per_key]

    def _exchange_s(self, size: int) -> float:
        """Seconds per token of a place's slices in the exchanges of one layer, without latencies:
        q and the output stay within an inner group, K,V of the process's heads come from the whole
        place (all-to-all with gathered keys: DeepSpeed Ulysses' heads within LoongTrain's second
        dimension, whose ring is replaced). The backward moves as much: dO in, then dq, and dK,dV
        from every inner group."""
        shape, inner = self.shape, self.shape.inner_size(size)
        element = self.training.compute_bytes / self.training.tp_size
        q_bytes = 2 * shape.q_size / size * (inner - 1) / inner * element
        kv_bytes = 2 * shape.kv_size * shape.kv_share(size) * (size - 1) / size * element
        link = self.sp_links[size]
        near = self.sp_links.get(inner, link)
        return q_bytes / near.bytes_per_s + kv_bytes / link.bytes_per_s

    def _tp_s(self) -> tuple[float, float]:
        """Two all-gathers and two reduce-scatters of hidden states per layer (Megatron): what does
        not grow, and what each token adds."""
        tp = self.training.tp_size
        if tp == 1:
            return 0.0, 0.0
        moved = self.shape.hidden_size * self.training.compute_bytes * (tp - 1) / tp
        return 4 * self.tp_link.latency_s, 4 * moved / self.tp_link.bytes_per_s

    def _waits_s(self, part: PassPart, table: ChunkTable) -> Array:
        """(S, C) seconds that the part waits for streamed K,V."""
        attending, tokens = self._attending(part), table.tokens
        total = np.zeros_like(tokens)
        if not attending:
            return total
        hardware, tp = self.hardware, self.training.tp_size
        rate = hardware.peak_flops_per_s * hardware.linear.best
        matrices = np.where(tokens > 0, tokens / tp + hardware.linear.half_tokens, 0.0)
        own_s = self._per_token(part)[0] * matrices / rate / len(attending)
        slower = 1 + self._attention(part).half_tokens * tp / np.maximum(tokens, 1e-9)
        key_s, windows = self._key_s(part), self.flops.windows
        for (window, each), count in Counter((windows[i], key_s[i]) for i in attending).items():
            keys_s = table.prefix_keys[window] * each * slower
            load_s = self._loads_s(table.prefix_tokens[window], part.work == "backward")
            total += count * self._stall_s(table.prefix_tokens[window], own_s, keys_s, load_s)
        return total

    def _stall_s(self, tokens: Array, own_s: Array, keys_s: Array, load_s: Array) -> Array:
        """(S, C) seconds that one layer waits for its prefix, cut into blocks (FPDT's two buffers:
        the first block loads while the layer's own part computes)."""
        blocks = np.maximum(np.ceil(tokens / self.segment_tokens), 1)
        load, block = load_s / blocks, keys_s / blocks
        waited = np.maximum(own_s, load) + (blocks - 1) * np.maximum(block, load) + block
        stall: Array = np.maximum(waited - own_s - blocks * block, 0.0) * (tokens > 0)
        return stall

    def _loads_s(self, tokens: Array, backward: bool) -> Array:
        """(S, C) seconds that one layer's prefix takes to arrive, in whole segments."""
        assert self.stream is not None
        training = self.training
        segments = np.ceil(tokens / self.segment_tokens)
        # gradients of all segments but the newest come in, and go out on the other direction
        cold = np.maximum(segments - NUM_HOT, 0) * backward
        each = self.segment_tokens * self.shape.stored_size / training.tp_size
        loaded = each * (segments * training.compute_bytes + cold * training.kv_gradient_bytes)
        seconds: Array = (segments + cold) * self.stream.latency_s
        seconds += loaded / self.stream.bytes_per_s
        return seconds


@dataclass(frozen=True)
class Terms:
    """Factors of the sums of a table: arrays of (P,)."""

    token_s: Array
    process_s: Array
    """On each process that has a token."""
    idle_s: Mapping[float, Array]
    """share of experts that a token does not visit -> of a process with so many tokens that some
    visit each of these experts, too."""
    key_s: Mapping[int | None, Array]
    """window -> per attended key, at the best efficiency."""
    half_tokens: Array
    """Tokens at which attention is half as efficient."""
    exchanges: Array
    """Layers whose attention runs."""
    launch_s: Array
    """On each process that has a token."""
    call_s: Array
    """Per call of attention."""
    exchange_s: Mapping[int, tuple[float, float]]
    """size of a place -> the all-to-alls of one layer: what does not grow, and what each token of
    its slices adds."""
    hides_launches: bool

    def seconds(self, table: ChunkTable, waits_s: Array | float = 0.0) -> Array:
        """(P, S, C) every part on every process; `waits_s` alike: for streamed K,V."""
        tokens, busy = table.tokens, table.tokens > 0

        def over(values: Array) -> Array:
            return values.reshape(-1, *(1,) * tokens.ndim)

        nothing = np.zeros((1,) * (tokens.ndim + 1))
        local, shared = (
            sum((over(each) * keys[window] for window, each in self.key_s.items()), nothing)
            for keys in (table.local_keys, table.shared_keys)
        )
        slower = 1 + over(self.half_tokens) / np.maximum(tokens, 1e-9)
        seconds: Array = over(self.token_s) * tokens + over(self.process_s) * busy
        for unvisited, each in self.idle_s.items():
            # E experts of which a token visits k: n tokens visit E (1 - (1 - k/E)^n) on average
            visited = 1 - unvisited ** np.maximum(tokens - 1, 0)
            seconds += over(each) * visited
        seconds += shared * slower
        seconds += np.maximum(local * slower, over(self.exchanges) * self._exchanges_s(table))
        seconds += waits_s
        launched = over(self.launch_s) * busy + over(self.call_s) * table.num_slices
        if self.hides_launches:
            return np.maximum(seconds, launched, out=seconds)
        return np.add(seconds, launched, out=seconds)

    def _exchanges_s(self, table: ChunkTable) -> Array:
        """(S, C) the all-to-alls of one layer, those of all sizes of the process's places."""
        total = np.zeros_like(table.tokens)
        for size, tokens in table.exchanged_tokens.items():
            once_s, token_s = self.exchange_s[size]
            total += once_s * (tokens > 0) + token_s * tokens
        return total


Array = NDArray[np.float64]


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
    local_keys: dict[int | None, Array]
    """window -> keys of slices on one process that are computed: the attended ones, and those that
    share a tile with them behind the mask."""
    shared_keys: dict[int | None, Array]
    """window -> the process's part of the computed keys of slices on larger places."""
    prefix_tokens: dict[int | None, Array]
    """window -> stored tokens that the process reads before its slices, in units of whole heads: of
    a prefix it counts the share of the heads that it keeps."""
    prefix_keys: dict[int | None, Array]
    """window -> the attended keys that lie in those prefixes, in the same units."""


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
    calls = {size: attention_calls(model, size) for size in (1, *sizes)}
    tokens, num_slices = np.zeros(shape), np.zeros(shape)
    exchanged = {size: np.zeros(shape) for size in sorted(sizes)}
    local, shared, prefix, prefix_keys = (
        {window: np.zeros(shape) for window in kinds} for _ in range(4)
    )
    for c, chunk in enumerate(chunks):
        if chunk.is_dummy:
            tokens[:, c] = num_slices[:, c] = 1
        before = -1
        for piece in chunk.slices:
            n, start, size = piece.num_tokens, position(piece), piece.place.size
            who = slice(piece.place.first, piece.place.stop)
            tokens[who, c] += n / size
            num_slices[who, c] += calls[size]
            if size > 1:
                exchanged[size][who, c] += n
            for window in kinds:
                keys = computed_keys(start, start + n, window, tile_tokens)
                (shared if size > 1 else local)[window][who, c] += keys / size
                if start:
                    seen = start if window is None else min(start, window - 1)
                    if piece.seq_id != before:  # branches of one parent read it once
                        prefix[window][who, c] += seen * model.kv_share(size)
                    earlier = attended_keys(start, start + n, window) - attended_keys(0, n, window)
                    prefix_keys[window][who, c] += earlier / size
            before = piece.seq_id
    return ChunkTable(tokens, num_slices, exchanged, local, shared, prefix, prefix_keys)


def attention_calls(model: ModelShape, place_size: int) -> int:
    """Calls of attention that a slice takes on each process of its place (zigzag, as context
    parallelism balances causal attention: parts b and 2 c - 1 - b of 2 c for group b of c)."""
    return 1 if model.inner_size(place_size) == place_size else 2


def computed_keys(start: int, stop: int, window: int | None, tile_tokens: int) -> float:
    """Keys of the tokens [start, stop) of a sequence: those that they attend, and those of their
    tiles behind the mask."""
    num_tokens = stop - start
    return attended_keys(start, stop, window) + num_tokens * min(num_tokens, tile_tokens) / 2


ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five matrix products for two."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Work split by what limits it: matrices, and attention."""

    linear: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def times(self, linear: float, attention: float) -> Flops:
        """So many times the work of each part."""
        return Flops(self.linear * linear, self.attention * attention)


def attended_keys(start: int, stop: int, window: int | None = None) -> int:
    """(query, key) pairs of tokens [start, stop) of one sequence: token t sees min(t + 1, window)
    keys, those of its prefix included."""
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    full = min(max(window, start), stop)  # from this token on the window is full
    below = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return below + (stop - full) * window


@dataclass(frozen=True)
class StageFlops:
    """Work of one stage per token and per attended key; all figures are of a forward."""

    linear_per_token: int
    """FLOPs of all its layers."""
    tail_per_token: int
    """FLOPs of its last layer behind the K,V projection: a pass up to the last K,V leaves them
    out."""
    attention_per_key: tuple[int, ...]
    """FLOPs of one (query, key) pair in each layer, over all heads; 0 in those without
    attention."""
    head_per_token: int
    """FLOPs of the language-model head; 0 unless it is the last stage."""
    layer_linear_per_token: tuple[int, ...]
    windows: tuple[int | None, ...]
    """The window of each layer."""
    layer_idle: tuple[tuple[float, int], ...]
    """For each layer the share of its experts that a token does not visit, and the FLOPs per token
    that their matrices would take."""

    def forward(self, num_tokens: float, keys: Mapping[int | None, float]) -> Flops:
        """FLOPs without the head; `keys`: attended keys for each window of the stage's layers."""
        attention = sum(
            each * keys[window]
            for each, window in zip(self.attention_per_key, self.windows, strict=True)
        )
        return Flops(self.linear_per_token * num_tokens, attention)

    def sequence(self, seq_len: int) -> Flops:
        """FLOPs of one whole sequence, head included."""
        keys = {window: float(attended_keys(0, seq_len, window)) for window in {*self.windows}}
        layers = self.forward(seq_len, keys)
        return replace(layers, linear=layers.linear + self.head_per_token * seq_len)


def stage_flops(shape: ModelShape, stages: tuple[int, ...], stage: int) -> StageFlops:
    """The work of `stage`, of a model cut into `stages` (layers of each)."""
    first = sum(stages[:stage])
    layers = range(first, first + stages[stage])
    linear = tuple(shape.layer_flops(layer) for layer in layers)
    is_last = stage == len(stages) - 1
    return StageFlops(
        linear_per_token=sum(linear),
        tail_per_token=_tail_flops(shape, layers[-1]) if layers else 0,
        attention_per_key=tuple(shape.layers[layer].key_flops for layer in layers),
        head_per_token=2 * shape.embedding_parameters if is_last else 0,
        layer_linear_per_token=linear,
        windows=tuple(shape.windows[layer] for layer in layers),
        layer_idle=tuple(_idle(shape, layer) for layer in layers),
    )


def _idle(shape: ModelShape, layer: int) -> tuple[float, int]:
    own = shape.layers[layer]
    return own.unvisited, 2 * own.idle_parameters


def _tail_flops(shape: ModelShape, layer: int) -> int:
    """FLOPs of a layer per token behind what later chunks need of it."""
    return 2 * (shape.layers[layer].matrices - shape.layers[layer].before_kv)


def sequence_flops(shape: ModelShape, seq_len: int) -> Flops:
    """FLOPs of one whole sequence's forward through the whole model, head included."""
    return stage_flops(shape, (shape.num_layers,), 0).sequence(seq_len)
