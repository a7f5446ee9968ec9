"""Memory simulation: bytes that a plan's rank holds in each memory during each of its actions.

    memory = PlanMemory(shape, training, budget_bytes)
    check(plan, memory)                    # the checker's Memory: refuses a plan that does not fit
    memory.curve(plan, rank).peak          # parts of memory at the rank's peak

The simulation follows the passes that the executor runs, and adds up tensors as they are allocated
and freed. A cell is one chunk at one stage:

    ids            token ids and positions: from stage 0's Forward to its Backward
    gradients      of a stage: made by its first Backward, layer by layer, as the graph is freed
    inputs         hidden states before a stage: from the pass that makes them to the last pass that
                   reads them. The cell's Backward, if any, overwrites the hidden states with their
                   gradient, which the Backward of the stage before frees. Offloaded inputs are read
                   by each pass but the Backward
    attention      attention outputs: saved by the Forward, reused by the Recompute and by a
                   RebuildKV
    graphs         of retained cells: from the Forward to the Backward
    graph again    of recomputed cells: from the Recompute to the Backward
    leaf           the copy of the input that a graph holds after `inputs` are offloaded or freed
    states         of recurrent layers at the end of a chunk of a cut sequence: held and offloaded
                   like the chunk's K,V; passes of the next chunk work on a copy
    state gradients  from the next chunk's Backward to the chunk's own; on the device
    kv, kv_gradients  of cut sequences, in segments (`StoredLayers`)

Offloaded tensors still take memory on the device while an action uses them. This holds for the
input that is read and the output that is copied, for the attention outputs of one layer, for one
layer of a retained graph, and for blocks of K,V. From the Recompute to the Backward the attention
outputs of all of the cell's layers are on the device, as the cell's graph holds them. On a GPU,
offload to the CPU has staging buffers on the device for all of a step, which include the blocks of
K,V.

    tokens T, query heads N, key-value heads K, head dim H, hidden D, MLP width F, element size e
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from furlong.cost.shape import ModelShape, of_dtype
from furlong.cost.training import Training
from furlong.plan.passes import Pass, input_frees, kv_frees, passes
from furlong.plan.plan import (
    COMPUTING,
    ON_DEVICE,
    TARGETS,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Offload,
    OffloadTarget,
    RebuildKV,
    Recompute,
    Recv,
    Reduce,
    Reshard,
    Send,
    Slice,
    Unshard,
)
from furlong.plan.segments import NUM_HOT, StoredTokens, segment_tokens

TensorKind = Literal["kv", "kv_gradients", "inputs", "attention", "graphs"]
"""Kinds of tensors that can be offloaded."""
TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
MemoryPart = Literal[
    "weights", "gradients", "optimizer", "activations", "kv", "kv_gradients", "states", "logits",
    "buffers",
]  # fmt: skip
PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
# tensors that outlive an action: the part that they count as, and their kind for offload
_HELD: dict[str, tuple[MemoryPart, TensorKind | None]] = {
    "ids": ("activations", None),
    "inputs": ("activations", "inputs"),
    "attention": ("activations", "attention"),
    "graphs": ("activations", "graphs"),
    "graph again": ("activations", None),
    "leaf": ("activations", None),
    "states": ("states", "kv"),
    "state gradients": ("states", None),
}


_OF_A_LAYER: tuple[MemoryPart, ...] = ("gradients", "activations", "states", "buffers")
"""Parts that tensors of a computing layer count as."""


@dataclass(frozen=True)
class PlanTraffic:
    """Copies of one rank to and from CPU memory and disk: their bytes and their numbers. Each array
    is (actions of the rank, kinds of tensors)."""

    offload: Offload
    read: NDArray[np.float64]
    """Bytes copied to the device."""
    written: NDArray[np.float64]
    """Bytes copied from the device."""
    num_reads: NDArray[np.float64]
    """Number of copies to the device."""
    num_writes: NDArray[np.float64]

    def to_json(self) -> dict[TensorKind, dict[str, Any]]:
        """Return a dict with an entry for each kind of tensor of which any bytes are copied: kind
        -> {"offload": target, "read_bytes": ..., "written_bytes": ...}."""
        sums = zip(TENSOR_KINDS, self.read.sum(axis=0), self.written.sum(axis=0), strict=True)
        moved = {kind: (round(float(read)), round(float(written))) for kind, read, written in sums}
        return {
            kind: {"offload": target_of(self.offload, kind), "read_bytes": r, "written_bytes": w}
            for kind, (r, w) in moved.items()
            if r or w
        }

    def of(self, target: OffloadTarget) -> list[int]:
        """Return the column indices of the kinds of tensors that are offloaded to `target`."""
        return [i for i, kind in enumerate(TENSOR_KINDS) if target_of(self.offload, kind) == target]


def target_of(offload: Offload, kind: TensorKind) -> OffloadTarget:
    """Return the offload target of a kind of tensor. Gradients of K,V go where K,V go."""
    target: OffloadTarget = getattr(offload, kind.removesuffix("_gradients"))
    return target


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that one rank of a plan holds during each of its actions. A rank may be several
    sequence-parallel processes: bytes are those of the process that needs most during the action,
    and traffic is that of the process with most traffic."""

    device: NDArray[np.int64]
    """(actions, parts): bytes at the action's peak."""
    cpu: NDArray[np.int64]
    """(actions,): bytes in CPU memory."""
    disk: NDArray[np.int64]
    """(actions,): bytes on disk."""
    traffic: PlanTraffic
    late: Mapping[int, tuple[float, float, float, float]]
    """Index of a Backward that is the first of its stage, or of stage 0 -> (after_layers,
    after_embedding, made, later). `made`: bytes of the gradients of layers and embedding. The
    others are bytes in use beyond those at its start, where the whole graph is in memory: once all
    layers have gradients; once the embedding has one, too; when a later Backward adds to the
    embedding's gradient. In later Backwards the first three are 0."""

    @cached_property
    def device_bytes(self) -> list[int]:
        """Bytes on the device during each action, summed over the parts of memory."""
        totals: list[int] = self.device.sum(axis=1).tolist()
        return totals

    @property
    def lower_bytes(self) -> list[int]:
        """Bytes in CPU memory plus bytes on disk during each action."""
        totals: list[int] = (self.cpu + self.disk).tolist()
        return totals

    @property
    def peak(self) -> dict[MemoryPart, int]:
        """Bytes of each part of memory during the action that needs most on the device."""
        if not self.device_bytes:
            return dict.fromkeys(PARTS, 0)
        at = self.device_bytes.index(self.peak_bytes)
        return dict(zip(PARTS, self.device[at].tolist(), strict=True))

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device during any action."""
        return max(self.device_bytes, default=0)

    @property
    def peak_cpu_bytes(self) -> int:
        return int(self.cpu.max(initial=0))

    @property
    def peak_disk_bytes(self) -> int:
        return int(self.disk.max(initial=0))


TOKEN_BYTES = 16
"""Bytes of one token's id and position, int64 each; a label comes with the loss of its chunk."""
_FLOAT32 = 4


