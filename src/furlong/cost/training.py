"""The training setup that bytes and seconds depend on: dtypes, optimizer, ZeRO, LoRA.

    weights     in compute dtype (bf16: 2 bytes) plus the float32 master copy of trained ones (4);
                frozen linear layers in 4 bits: half a byte and their scales
    gradients   of trained weights, float32 (4)
    optimizer   AdamW: two float32 moments (8); others: `planners.setup.with_optimizer`

Under ZeRO each of the n devices of a sharding group holds 1/n of: the optimizer state and the
master copy (ZeRO-1); also the gradients (ZeRO-2); also the weights in compute dtype (ZeRO-3, which
gathers the weights of a few layers at a time).

A plan reduces the gradients of a stage once, in its Reduce after the last Backward. Until then
ZeRO-2 holds whole gradients, as ZeRO-1 does, and replicas run independently (in DeepSpeed each
micro-batch reduces). Under ZeRO-3 each Backward reduces gradients. This runtime
(`Training.gathers`) applies ZeRO-3 to the layers alone; weights and gradients outside the layers
are whole all through a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Literal

from furlong.cost.shape import Matrix, ModelShape

ZeroStage = Literal[0, 1, 2, 3]
PACKED_BYTES = {False: 0.5 + 4 / 64, True: 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per 4-bit weight, keyed by double quantization: each 64 weights share a float32 scale or,
with double quantization, a scale of one byte, of which each 256 share a float32."""
_GATHERED_LAYERS = 2
"""Layers with whole weights at a time under ZeRO-3: one computes, the next is gathered."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of peft: for a matrix (in, out), rank * (in + out) trained parameters."""

    rank: int
    modules: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """`model.lora.target_modules`."""
    parameters: tuple[str, ...] = ()
    """`model.lora.target_parameters`."""
    embedding: bool = False
    head: bool = False
    """Whether the embedding (`embedding`) or the head is trained in full besides the adapters."""
    new_tokens: int = 0
    """Rows of embedding and head that are trained where these are not trained in full."""

    def layer_parameters(self, shape: ModelShape, layer: int) -> int:
        return self.rank * sum(width for _, width, *_ in self.adapted(shape)[layer])

    @lru_cache(maxsize=256)  # noqa: B019 (few adapters and shapes)
    def adapted(self, shape: ModelShape) -> tuple[tuple[Matrix, ...], ...]:
        """Return for each layer the matrices that have adapters."""
        return tuple(
            tuple(m for m in layer.adaptable if self._has(f"{shape.layers_name}.{n}.", m))
            for n, layer in enumerate(shape.layers)
        )

    def _has(self, prefix: str, matrix: Matrix) -> bool:
        name, _, kind, _ = matrix
        name = prefix + name
        if kind == "bare":
            return _ends(name, self.parameters)
        if self.modules == "all-linear" or _ends(f"{name}.weight", self.parameters):
            return True
        if isinstance(self.modules, str):
            return re.fullmatch(self.modules, name) is not None
        return _ends(name, self.modules)

    def saves(self, shape: ModelShape, layer: int) -> int:
        """Return a number that says where a layer has adapters, the index in `SavedBytes`: 0
        nowhere, 1 in attention, 2 in the MLP, 3 in both."""
        kinds = {kind for _, _, kind, _ in self.adapted(shape)[layer]}
        return ("mixer" in kinds) + 2 * ("mlp" in kinds)