@dataclass(frozen=True)
class StageBytes:
    """Bytes that one process needs for a stage, per token of a chunk unless stated otherwise."""

    graph_layers: tuple[float, ...]
    """Bytes of each layer's graph."""
    attention_layers: tuple[float, ...]
    """Bytes of each layer's attention output and log-sum-exp; 0 without attention."""
    working: float
    """Bytes of the largest set of temporary tensors in one layer, besides those that it saves."""
    unpacked: float
    """Bytes of the largest 4-bit weight after dequantization, whatever the tokens."""
    exchange: float
    """Bytes of all-to-all buffers in one layer, besides `working`. Of the four exchanges (q, k, v;
    the output; its gradient; gradients of q, k, v) they hold the largest one's received tensors and
    a copy of the sent ones."""
    message: float
    """Bytes of hidden states, or their gradient, between two stages; also of the input that a
    checkpointed layer keeps."""
    kv_layer: float
    """Bytes of K and V of one layer in the store."""
    kv_gradient_layer: float
    """Bytes of dK and dV of one layer in the store."""
    ends: float
    """Bytes that final norm and loss save for the backward; at other stages, of the output."""
    state: int
    """Bytes of the recurrent states at the end of a chunk, whatever its tokens."""
    largest_state: int
    """Bytes of the largest layer's states."""
    widest_saved: float
    """Bytes of the widest tensor that a graph saves."""
    logit: float
    """Bytes per logit of a tile; 0 except at the last stage."""
    head_gradient: float
    """Bytes of a trained head's gradient, which autograd allocates for each tile of the loss before
    it is accumulated; 0 except at the last stage."""

    def attention(self, layers: range) -> float:
        """Return the bytes per token of the attention outputs of `layers`."""
        if layers not in self._sums:
            self._sums[layers] = sum(self.attention_layers[layers.start : layers.stop])
        return self._sums[layers]

    @property
    def widest_attention(self) -> float:
        """Bytes per token of the largest attention output."""
        return max(self.attention_layers, default=0.0)

    def graph(self, recompute_layers: int = 0) -> float:
        """Return the bytes per token of the stage's autograd graph, if the first `recompute_layers`
        layers are checkpointed."""
        if recompute_layers not in self._sums:
            kept = sum(self.graph_layers[recompute_layers:])
            self._sums[recompute_layers] = kept + recompute_layers * self.message + self.ends
        return self._sums[recompute_layers]

    @cached_property
    def _sums(self) -> dict[range | int, float]:
        """Cached results. A range of layers -> bytes of their attention outputs (see `attention`);
        a number `recompute_layers` -> bytes of the graph (see `graph`)."""
        return {}