def _ends(name: str, wanted: Iterable[str]) -> bool:
    """Whether a qualified name equals or ends with one of `wanted`, by peft's rule."""
    return any(name == one or name.endswith(f".{one}") for one in wanted)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one device's share of weights, gradients and optimizer."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training setup: which weights are trained, in which dtypes, and how weights, gradients
    and optimizer are sharded. By default computation is in bf16."""

    compute_bytes: int = 2
    """Bytes per element of weights in use, activations, K and V."""
    master_bytes: int = 4
    """Bytes per trained weight of the float32 master copy; 0 if weights in use are that copy."""
    gradient_bytes: int = 4
    optimizer_bytes: float = 8
    """Bytes of optimizer state per trained parameter; the default is AdamW's in float32."""
    matrix_bytes: float | None = None
    """Bytes of optimizer state per parameter of the layers' matrices other than experts, if they
    differ (Muon's momentum)."""
    zero_stage: ZeroStage = 0
    lora: Lora | None = None
    packed_bytes: float | None = None
    """Bytes per weight of 4-bit linear layers with scales, which are not sharded; None: linear
    layers are not quantized."""
    replicas: int = 1
    """Data-parallel replicas of the plan in addition to those that it lists; they share its
    state."""
    replicate: int = 1
    """Groups of replicas that each hold a whole state (HSDP); gradients are all-reduced between
    them."""
    offload_weights: bool | None = False
    """Whether each process keeps its shards of weights, gradients and optimizer in CPU memory
    (`offload.weights`), and copies weights to the device for use. None: no, but a search may choose
    it (`offloading`)."""
    host_is_device: bool = False
    """Whether the device is a CPU, so that CPU memory is device memory."""
    gathers: bool = False
    """Whether sharding is that of this runtime, on FSDP2: each step gathers whole weights from
    shards and reduces gradients into shards, and shards stay in memory beside whole weights. The
    plan says when weights are gathered and freed."""
    overlaps: bool = True
    """Whether gradients are reduced during the last Backward, and weights gathered during the first
    Forward. False for DeepSpeed without overlap_comm, its default below ZeRO-3."""
    kv_gradient_bytes: int = 4
    """Bytes per element of stored dK,dV."""

    @classmethod
    def in_dtype(cls, dtype: str) -> Training:
        """Return the setup of `furlong train`: computation in `dtype`, float32 or wider weights."""
        wide = {"float32": 4, "float64": 8}.get(dtype)
        if wide is None:
            return cls()
        return cls(compute_bytes=wide, master_bytes=0, gradient_bytes=wide, kv_gradient_bytes=wide)

    def offloading(self) -> Training:
        """Return a copy with weights in CPU memory, which uses FSDP2 even on a single process."""
        return replace(self, zero_stage=1, gathers=True, offload_weights=True)

    @property
    def regathers(self) -> bool:
        """Whether each pass gathers its weights (ZeRO-3), unless an Unshard gathers them."""
        return self.zero_stage == 3

    @property
    def passes_gather(self) -> bool:
        """Whether, in this runtime, each pass gathers the weights of its layers, and each backward
        reduces their gradients. This is so in a pipeline with `reshard` whose weights are sharded
        over sequence-parallel groups."""
        return self.gathers and self.regathers

    def weights(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int], group_size: int = 1
    ) -> RankWeights:
        """Return the weights of a rank that holds the stages `held`. `group_size` devices reduce
        gradients together; group_size / replicate of them share the weights."""
        return RankWeights(self, shape, stages, held, max(1, group_size // self.replicate))


@dataclass(frozen=True)
class RankWeights:
    """A rank's weights: numbers of parameters; bytes of weights, gradients and optimizer."""

    training: Training
    shape: ModelShape
    stages: tuple[int, ...]
    held: frozenset[int]
    """Stages that the rank holds."""
    group_size: int
    """Devices over which the rank's state is sharded."""

    @cached_property
    def layers(self) -> list[int]:
        stages = self.stages
        return [sum(stages[:stage]) + i for stage in self.held for i in range(stages[stage])]

    @cached_property
    def _ends(self) -> tuple[bool, bool]:
        """Two flags: whether the rank holds the first stage, with the embedding, and whether it
        holds the last stage, with the head."""
        return 0 in self.held, len(self.stages) - 1 in self.held

    @property
    def passes_gather(self) -> bool:
        """Whether passes gather weights from several devices."""
        return self.training.passes_gather and self.group_size > 1

    @property
    def divides(self) -> bool:
        """Whether the rank computes with whole weights that this runtime gathers from shards, and
        that can be freed and gathered again."""
        training = self.training
        return training.gathers and (self.group_size > 1 or bool(training.offload_weights))

    @property
    def is_away(self) -> bool:
        """Whether shards of weights, gradients and optimizer are offloaded to CPU memory. False on
        a CPU, whose device memory is CPU memory."""
        return bool(self.training.offload_weights) and not self.training.host_is_device

    @property
    def _is_copied(self) -> bool:
        """Whether whole weights take memory in addition to the shards. They do if this runtime
        gathers them from shards (`divides`). In HSDP they do even if each device is a sharding
        group by itself, whose shard is the whole weight: passes then compute with a copy of it."""
        return self.divides or (self.training.gathers and self.training.replicate > 1)

    @cached_property
    def beside(self) -> int:
        """Number of parameters of the rank's embedding and head. If the two are one tied weight, it
        counts once."""
        count = sum(self._ends)
        return self.shape.embedding_parameters * (min(1, count) if self.shape.tied_head else count)

    @cached_property
    def ends_trained(self) -> tuple[int, int]:
        """Two numbers of trained parameters on the rank: the embedding's and the head's. If the
        rank holds both and they are one tied weight, it counts as the head's, since the head's
        gradient comes first."""
        lora, (first, last) = self.training.lora, self._ends
        embedding, head = (True, True) if lora is None else (lora.embedding, lora.head)
        is_both = self.shape.tied_head and first and last
        if self.shape.tied_head:
            embedding = head = embedding or head
        count = self.shape.embedding_parameters
        rows = 0 if lora is None else lora.new_tokens * self.shape.hidden_size
        each = [count if is_whole else rows for is_whole in (embedding, head)]
        return each[0] * (first and not is_both), each[1] * last

    @property
    def beside_trained(self) -> int:
        """Number of trained parameters of embedding and head."""
        return sum(self.ends_trained)

    @cached_property
    def all(self) -> int:
        """Number of the rank's parameters, without adapters."""
        shape, (first, last) = self.shape, self._ends
        own = sum(shape.layers[n].parameters for n in self.layers)
        return own + self.beside + first * shape.entrance_parameters + last * shape.final_parameters

    @cached_property
    def packed(self) -> int:
        """Number of the rank's parameters in 4 bits."""
        if self.training.packed_bytes is None:
            return 0
        return sum(self.shape.layers[n].linear_parameters for n in self.layers)

    @property
    def floats(self) -> int:
        return self.all - self.packed

    @property
    def beside_floats(self) -> int:
        """Number of parameters outside the layers: embedding, head, and norms."""
        return self.floats - sum(self.float_layers())

    @cached_property
    def trained(self) -> int:
        lora = self.training.lora
        if lora is None:
            return self.all
        adapters = sum(lora.layer_parameters(self.shape, n) for n in self.layers)
        return adapters + self.beside_trained

    def float_layers(self) -> list[int]:
        """Return each layer's number of parameters that are not in 4 bits, without adapters."""
        is_packed = self.training.packed_bytes is not None
        own = (self.shape.layers[n] for n in self.layers)
        return [n.parameters - (n.linear_parameters if is_packed else 0) for n in own]

    @property
    def groups(self) -> tuple[int, int, int]:
        """Numbers of parameters outside the layers, one for each FSDP2 group in this runtime: (all
        other parameters, embedding, head). If embedding and head are tied, they are part of the
        first number, and the other two numbers are 0."""
        embedding, head = (0 if self.shape.tied_head else self.shape.embedding_parameters * end
                           for end in self._ends)  # fmt: skip
        return self.beside_floats - embedding - head, embedding, head

    @property
    def in_use(self) -> int:
        """Number of parameters that passes compute with in floating point: all but 4-bit weights,
        including adapters."""
        return self.floats + (self.trained if self.training.lora is not None else 0)

    def whole_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's whole weights in this runtime, including the embedding in
        the first stage and the head in the last, unless these are tied."""
        own = RankWeights(self.training, self.shape, self.stages, frozenset((stage,)), 1)
        kept = own.beside if self.shape.tied_head else 0
        return (own.in_use - kept) * self.training.compute_bytes

    def freed_bytes(self, *whole: int) -> int:
        """Return the bytes that the rank saves while only the stages `whole` are gathered, and the
        weights of its other stages are freed. `state` counts the whole weights of all stages:
        subtract the result from it."""
        if not self.divides:
            return 0
        return sum(n for stage, n in self._whole.items() if stage not in whole)

    @cached_property
    def _whole(self) -> dict[int, int]:
        """Stage -> bytes of its whole weights, for each stage that the rank holds."""
        return {stage: self.whole_bytes(stage) for stage in self.held}

    @property
    def share_bytes(self) -> int:
        """Bytes of weights that stay on one device between steps."""
        in_use = self.beside_floats if self.passes_gather else self.in_use
        in_use *= self.training.compute_bytes
        return self.state.weights - (in_use if self.training.gathers else 0)

    @property
    def start_bytes(self) -> int:
        """Bytes of weights at the start of a run: the device's share, and the largest FSDP2 group,
        which is whole while it is loaded, sharded or checked."""
        widest = max(self.training.master_bytes, self.training.compute_bytes)
        return self.share_bytes + max(*self.float_layers(), *self.groups) * widest

    def whole_at_a_time(self, *, reshards: bool) -> int:
        """Return the most bytes of whole weights that exist at one time. By default these are the
        weights of all stages of the rank. With `reshards` they are those of two neighbouring
        stages. If passes gather weights, they are those of two layers and of all modules outside
        the layers."""
        if self.passes_gather:
            return self.gathered_bytes + self.beside_floats * self.training.compute_bytes
        freed = 0
        if reshards:
            freed = min(self.freed_bytes(stage, stage + 1) for stage in range(len(self.stages) - 1))
        return self.in_use * self.training.compute_bytes - freed

    @property
    def resharded_bytes(self) -> int:
        """Most bytes of weights, gradients and optimizer during a step of this runtime in which
        stages are gathered and freed (resharded). Backwards run from the last stage to the first:
        at one time there are the whole weights of two stages and the whole gradients of one."""
        state, used, most = self.state, 0.0, -inf
        unreduced: dict[int, float] = defaultdict(float)
        for stage in sorted(self.held, reverse=True):
            made = self.gradients(stage, num_backwards=2)
            for key, freed in self.freed_gradients(stage, made):
                unreduced[key] += freed
            used += sum(made)
            most = max(most, used - self.freed_bytes(stage, stage - 1 if stage else 1))
            used -= unreduced.pop(stage, 0.0)
        return round(state.weights + state.optimizer + most)

    @cached_property
    def state(self) -> StateBytes:
        """Bytes of one device's share of weights, gradients and optimizer."""
        training, here = self.training, not self.is_away
        shard = [1 if training.zero_stage < stage else self.group_size for stage in (2, 3)]
        weights = self.in_use * training.compute_bytes / shard[1]
        sums = self.trained / shard[0]
        if self.passes_gather:  # weights outside the layers are whole all through a step
            weights = float(self.beside_floats * training.compute_bytes)
            sums = self.beside_trained + (self.trained - self.beside_trained) / self.group_size
        weights += self.packed * (training.packed_bytes or 0)
        parts, optimizer = self._parts_bytes
        return StateBytes(
            weights=round(weights + parts * here),
            gradients=round(sums * training.gradient_bytes),
            optimizer=round(optimizer * here),
        )

    @property
    def host_bytes(self) -> int:
        """Bytes in CPU memory of a process if weights are offloaded: its shards of weights,
        gradients and optimizer."""
        if not self.training.offload_weights:
            return 0
        return round(sum(self._parts_bytes) + self.returned_bytes)

    @property
    def returned_bytes(self) -> float:
        """Bytes of a process's gradient shards, which are copied to CPU memory once per step."""
        return self.trained * self.training.gradient_bytes / self.group_size

    @property
    def _parts_bytes(self) -> tuple[float, float]:
        """Two numbers of bytes on one device: of weights besides those that passes compute with
        (master copies, shards of gathered weights), and of the optimizer."""
        training, trained = self.training, self.trained
        shards = self.group_size if training.zero_stage else 1
        weights = trained * training.master_bytes / shards
        if self._is_copied and (training.zero_stage < 3 or self.passes_gather):
            frozen = self.in_use - trained
            weights += (frozen + (0 if training.master_bytes else trained)) * (
                training.compute_bytes / self.group_size
            )
        return weights, self._optimizer_bytes() / shards

    def brought_bytes(self, stage: int) -> float:
        """Return the bytes that an Unshard of a stage copies from CPU memory to each device: the
        device's shard in the stored dtype. A tied embedding is copied with the first stage."""
        training = self.training
        if not training.offload_weights:
            return 0.0
        own = RankWeights(training, self.shape, self.stages, frozenset((stage,)), 1)
        is_tied = self.shape.tied_head and stage > 0
        trained = own.trained - own.beside_trained * is_tied
        frozen = own.in_use - own.beside * is_tied - trained
        wide = training.master_bytes or training.compute_bytes
        return (trained * wide + frozen * training.compute_bytes) / self.group_size

    def _optimizer_bytes(self) -> float:
        """Return the bytes of the optimizer's state over all devices that share it."""
        training, others = self.training, self.beside_trained
        if training.matrix_bytes is None:
            return self.trained * training.optimizer_bytes
        if training.lora is None:
            others += sum(self.shape.layers[n].expert_parameters for n in self.layers)
        matrices = self.trained - others
        return matrices * training.matrix_bytes + others * training.optimizer_bytes

    def collective_bytes(
        self, *, reuses: bool = True, at_once: bool = False, regathers: bool = False
    ) -> int:
        """Return the bytes of buffers for gathers and reductions, in addition to whole weights and
        gradients. The buffers must hold the largest layer and, after all layers, the gradient of
        the embedding or of the head.

        Args:
            reuses: whether whole gradients have accumulated before. As these become shards, buffers
                reuse their memory (unless a C library's heap keeps it).
            at_once: whether a stage has a single Backward, in which a layer's gradients are reduced
                while the next layer's gradients are made.
            regathers: whether the weights of a layer are gathered while gradients are reduced, so
                that buffers for both exist.
        """
        training, lora = self.training, self.training.lora
        if not self._is_copied:
            return 0
        layers, made = self.float_layers(), 0.0
        reuses &= not (training.offload_weights or self.passes_gather)
        freed = sum(layers) * (1 - 1 / self.group_size) if reuses else 0.0
        added = training.gradient_bytes if lora is None else 0
        element_bytes = max(training.compute_bytes, added)
        if at_once or self.passes_gather:
            trained = (
                (lora.layer_parameters(self.shape, n) for n in self.layers) if lora else layers
            )
            made = max(trained) * training.gradient_bytes
        ends = max(self.ends_trained) * training.gradient_bytes if lora else 0
        gathered = (max(self.groups) - freed) * element_bytes
        beside = max(layers) * training.compute_bytes if regathers else 0
        return round(beside + max(max(layers) * element_bytes + made, gathered, ends))

    def gradients(self, stage: int, num_backwards: int) -> list[float]:
        """Return the bytes of gradients after the first of a stage's `num_backwards` Backwards. The
        list begins with those of weights before the stage's layers. Then comes one entry for each
        layer, and last those of weights after the layers.

        Gradients are whole until they are reduced: in this runtime in the last Backward of a stage,
        layer by layer; under ZeRO-3, or if passes gather weights, in each Backward.
        """
        front, *layers, behind = self._whole_gradients(stage)
        is_shard = self.training.zero_stage == 3 and not self.passes_gather
        of_ends = 1 / self.group_size if is_shard else 1.0
        is_shard |= self.passes_gather or (self.training.gathers and num_backwards == 1)
        share = 1 / self.group_size if is_shard else 1.0
        return [of_ends * front, *(share * own for own in layers), of_ends * behind]

    def _whole_gradients(self, stage: int) -> list[float]:
        """Return the bytes of a stage's whole gradients, in the order of `gradients`."""
        training, shape, lora = self.training, self.shape, self.training.lora
        numbers = range(sum(self.stages[:stage]), sum(self.stages[: stage + 1]))
        layers = [
            shape.layers[n].parameters if lora is None else lora.layer_parameters(shape, n)
            for n in numbers
        ]
        embedding, head = self.ends_trained
        ends = [
            (embedding + shape.entrance_parameters * (lora is None)) * (stage == 0),
            (head + shape.final_parameters * (lora is None)) * (stage == len(self.stages) - 1),
        ]
        return [float(training.gradient_bytes * n) for n in (ends[0], *layers, ends[1])]

    def freed_gradients(self, stage: int, made: Sequence[float]) -> list[tuple[int, float]]:
        """Return the bytes that Reduces free of the gradients `made` by the first Backward of
        `stage`, in this runtime: pairs (stage whose Reduce frees them, bytes).

        The Reduce of `stage` frees all of them, except the gradient of a head that is tied to the
        embedding: the Reduce of the first stage that the rank holds frees this gradient. A Reduce
        keeps the device's shards of gradients, unless they are offloaded. The list is empty if
        weights are not gathered from shards.
        """
        if not self.divides:
            return []
        share = 0.0 if self.is_away else 1 / self.group_size
        shards = (n * share for n in self._whole_gradients(stage))
        *freed, of_head = (n - shard for n, shard in zip(made, shards, strict=True))
        last = min(self.held) if self.shape.tied_head else stage
        return [(stage, sum(freed)), (last, of_head)]

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of weights that are whole at a time under ZeRO-3 without an Unshard: the
        largest layers, or the head."""
        training = self.training
        if training.zero_stage < 3 or self.group_size <= 1:
            return 0
        ends = self.shape.embedding_parameters * (any(self._ends) and not self.passes_gather)
        largest = sum(sorted(self.float_layers(), reverse=True)[:_GATHERED_LAYERS])
        return round(max(largest, ends) * training.compute_bytes)