@lru_cache(maxsize=4096)
def stage_bytes(
    shape: ModelShape,
    stages: tuple[int, ...],
    stage: int,
    training: Training,
    factor: float = 1.0,
) -> StageBytes:
    """Return the bytes of a stage per token of a chunk. `factor`: ratio of a graph's measured bytes
    to its counted bytes, from a calibration.

    Graphs are those of transformers' modules with chunk attention. Logits exist for one tile at a
    time: in compute dtype and in float32, each with its gradient, and as a log-softmax.
    """
    element = training.compute_bytes
    first = sum(stages[:stage])
    own = shape.layers[first : first + stages[stage]]
    lora, numbers = training.lora, range(first, first + len(own))
    adapters = [0 if lora is None else lora.saves(shape, n) for n in numbers]
    # each adapter saves the activation between its two matrices
    between = [lora.rank * len(lora.adapted(shape)[n]) if lora else 0 for n in numbers]
    is_last = stage == len(stages) - 1
    hidden = element * shape.hidden_size
    wide = max(element, _FLOAT32)
    lse = wide * shape.num_heads  # a log-sum-exp is float32 at least, whatever the dtype
    widest = max((layer.width for layer in own), default=0)
    scans = [layer.scan_saved[element > 2] * max(1, element // 4) / element for layer in own]
    states = [layer.state_bytes(element) for layer in own]
    at_work = max(3 * widest, 2 * shape.q_size + 2 * shape.kv_size, *(n / 2 for n in scans))
    makes_one = is_last and (lora is None or lora.head or lora.new_tokens > 0)
    logit = 3 * wide + (2 * element if element < _FLOAT32 else 0)
    unpacked = [
        min(shape.hidden_size * max(each.width, each.query_size), each.linear_parameters)
        for each in own
    ]
    return StageBytes(
        graph_layers=tuple(
            factor * (of_dtype(each.saved, element, column) + element * rank)
            for each, column, rank in zip(own, adapters, between, strict=True)
        ),
        attention_layers=tuple(
            element * layer.output_size + lse if layer.attends else 0.0 for layer in own
        ),
        working=3 * hidden + element * at_work,
        unpacked=0.0 if training.packed_bytes is None else element * max(unpacked, default=0),
        exchange=element * (2 * shape.q_size + 2 * shape.kv_size),
        message=hidden,
        kv_layer=shape.stored_size * element,
        kv_gradient_layer=shape.stored_size * training.kv_gradient_bytes,
        state=sum(states),
        largest_state=max(states),
        widest_saved=max(element * max(widest, shape.q_size), wide * shape.hidden_size),
        ends=factor * of_dtype(shape.final_saved, element, adapters[-1]) if is_last else hidden,
        logit=logit if is_last else 0.0,
        head_gradient=shape.embedding_parameters * element if makes_one else 0.0,
    )


MAPPED_BYTES, SMALL_MAPPED_BYTES = 2**21, 2**17
"""Sizes in bytes from which freed heap blocks are returned to the system, the smaller one in plans
that offload or with adapters (`runtime.profile.ProcessHeap`); returning costs page faults."""
SPARE_BYTES = 2**22
"""Free bytes of smaller blocks that the heap may keep at the end of an action."""
_SPARE = 0.1
"""Share of a layer's graph that the heap may keep as well, if small blocks are returned, too."""
_STAGING_BYTES, _NUM_LARGEST = 2**25, 5


def tile_tokens(vocab_size: int, device_type: str) -> int:
    """Return the number of tokens per tile of the loss, such that a tile's logits are small beside
    activations.

    On a CPU the number is 128 to 256: smaller tiles are slower, larger ones take more memory and
    are hardly faster. Measured on one thread in float32 with D 896 and a trained head: milliseconds
    per token and MiB of peak above the start (about three times the tile's logits, and the V x D
    gradient that autograd allocates per tile):

        tokens             64           128           256          1,024
        V 4,096     0.32   58    0.31   51    0.26   59    0.25   90
        V 32,000     3.3  191     2.5  258     2.5  367     2.1  387
        V 151,936   16.7  561    13.5  600    12.8  668
    """
    if device_type == "cpu":
        return min(max(2**22 // vocab_size, 128), 256)
    return max(2**27 // vocab_size, 64)


@dataclass(frozen=True)
class PlanMemory:
    """Memory model for plans of one model, on devices with a budget."""

    shape: ModelShape
    training: Training
    device_budget_bytes: int
    activation_factor: float = 1.0
    """Measured bytes of a graph over counted ones."""
    overhead_bytes: int = 0
    """Fixed bytes of frameworks and temporary weights, counted as buffers all through a step."""
    heap_blocks: float = 0.0
    """Number of freed blocks of the largest size that the C library's heap keeps; 0 if not
    measured, and on a GPU."""
    heap_share: float = 0.0
    """Bytes that the heap keeps in gaps between saved tensors, as a share of one layer of the
    largest graph."""
    device_type: str = "cuda"
    """cuda or cpu: decides the sizes of segments of the store and of tiles of the loss."""

    def cell(self, stages: tuple[int, ...], stage: int) -> StageBytes:
        """Return the bytes of one stage per token of a chunk."""
        return stage_bytes(self.shape, stages, stage, self.training, self.activation_factor)

    def loss_bytes(self, cell: StageBytes, num_tokens: float, *, backward: bool) -> float:
        """Return the peak bytes of the loss at the last stage; 0 at other stages. The peak is that
        of one tile's logits. In a `backward` the gradients of logits and head may be larger; then
        their bytes are returned."""
        tile = min(num_tokens, tile_tokens(self.shape.vocab_size, self.device_type))
        num_logits = self.shape.vocab_size * tile if cell.logit else 0.0
        gradient = max(self.training.compute_bytes, _FLOAT32) * num_logits + cell.head_gradient
        return max(cell.logit * num_logits, gradient if backward else 0.0)

    def heap_bytes(self, plan: ChunkPlan, rank: int) -> int:
        """Return the bytes that a C library's heap keeps all through a step: bytes of freed tensors
        that it does not return to the system. The simulation counts them as buffers. Return 0 if
        the device's allocator has no such heap."""
        if not self.heap_blocks and not self.heap_share:
            return 0
        shape, training = self.shape, self.training
        # one expert's width: experts of a token have tensors of their own
        widest = max(
            shape.hidden_size, shape.q_size, *(n.width // n.num_active for n in shape.layers)
        )
        blocks, graphs = [0.0], [0.0]  # bytes of the largest blocks; of one layer's graph
        for action, what in zip(plan.actions[rank], passes(plan, rank), strict=True):
            if isinstance(action, (Forward, Recompute)):
                tokens = plan.chunks[action.chunk].num_tokens / plan.sp_size
                blocks.append(tokens * widest * training.compute_bytes)
                block_bytes = tokens * shape.hidden_size * training.compute_bytes
                if what.computes == "graph" and block_bytes < MAPPED_BYTES:  # others are returned
                    cell = stage_bytes(shape, plan.stages, action.stage, training)
                    graph = tokens * cell.graph(what.recompute_layers)
                    graphs.append(graph / plan.stages[action.stage])
            elif isinstance(action, Backward) and training.lora is None:
                # gradient of a matrix; those of embedding and head are allocated whole
                is_end = action.stage in (0, len(plan.stages) - 1)
                columns = max(widest, shape.vocab_size) if is_end else widest
                blocks.append(shape.hidden_size * columns * training.gradient_bytes)
        # larger blocks than these are returned when freed
        held = self.heap_blocks * min(max(blocks), MAPPED_BYTES) + self.heap_share * max(graphs)
        # plans that offload or have adapters return small ones, too
        if self.heap_share and (plan.offload != ON_DEVICE or training.lora is not None):
            held = min(held, _SPARE * max(graphs) + SPARE_BYTES)
        return round(held)

    def peak_bytes_of_actions(self, plan: ChunkPlan, rank: int) -> Sequence[int]:
        """Return the peak device bytes during each action of the rank."""
        return self.curve(plan, rank).device_bytes

    def curve(self, plan: ChunkPlan, rank: int) -> MemoryCurve:
        """Return the bytes in each memory during each action of the rank, and its copies to and
        from offload targets. The curve is cached on the immutable plan, with read-only arrays."""
        known: dict[tuple[PlanMemory, int], MemoryCurve] = vars(plan).setdefault("_curves", {})
        if (self, rank) not in known:
            made = known[self, rank] = self._walked(plan, rank)
            # all callers share the cached arrays
            for array in (made.device, made.cpu, made.disk):
                array.setflags(write=False)
        return known[self, rank]

    def _walked(self, plan: ChunkPlan, rank: int) -> MemoryCurve:
        # only for the rank's chunks: a plan may have a thousand ranks
        own = dict.fromkeys(a.chunk for a in plan.actions[rank] if isinstance(a, Forward))
        # loads depend on chunks alone: plans with other actions share them
        of_shapes: dict[ModelShape, Any] = vars(plan).setdefault("_loads", {})
        known: dict[int, list[list[float]]] = of_shapes.setdefault(self.shape, {})
        for i in own.keys() - known.keys():
            known[i] = _loads(plan.chunks[i], plan.sp_size, self.shape)
        loads = {i: known[i] for i in own}
        processes = _unlike(plan, loads)
        curves = [_RankMemory(self, plan, rank, process, loads).run() for process in processes]
        if len(curves) == 1:
            return curves[0]
        worst = np.stack([curve.device.sum(axis=1) for curve in curves]).argmax(axis=0)
        device = np.stack([curve.device for curve in curves])[worst, np.arange(len(worst))]
        cpu = np.stack([curve.cpu for curve in curves]).max(axis=0)
        disk = np.stack([curve.disk for curve in curves]).max(axis=0)
        most = max((c.traffic for c in curves), key=lambda t: float((t.read + t.written).sum()))
        return MemoryCurve(device, cpu, disk, most, curves[0].late)


def _loads(chunk: Chunk, sp_size: int, shape: ModelShape) -> list[list[float]]:
    """Return three lists of token counts of a chunk. Each list has one entry for each of `sp_size`
    processes:

    1. tokens that the process holds;
    2. tokens whose K,V the process gathers from other processes, and whose gradients it sends back;
    3. tokens that the process holds and exchanges in all-to-alls.
    """
    is_shared = all(piece.place.size == sp_size for piece in chunk.slices)
    count = 1 if is_shared else sp_size  # if all have equal loads, one process represents them
    own, gathered, travelling = ([0.0] * count for _ in range(3))
    for piece in chunk.slices:
        place, share = piece.place, piece.num_tokens * (1 / piece.place.size)
        others = gathered_tokens(piece, place.first, shape) if place.size > 1 else 0.0
        for process in range(place.first, min(place.stop, place.first + count)):
            own[process] += share
            if place.size > 1:
                gathered[process] += others
                travelling[process] += share
    rows = [[1.0] * count if chunk.is_dummy else own, gathered, travelling]
    return [row * (sp_size // count) for row in rows]


def _unlike(plan: ChunkPlan, loads: Mapping[int, list[list[float]]]) -> list[int]:
    """Return the processes of the rank that must be simulated. Processes that have equal `loads`
    and equal shares of each cut sequence need equal memory: only one of them is returned."""
    if plan.sizes_of_places == (plan.sp_size,):  # all processes share each slice equally
        return [0]
    rows = [row for of_chunk in loads.values() for row in of_chunk]
    for piece in (piece for chunk in loads for piece in plan.chunks[chunk].slices):
        if piece.seq_id in plan.groups:
            rows.append([token_share(piece, process) for process in range(plan.sp_size)])
    processes: list[int] = np.unique(rows, axis=1, return_index=True)[1].tolist() if rows else [0]
    return processes


class _RankMemory:
    """The memory simulation of one process of a plan's rank, action by action."""

    def __init__(
        self,
        memory: PlanMemory,
        plan: ChunkPlan,
        rank: int,
        process: int,
        loads: Mapping[int, list[list[float]]],
    ) -> None:
        """Prepare the simulation of the process with the index `process` in the rank.

        `loads`: chunk of the rank -> numbers of tokens on each process (see `_loads`).
        """
        self._memory, self._plan, self._rank, self._process = memory, plan, rank, process
        self._actions = plan.actions[rank]
        self._kv_frees, self._input_frees = kv_frees(plan, rank), input_frees(plan, rank)
        self._cells = [memory.cell(plan.stages, stage) for stage in range(len(plan.stages))]
        self._held_stages = plan.held[rank]
        trained = {a.chunk for a in self._actions if isinstance(a, Backward) and a.stage == 0}
        self._last_use = {
            action.chunk: index
            for index, action in enumerate(self._actions)
            if isinstance(action, (Forward, RebuildKV)) and action.chunk not in trained
            if action.stage == 0
        }
        """chunk without a Backward -> index of the last action that reads its token ids."""
        self._tokens, self._gathered, self._exchanged = (
            {i: load[of][process] for i, load in loads.items()} for of in range(3)
        )
        self._device = dict.fromkeys(PARTS, 0.0)
        self._lower = dict.fromkeys(TARGETS, 0.0)
        self._passing = dict.fromkeys(PARTS, 0.0)
        """Bytes on the device during the current action only."""
        self._held: dict[tuple[str, int, int], tuple[OffloadTarget, MemoryPart, float]] = {}
        """(name in `_HELD`, chunk, stage) -> target, part and bytes."""
        self._offload: dict[str, OffloadTarget] = {
            k: target_of(plan.offload, k) for k in TENSOR_KINDS
        }
        self._columns = {k: i for i, k in enumerate(TENSOR_KINDS) if self._offload[k] != "none"}
        self._moved = [[0.0] * len(TENSOR_KINDS) for _ in range(4)]
        """Bytes read, bytes written, reads and writes of the current action, by kind."""
        self._largest = 0.0
        """Bytes of the largest tensor offloaded to the CPU."""
        self._stored: dict[tuple[int, int], tuple[StoredLayers, ...]] = {}
        self._num_backwards = Counter(a.stage for a in self._actions if isinstance(a, Backward))
        """Stage -> number of its Backwards, removed by the first, which makes the gradients."""
        self._made = 0.0
        """Bytes of gradients that the current action makes and that stay, without the head's."""
        self._late: dict[int, tuple[float, float, float, float]] = {}
        self._whole: dict[int, int] = {}
        """Stage -> bytes of its whole weights, if the plan frees and gathers them."""
        self._unreduced: dict[int, float] = defaultdict(float)
        """Stage -> bytes of gradients that its Reduce frees."""

    def run(self) -> MemoryCurve:
        """Simulate all actions of the rank and return their memory curve."""
        self._start()
        count, staged_in = len(self._actions), self._offload["kv"] == "cpu"
        used: list[list[float]] = []
        lower: list[list[float]] = []
        staged, moved = np.zeros(count), np.zeros((count, 4, len(TENSOR_KINDS)))
        computed, nothing = passes(self._plan, self._rank), dict.fromkeys(PARTS, 0.0)
        for i, (action, what) in enumerate(zip(self._actions, computed, strict=True)):
            self._index = i
            self._begin(action, what)
            # read before `_end`: the action still needs what it frees
            lower.append([*self._lower.values()])
            if type(action) in COMPUTING:  # others have no temporary tensors
                used.append([*map(add, self._device.values(), self._passing.values())])
                if staged_in:
                    staged[i] = self._passing["kv"] + self._passing["kv_gradients"]
                if self._columns:
                    moved[i], self._moved = (
                        self._moved,
                        [[0.0] * len(TENSOR_KINDS) for _ in range(4)],
                    )
                self._passing = nothing.copy()
            else:
                used.append([*self._device.values()])
            self._end(action, i)
        device = np.array(used).reshape(count, len(PARTS))
        if self._largest and self._memory.device_type != "cpu":
            # staging buffers, sized as in `kv.pools`, which include blocks of K,V in transit; a CPU
            # needs none, as it computes on CPU memory
            staging = max(_STAGING_BYTES, _NUM_LARGEST * self._largest)
            device[:, PARTS.index("buffers")] += np.maximum(0, staging - staged)
        cpu, disk = np.rint(lower).astype(np.int64).reshape(count, 2).T
        traffic = PlanTraffic(self._plan.offload, *moved.swapaxes(0, 1))
        return MemoryCurve(np.rint(device).astype(np.int64), cpu, disk, traffic, self._late)

    def add(self, part: MemoryPart, num_bytes: float, target: OffloadTarget = "none") -> None:
        """Add bytes that outlive the current action to a part of memory; negative: free them."""
        if target == "none":
            self._device[part] += num_bytes
        else:
            self._lower[target] += num_bytes

    def read(self, kind: TensorKind, num_bytes: float, operations: int = 1) -> None:
        """Count a copy of `num_bytes` to the device, divided into `operations` separate copies. Do
        nothing if tensors of `kind` are not offloaded."""
        if (column := self._columns.get(kind)) is not None:
            self._moved[0][column] += num_bytes
            self._moved[2][column] += operations

    def write(
        self, kind: TensorKind, num_bytes: float, operations: int = 1, largest: float | None = None
    ) -> None:
        """Count a copy of `num_bytes` from the device, divided into `operations` separate copies.
        Do nothing if tensors of `kind` are not offloaded. `largest`: bytes of the largest of the
        copies, if their sizes differ."""
        if (column := self._columns.get(kind)) is not None:
            self._moved[1][column] += num_bytes
            self._moved[3][column] += operations
            if operations and self._offload[kind] == "cpu":
                size = num_bytes / operations if largest is None else largest
                self._largest = max(self._largest, size)

    def _hold(
        self, name: str, chunk: int, stage: int, num_bytes: float, part: MemoryPart | None = None
    ) -> None:
        """Allocate `num_bytes` for tensors of a chunk at a stage. `name` is a key of `_HELD`, which
        names the kind of tensor and its part of memory. If the plan offloads this kind, the bytes
        are added to the offload target, else to `part` (None: as in `_HELD`) on the device."""
        key, (usual, kind) = (name, chunk, stage), _HELD[name]
        assert key not in self._held, f"{name} of {chunk}.{stage} is there"
        target, part = self._offload[kind] if kind else "none", part or usual
        self._held[key] = target, part, num_bytes
        self.add(part, num_bytes, target)

    def _let_go(self, name: str, chunk: int, stage: int) -> float:
        """Free the tensors that `_hold` allocated and return their bytes; 0 if there are none."""
        if (found := self._held.pop((name, chunk, stage), None)) is None:
            return 0.0
        target, part, num_bytes = found
        self.add(part, -num_bytes, target)
        return num_bytes

    def _start(self) -> None:
        """Allocate what is in memory before the first action and stays: weights, optimizer,
        buffers."""
        plan, memory = self._plan, self._memory
        shape, training = memory.shape, memory.training
        held = self._held_stages
        alike = len(plan.holders[held[0]]) if held else 1  # ranks that hold the same stages
        group = alike * plan.sp_size * training.replicas
        self._weights = own = training.weights(shape, plan.stages, frozenset(held), group)
        if own.divides and plan.reshards:
            self._whole = {stage: own.whole_bytes(stage) for stage in held}
        # whole weights come with the Unshards
        self.add("weights", own.state.weights - sum(self._whole.values()))
        self.add("weights", own.host_bytes * own.is_away, "cpu")
        self.add("optimizer", own.state.optimizer)
        heap = memory.heap_bytes(plan, self._rank)
        waits = any(count > 1 for count in self._num_backwards.values())
        at_once = 1 in self._num_backwards.values()
        # with several stages the reduction's buffer stays, and layers gather into another one
        reuses = waits and not heap and len(held) == 1
        collective = own.collective_bytes(reuses=reuses, at_once=at_once, regathers=plan.reshards)
        self.add("buffers", memory.overhead_bytes + heap + collective + self._under_way())
        if not any(isinstance(action, Unshard) for action in self._actions):
            self.add("buffers", own.gathered_bytes)

    def _under_way(self) -> float:
        """Return the bytes of messages in transit, except the current action's message. From each
        neighbour one message is being received ahead of its action. Messages to a neighbour wait
        until it receives them: two gradients, or activations of one chunk more than there are later
        stages."""
        most: dict[tuple[type[Action], int], float] = {}
        for action in self._actions:
            if isinstance(action, (Send, Recv)):
                ahead = 1 if isinstance(action, Recv) else 2
                if isinstance(action, Send) and action.payload == "activation":
                    ahead = len(self._plan.stages) - action.stage
                message = self._tokens[action.chunk] * self._cells[action.stage].message
                key = type(action), action.peer
                most[key] = max(most.get(key, 0.0), ahead * message)
        return sum(most.values())

    def _begin(self, action: Action, what: Pass) -> None:
        """Allocate the tensors that `action` makes: those that outlive it, and those that exist
        only while it runs. `what`: the pass of a computing action."""
        if isinstance(action, COMPUTING):
            if isinstance(action, Forward):
                self._deliver(action.chunk, action.stage)
            if what.computes != "nothing":
                self._compute(action, what)
            if what.loss:
                self._lose(action, backward=what.computes == "backward")
            return
        match action:
            case Recv(payload, chunk, stage):
                message = self._tokens[chunk] * self._cells[stage].message
                arrives = payload == "activation"
                part: MemoryPart = "activations" if arrives else "buffers"
                # a gradient is named by the input that it belongs to
                self._hold("inputs", chunk, stage + arrives, message, part)
            case Unshard(stage) if stage in self._whole:
                self.add("weights", self._whole[stage])
            case Unshard(stage) if self._memory.training.regathers:
                training, shape = self._memory.training, self._memory.shape
                own = training.weights(shape, self._plan.stages, frozenset((stage,)))
                self.add("weights", own.floats * training.compute_bytes)

    def _deliver(self, chunk: int, stage: int) -> None:
        """Allocate a chunk's input of `stage`, if no earlier action has done so, and the stage's
        output for this chunk, which is the input of the next stage."""
        tokens, cell = self._tokens[chunk], self._cells[stage]
        message = tokens * cell.message
        if stage == 0:
            self._hold("ids", chunk, 0, tokens * TOKEN_BYTES)
        elif ("inputs", chunk, stage) not in self._held:
            self._hold("inputs", chunk, stage, message)
        if stage < len(self._plan.stages) - 1:
            # output for another rank waits in a buffer
            part: MemoryPart = "activations" if stage + 1 in self._held_stages else "buffers"
            self._hold("inputs", chunk, stage + 1, message, part)
            self.write("inputs", message)
            if self._offload["inputs"] != "none":
                self._passing["buffers"] += message

    def _compute(self, action: Forward | Recompute | RebuildKV | Backward, what: Pass) -> None:
        chunk, stage, passing = action.chunk, action.stage, self._passing
        tokens, cell, height = self._tokens[chunk], self._cells[stage], self._plan.stages[stage]
        gathered = self._gathered[chunk] * cell.kv_layer
        exchanged = self._exchanged[chunk] * cell.exchange
        passing["buffers"] += tokens * cell.working + cell.unpacked + gathered + exchanged
        if what.writes_kv:
            for piece, stored in self._pieces(chunk, stage):
                stored.write(self, piece)
            self._write_states(chunk, stage)
        if what.computes == "backward":
            again = range(what.remembered, what.recompute_layers)
            self._stream_kv(chunk, stage, range(height), again)
            self._backward(chunk, stage, recomputes=what.recompute_layers > 0)
            # the embedding's gradient is accumulated when the graph has been freed
            added = -sum(passing.values()) - self._graph_bytes(chunk, stage)
            added += self._weights.ends_trained[0] * self._memory.training.compute_bytes
            if num_backwards := self._num_backwards.pop(stage, 0):
                moments = self._make_gradients(chunk, stage, what.recompute_layers, num_backwards)
                self._late[self._index] = *moments, self._made, added
            elif not stage:
                passing["buffers"] += max(0.0, added)
                self._late[self._index] = 0.0, 0.0, 0.0, added
            return
        if entering := cell.state and cell.state * len(list(self._entering(chunk, stage))):
            self.read("kv", entering)
            passing["states"] += entering  # the cell works on copies
        passing["states"] += self._arriving(chunk, stage) and 2 * cell.largest_state  # messages
        # a pass to the last K,V ends before the last layer's attention
        layers = range(what.remembered, height - (what.computes == "to last kv"))
        if layers:
            self._stream_kv(chunk, stage, layers)
        if stage:
            self.read("inputs", tokens * cell.message)
        remembered = tokens * cell.attention(range(what.remembered))
        # two tensors per layer: attention output and log-sum-exp
        self.read("attention", remembered, 2 * what.remembered)
        if what.computes == "graph":
            assert isinstance(action, (Forward, Recompute))
            self._graph(action, what)
        else:
            if stage and self._offload["inputs"] != "none":
                passing["activations"] += tokens * cell.message
            if self._offload["attention"] != "none" and (what.remembers or what.remembered):
                passing["activations"] += tokens * cell.widest_attention
        if remembers := tokens * cell.attention(range(what.remembers)):
            self.write("attention", remembers, 2 * what.remembers, tokens * cell.widest_attention)
            self._hold("attention", chunk, stage, remembers)

    def _lose(self, action: Forward | Recompute | RebuildKV | Backward, *, backward: bool) -> None:
        """Add the bytes of head and loss to those of the action. Head and loss do not run at the
        same time as layers: the action's peak is that of head and loss or that of the layers,
        whichever is larger. Only if each pass gathers weights are both peaks added, since the last
        layer is then gathered at the same time."""
        tokens, cell = self._tokens[action.chunk], self._cells[action.stage]
        loss = self._memory.loss_bytes(cell, tokens, backward=backward)
        hidden = tokens * cell.message  # the final hidden states, or their gradient
        layer = sum(self._passing[part] for part in _OF_A_LAYER)
        if self._plan.regathers and not self._plan.replicated:
            self._passing["logits"] += loss  # the last layer is gathered at the same time
        elif loss + hidden > layer:
            self._passing |= dict.fromkeys(_OF_A_LAYER, 0.0) | {"logits": loss, "buffers": hidden}

    def _graph(self, action: Forward | Recompute, what: Pass) -> None:
        chunk, stage = action.chunk, action.stage
        tokens, cell, height = self._tokens[chunk], self._cells[stage], self._plan.stages[stage]
        gathered = self._gathered[chunk] * cell.kv_layer
        num_bytes = tokens * cell.graph(what.recompute_layers)
        # each layer's graph also saves the K,V that it has gathered
        num_bytes += gathered * (height - what.recompute_layers)
        num_bytes += self._arriving(chunk, stage)
        if isinstance(action, Forward):
            self._hold("graphs", chunk, stage, num_bytes)
            self.write("graphs", num_bytes, height, tokens * cell.widest_saved)
            if self._offload["graphs"] != "none":
                self._passing["activations"] += tokens * max(cell.graph_layers) + gathered
        else:
            if self._offload["attention"] == "none":
                # the graph reuses the saved attention outputs without a copy
                num_bytes -= tokens * cell.attention(range(what.remembered))
            self._hold("graph again", chunk, stage, num_bytes)
        if stage and self._offload["inputs"] != "none":
            self._hold("leaf", chunk, stage, tokens * cell.message)

    def _backward(self, chunk: int, stage: int, *, recomputes: bool) -> None:
        tokens, cell, passing = self._tokens[chunk], self._cells[stage], self._passing
        message = tokens * cell.message
        self._send_kv_back(chunk, stage)
        for before in self._entering(chunk, stage):
            if before in self._plan.trained:  # others have no Backward to use the gradient
                # other sequences of that chunk may have sent theirs
                others = self._let_go("state gradients", before, stage)
                self._hold("state gradients", before, stage, others + cell.state)
        passing["buffers"] += message  # the gradient of the output
        graph = self._held.get(("graphs", chunk, stage))
        if graph is not None:
            self.read("graphs", graph[2], self._plan.stages[stage])
        # one layer's graph at a time is made again or read back
        if recomputes or (graph is not None and self._offload["graphs"] != "none"):
            gathered = self._gathered[chunk] * cell.kv_layer
            passing["activations"] += tokens * max(cell.graph_layers) + gathered
        if stage < len(self._plan.stages) - 1:
            self.read("inputs", message)
        if stage > self._plan.frozen_stages:
            self.write("inputs", message)
            if ("inputs", chunk, stage) in self._held:
                # autograd's gradient, until it is copied over the input
                passing["buffers"] += message
            else:
                self._hold("inputs", chunk, stage, message, "buffers")

    def _make_gradients(
        self, chunk: int, stage: int, again: int, num_backwards: int
    ) -> tuple[float, float]:
        """Allocate the gradients of a stage's first Backward: the head's while the whole graph is
        in memory, those of layers as the graph is freed. `again`: number of checkpointed layers.

        Return two changes in the bytes in memory since the Backward's start, when the whole graph
        is in memory: first by the time when all layers have gradients, then by the time when the
        embedding has its gradient, too.
        """
        gradients = self._weights.gradients(stage, num_backwards)
        for key, whole in self._weights.freed_gradients(stage, gradients):
            self._unreduced[key] += whole
        self.add("gradients", gradients[-1])
        self._made = sum(gradients[:-1])
        graph_bytes = self._graph_bytes(chunk, stage)
        moments = first_backward(self._cells[stage], again, graph_bytes, gradients)
        # gradients grow while the graph shrinks: the peak may be at any moment
        made, gone = max(moments, key=lambda moment: moment[0] - moment[1])
        self._passing["gradients"] += made
        self._passing["activations"] -= gone
        late, end = (made - gone for made, gone in moments[-2:])
        return late, end

    def _graph_bytes(self, chunk: int, stage: int) -> float:
        """Return the bytes on the device of the graph of a chunk at a stage."""
        held = [self._held.get((name, chunk, stage)) for name in ("graphs", "graph again")]
        return sum(own[2] for own in held if own is not None and own[0] == "none")

    def _end(self, action: Action, index: int) -> None:
        """Free the tensors that no action after this one uses."""
        for chunk, stage in self._input_frees[index]:
            num_bytes = self._let_go("inputs", chunk, stage)
            if ("graphs", chunk, stage) in self._held and self._offload["inputs"] == "none":
                # no pass reads it again, but it is the leaf of a graph
                self._hold("leaf", chunk, stage, num_bytes)
        for chunk, stage in self._kv_frees[index]:
            for piece, stored in self._pieces(chunk, stage):
                stored.free(self, piece)
            self._let_go("states", chunk, stage)
            self._let_go("state gradients", chunk, stage)
        match action:
            case Backward(chunk, stage):
                for name in ("graphs", "graph again", "attention", "ids", "leaf"):
                    self._let_go(name, chunk, stage)
                if self._made:
                    self.add("gradients", self._made)
                    self._made = 0.0
                self._let_go("inputs", chunk, stage + 1)  # by now the gradient of the output
                # the input's memory holds its gradient now, for the stage before
                gradient = self._let_go("inputs", chunk, stage)
                if gradient and stage > self._plan.frozen_stages:
                    self._hold("inputs", chunk, stage, gradient, "buffers")
            case Forward(chunk, 0) | RebuildKV(chunk, 0) if index == self._last_use.get(chunk):
                self._let_go("ids", chunk, 0)
            case Send(payload, chunk, stage):
                self._let_go("inputs", chunk, stage + (payload == "activation"))
            case Reshard(stage) if stage in self._whole:
                self.add("weights", -self._whole[stage])
            case Reduce(stage) if stage in self._unreduced:
                self.add("gradients", -self._unreduced.pop(stage))

    def _write_states(self, chunk: int, stage: int) -> None:
        """Allocate the recurrent states that a chunk leaves to later chunks, and count the copies
        that offload them. Do nothing if an earlier pass has allocated them."""
        cell = self._cells[stage]
        leaving = cell.state * sum(
            self._plan.is_read(*link) for link in self._recurrent(chunk, stage)
        )
        if leaving and ("states", chunk, stage) not in self._held:
            self._hold("states", chunk, stage, leaving)
            self.write("kv", leaving, largest=cell.largest_state)

    def _entering(self, chunk: int, stage: int) -> Iterator[int]:
        """Yield the index of an earlier chunk for each recurrent state that enters `chunk`: the
        state was computed at the end of this earlier chunk."""
        for seq_id, position in self._recurrent(chunk, stage):
            if position:
                yield self._plan.groups[seq_id][position - 1]

    def _arriving(self, chunk: int, stage: int) -> int:
        """Return the bytes of the recurrent states that other processes of a sequence-parallel
        group send in a pass of a chunk: the graph holds those of one slice."""
        slices = self._plan.chunks[chunk].slices
        is_shared = any(s.place.size > 1 and token_share(s, self._process) for s in slices)
        return self._cells[stage].state if is_shared else 0

    def _recurrent(self, chunk: int, stage: int) -> Iterator[tuple[int, int]]:
        """Yield (seq_id, index of the chunk among the sequence's chunks) of each cut sequence in a
        chunk on this process; yield nothing if the stage has no recurrent layers."""
        if not self._cells[stage].state:
            return
        slices = self._plan.chunks[chunk].slices
        here = {s.seq_id for s in slices if token_share(s, self._process)}
        for seq_id, position in self._plan.links[chunk]:
            if seq_id in here:
                yield seq_id, position

    def _stream_kv(self, chunk: int, stage: int, *layers: range) -> None:
        """Count the copies of offloaded K,V to the device for attention in `layers` of the stage,
        and the device memory of two blocks: one in use, one being loaded. Do nothing if K,V are not
        offloaded."""
        if self._offload["kv"] == "none":
            return
        most = 0.0
        for piece, stored in self._pieces(chunk, stage):
            if seen := stored.seen(piece):
                stored.read(self, piece, *layers)
                arriving = sum([stored.sizes[i] for i in seen[:_NUM_BUFFERS]])
                most = max(most, arriving * stored.kv_token_bytes)
        self._passing["kv"] += most

    def _send_kv_back(self, chunk: int, stage: int) -> None:
        """Add the gradients that a Backward computes for stored K,V of earlier chunks. If K,V are
        offloaded, count the copies of these gradients, and buffers on the device through which the
        gradients of all but the newest segments (ranges of tokens) pass."""
        most = 0.0
        for piece, stored in self._pieces(chunk, stage):
            stored.send_back(self, piece)
            if not stored.on_device:
                old = stored.seen(piece)[:-NUM_HOT][-_NUM_BUFFERS:]
                most = max(most, sum(stored.sizes[i] for i in old) * stored.gradient_token_bytes)
        self._passing["kv_gradients"] += most

    def _pieces(self, chunk: int, stage: int) -> Iterator[tuple[int, StoredLayers]]:
        """Yield pairs (piece, `StoredLayers`): one for each cut sequence in a chunk and each
        attention window of the stage. `piece` is the index of the chunk among the chunks of the
        sequence."""
        for seq_id, piece in self._plan.links[chunk]:
            if (seq_id, stage) not in self._stored:
                self._stored[seq_id, stage] = self._store(seq_id, stage)
            for stored in self._stored[seq_id, stage]:
                yield piece, stored

    def _store(self, seq_id: int, stage: int) -> tuple[StoredLayers, ...]:
        """Return the stored K,V of a cut sequence, one `StoredLayers` per attention window of the
        stage. The tuple is empty if this process holds no tokens of the sequence."""
        plan, shape, cell = self._plan, self._memory.shape, self._cells[stage]
        # later chunks of a sampled plan may have no Forward
        group = plan.groups[seq_id][: plan.num_computed[seq_id]]
        first_piece = next(s for s in plan.chunks[group[0]].slices if s.seq_id == seq_id)
        if not token_share(first_piece, self._process):
            return ()
        share, first = shape.kv_share(first_piece.place.size), sum(plan.stages[:stage])
        kv, gradients = cell.kv_layer * share, cell.kv_gradient_layer * share
        num_tokens = segment_tokens(kv, self._memory.device_type, self._offload["kv"] != "none")
        layers: dict[int | None, list[int]] = {}
        for i, layer in enumerate(shape.layers[first : first + plan.stages[stage]]):
            if layer.attends:
                layers.setdefault(layer.window, []).append(i)
        found = []
        for window, own in layers.items():
            lens, tree = plan.piece_lens[seq_id], plan.trees.get(seq_id)
            tokens = StoredTokens.of(lens, window, num_tokens, tree)
            if plan.sampled:
                drawn = (i for i, c in enumerate(group) if c in plan.trained)
                tokens = tokens.with_gradients_of(drawn)
            found.append(StoredLayers(tokens, window, tuple(own), kv, gradients, plan.offload.kv))
        return tuple(found)


def first_backward(
    cell: StageBytes, again: int, graph_bytes: float, gradients: Sequence[float]
) -> list[tuple[float, float]]:
    """Return pairs (bytes of gradients made so far, bytes of the graph freed so far) for the
    moments of a stage's first Backward. The first pair is for its start. Then come one pair before
    each layer's backward, one after all layers, and one once the embedding's gradient is made.

    `again`: number of leading layers that are checkpointed; `graph_bytes`: bytes of the whole graph
    on the device; `gradients`: see `RankWeights.gradients`.
    """
    front, *layers, _ = gradients
    height = len(layers)
    graph = [cell.ends, *reversed(cell.graph_layers[again:]), *[cell.message] * again]
    # gathered K,V, which `graph` lacks, are freed in proportion
    share = graph_bytes / sum(graph) if graph_bytes else 0.0
    gone = [share * n for n in accumulate(graph)]
    made = [0.0, *accumulate(reversed(layers))]
    moments = [(0.0, 0.0), *zip(made[:height], gone, strict=False)]
    return [*moments, (made[-1], gone[-2]), (made[-1] + front, gone[-1])]


def token_share(piece: Slice, process: int) -> float:
    """Return the share of a slice's tokens that a process (its index in the rank) holds."""
    place = piece.place
    return 1 / place.size if place.first <= process < place.stop else 0.0


def gathered_tokens(piece: Slice, process: int, shape: ModelShape) -> float:
    """Return the number of tokens whose K,V a process gathers from the rest of the slice's
    sequence-parallel group, times the process's share of K,V heads; 0 if the heads are divided
    over all processes of the group."""
    share = token_share(piece, process)
    return piece.num_tokens * (shape.kv_share(piece.place.size) - share) if share else 0.0


_NUM_BUFFERS = 2


class StoredLayers:
    """Stored K,V and their gradients of one sequence that is cut into chunks, on one process, for
    the layers of a stage with one attention window.

    A piece is the part of the sequence in one chunk. A segment is a range of tokens whose K,V are
    stored together (`plan.segments`). Its K,V are allocated when its first piece is stored, its
    gradients when the first backward sends any to it. K,V and gradients are freed with the
    segment's last piece.

    If K,V are offloaded, a segment is copied to its target once all of its pieces are stored. Each
    later pass whose attention sees any of the segment reads it. The newest NUM_HOT segments of a
    prefix keep their gradients on the device. For each other segment of the prefix, a backward
    reads the gradients that earlier backwards have sent, if any, and writes the sums. It also reads
    the gradients of its own chunk's K,V, if they are off the device.
    """

    def __init__(
        self,
        tokens: StoredTokens,
        window: int | None,
        layers: tuple[int, ...],
        kv_token_bytes: float,
        gradient_token_bytes: float,
        target: OffloadTarget,
    ) -> None:
        """`layers`: indices of layers within the stage. `..._token_bytes`: bytes in one layer."""
        self.layers, self._tokens, self._window, self._target = layers, tokens, window, target
        self.kv_token_bytes, self.gradient_token_bytes = kv_token_bytes, gradient_token_bytes
        self.on_device, self._num_layers = target == "none", len(layers)
        self.sizes = tuple(stop - start for start, stop in pairwise(tokens.bounds))
        """Tokens of each segment."""
        self._touched = [tokens.segments(tokens.of_piece(p)) for p in range(len(tokens.lens))]
        """[piece] -> segments that hold its tokens."""
        self._num_pieces = Counter(i for touched in self._touched for i in touched)
        """Segment -> number of its pieces."""
        self._kv = [len(layers) * kv_token_bytes * n for n in self.sizes]
        self._gradients = [len(layers) * gradient_token_bytes * n for n in self.sizes]
        self._kv_before = [0.0, *accumulate(self._kv)]
        self._seen: dict[int, Sequence[int]] = {}
        self._reading: dict[tuple[range, ...], int] = {}
        self._written: dict[int, set[int]] = {}
        """Allocated segment -> its pieces that were written."""
        self._owners: dict[int, set[int]] = {}
        """Allocated segment -> its pieces that are not freed."""
        self._filling: set[int] = set()
        """Segments whose K,V are on the device."""
        self._hot: set[int] = set()
        """Segments whose gradients are on the device."""
        self._sent: set[int] = set()
        """Segments that have gradients; in sampled plans they need not be consecutive."""

    def seen(self, piece: int) -> Sequence[int]:
        """Return the indices of the segments that hold tokens to which a piece attends, in
        ascending order."""
        if piece not in self._seen:
            self._seen[piece] = self._tokens.seen_segments(piece, self._window)
        return self._seen[piece]

    def write(self, rank: _RankMemory, piece: int) -> None:
        """Store the K,V of a piece, and offload segments that it completes."""
        for index in self._touched[piece]:
            if index not in self._written:
                self._written[index], self._owners[index] = set(), set()
                self._filling.add(index)
                rank.add("kv", self._kv[index])
            elif not self.on_device and index not in self._filling:
                # written again into an offloaded segment that another piece keeps alive
                rank.read("kv", self._kv[index], self._num_layers)
                rank.write("kv", self._kv[index], self._num_layers)
            self._written[index].add(piece)
            self._owners[index].add(piece)
            complete = len(self._written[index]) == self._num_pieces[index]
            if not self.on_device and complete and index in self._filling:
                self._filling.remove(index)
                rank.add("kv", -self._kv[index])
                rank.add("kv", self._kv[index], self._target)
                rank.write("kv", self._kv[index], self._num_layers)

    def read(self, rank: _RankMemory, piece: int, *layers: range) -> None:
        """Count the copies to the device of the offloaded segments to which `piece` attends: one
        copy of a segment for each stored layer that is in one of the ranges `layers`."""
        seen = self.seen(piece)
        filling = [index for index in self._filling if index in seen]
        if isinstance(seen, range):  # prefix sums: a long prefix costs no loop
            num_bytes = self._kv_before[seen.stop] - self._kv_before[seen.start] if seen else 0.0
        else:
            num_bytes = sum(self._kv[index] for index in seen)
        # segments that still fill are on the device
        num_bytes -= sum([self._kv[index] for index in filling])
        reading = self._reading.get(layers)
        if reading is None:
            reading = sum(layer in some for some in layers for layer in self.layers)
            self._reading[layers] = reading
        num_reads = (len(seen) - len(filling)) * reading
        rank.read("kv", num_bytes * reading / self._num_layers, num_reads)

    def send_back(self, rank: _RankMemory, piece: int) -> None:
        """Add the gradients from a piece's Backward to the segments that the piece attends to."""
        seen, sent_to = self.seen(piece), self._sent_to(piece)
        if self.on_device:
            new = [index for index in sent_to if index not in self._hot]
            self._hot.update(new)
            rank.add("kv_gradients", self._sum(new))
            return
        # all but the newest segments are written back
        num_rest = bisect_left(sent_to, seen[-NUM_HOT:][0] if seen else 0)
        rest, newest = sent_to[:num_rest], sent_to[num_rest:]
        had = [index for index in sent_to if index in self._sent]
        here = [index for index in self._hot if index in sent_to]
        were_here = self._sum(here)
        brought, taken = self._sum(had) - were_here, self._sum(rest)
        rank.read("kv_gradients", brought, self._num_layers * (len(had) - len(here)))
        rank.write("kv_gradients", taken, self._num_layers * len(rest))
        rank.add("kv_gradients", taken - brought, self._target)
        rank.add("kv_gradients", self._sum(newest) - were_here)
        self._hot = self._hot.difference(rest).union(newest)
        self._sent.update(sent_to)
        # gradients of its own K,V, which later pieces have sent
        own = [i for i in self._touched[piece] if i in self._sent and i not in self._hot]
        rank.read("kv_gradients", self._sum(own), self._num_layers * len(own))

    def free(self, rank: _RankMemory, piece: int) -> None:
        """Mark a piece as freed. Free the K,V and gradients of each segment of which no piece is
        left."""
        for index in self._touched[piece]:
            owners = self._owners.get(index, set())
            if piece not in owners:
                continue
            owners.remove(piece)
            if owners:
                continue
            if index in self._sent or index in self._hot:
                target = "none" if index in self._hot else self._target
                rank.add("kv_gradients", -self._gradients[index], target)
            target = "none" if index in self._filling else self._target
            rank.add("kv", -self._kv[index], target)
            for indices in (self._filling, self._hot, self._sent):
                indices.discard(index)
            del self._written[index], self._owners[index]

    def _sent_to(self, piece: int) -> Sequence[int]:
        """Return the segments to which a piece sends gradients."""
        if self._tokens.with_gradients is None:
            return self.seen(piece)
        runs = self._tokens.seen_from(piece, self._window)
        parts = [part for run in runs for part in self._tokens.gradients_in(run)]
        if len(parts) == 1:
            return self._tokens.segments(parts[0])
        return sorted({index for part in parts for index in self._tokens.segments(part)})

    def _sum(self, indices: Iterable[int]) -> float:
        """Return the bytes of the gradients of the segments `indices`."""
        return sum(self._gradients[index] for index in indices)
