"""The training of a model, as far as bytes and seconds depend on it: dtypes, optimizer, ZeRO, LoRA.

    weights     in compute dtype (bf16: 2 bytes) plus the float32 master copy of trained ones (4);
                frozen linear layers in 4 bits: half a byte and their scales
    gradients   of trained weights, float32 (4)
    optimizer   AdamW: two float32 moments (8); others: `planners.setup.with_optimizer`

Under ZeRO the n ranks of a sharding group hold 1/n of: 1 the optimizer state and the master copy;
2 also the gradients; 3 also the weights in compute dtype, of which some layers are whole at a time.

A plan reduces the gradients of a stage once, in its Reduce behind the last Backward. Until then
ZeRO-2 holds them whole, as ZeRO-1 does, and replicas need no lockstep (DeepSpeed's reduces with
every micro-batch); under ZeRO-3 every Backward reduces. This runtime (`Training.gathers`) reduces
those of its layers so; what is beside the layers is gathered and summed whole all through a step.
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
"""Bytes of a weight in 4 bits by whether the scales of each 64 are quantized themselves: float32
ones, or bytes with a float32 for each 256 of them."""
_GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time under ZeRO-3: one computes, the next arrives."""


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
    """Whether a copy of the input embeddings, or of the head, is trained whole beside them."""

    def layer_parameters(self, shape: ModelShape, layer: int) -> int:
        return self.rank * sum(width for _, width, *_ in self.adapted(shape)[layer])

    @lru_cache(maxsize=256)  # noqa: B019 (few adapters and shapes)
    def adapted(self, shape: ModelShape) -> tuple[tuple[Matrix, ...], ...]:
        """Return the matrices of each layer that have adapters."""
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
        """The column of `SavedBytes` for a layer."""
        kinds = {kind for _, _, kind, _ in self.adapted(shape)[layer]}
        return ("mixer" in kinds) + 2 * ("mlp" in kinds)


def _ends(name: str, wanted: Iterable[str]) -> bool:
    """Whether a whole name is one that is wanted or ends with it, as peft compares them."""
    return any(name == one or name.endswith(f".{one}") for one in wanted)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one device's state, between steps and all through a step."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Trained weights and their dtypes; the defaults are this project's own (bf16 compute)."""

    compute_bytes: int = 2
    """Bytes of a number in weights in use, activations, K and V."""
    master_bytes: int = 4
    """Bytes of the float32 master copy of a trained weight; 0 if compute runs in that dtype."""
    gradient_bytes: int = 4
    optimizer_bytes: float = 8
    """Bytes of the optimizer's state per trained parameter: AdamW's two moments in float32."""
    matrix_bytes: float | None = None
    """Those per parameter of the layers' matrices, but for experts, where they are others: Muon's
    momentum."""
    zero_stage: ZeroStage = 0
    lora: Lora | None = None
    packed_bytes: float | None = None
    """Bytes of a weight of linear layers in 4 bits, with its scales, which processes do not divide
    among them; None: they are as other weights."""
    replicas: int = 1
    """Data-parallel replicas of the whole plan that it does not list; they share its state."""
    replicate: int = 1
    """Groups of replicas that each share a whole state (HSDP): gradients are also added up between
    them."""
    offload_weights: bool | None = False
    """Whether each process has its part of weights, gradients and optimizer in CPU memory
    (`offload.weights`), from where whole weights come to its device; see `offloading`. None: not
    yet, but a search may choose it."""
    host_is_device: bool = False
    """Whether the device is a CPU, so that all of that lies on it in any case."""
    gathers: bool = False
    """Whether the state is that of this runtime, on FSDP2: every step gathers whole weights from
    the shards of a group and adds gradients up into shards, and shards of weights lie beside whole
    ones. The plan says when they are gathered and freed."""
    overlaps: bool = True
    """Whether gradients that wait for the last Backward are reduced behind it, and weights gathered
    behind the first Forward: not so where DeepSpeed's overlap_comm is off, its default below
    ZeRO-3."""
    kv_gradient_bytes: int = 4
    """Bytes of a number in dK,dV while they wait for their own chunk."""

    @classmethod
    def in_dtype(cls, dtype: str) -> Training:
        """The training of `furlong train`: float32 weights, computing in `dtype`."""
        wide = {"float32": 4, "float64": 8}.get(dtype)
        if wide is None:
            return cls()
        return cls(compute_bytes=wide, master_bytes=0, gradient_bytes=wide, kv_gradient_bytes=wide)

    def offloading(self) -> Training:
        """The same with weights in CPU memory, by FSDP2 on a process that is alone too."""
        return replace(self, zero_stage=1, gathers=True, offload_weights=True)

    @property
    def regathers(self) -> bool:
        """Whether each pass gathers weights, unless they are unsharded for longer; a plan that is
        made for it says so too."""
        return self.zero_stage == 3

    @property
    def passes_gather(self) -> bool:
        """Whether this runtime gathers the layers with each pass, and adds their gradients up with
        each backward: in the pools of a pipeline."""
        return self.gathers and self.regathers

    def weights(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int], group_size: int = 1
    ) -> RankWeights:
        """The weights of a rank that holds the stages `held`; `group_size` devices add up their
        gradients, and those of each of the groups that hold all weights share them."""
        return RankWeights(self, shape, stages, held, max(1, group_size // self.replicate))


@dataclass(frozen=True)
class RankWeights:
    """The weights of a rank: numbers of parameters, and bytes of what a step holds of them."""

    training: Training
    shape: ModelShape
    stages: tuple[int, ...]
    held: frozenset[int]
    """Stages that the rank holds."""
    group_size: int
    """Devices that share its state."""

    @cached_property
    def layers(self) -> list[int]:
        stages = self.stages
        return [sum(stages[:stage]) + i for stage in self.held for i in range(stages[stage])]

    @cached_property
    def _ends(self) -> tuple[bool, bool]:
        """Whether the rank holds the first stage, with the embedding, and the last, with the
        head."""
        return 0 in self.held, len(self.stages) - 1 in self.held

    @property
    def passes_gather(self) -> bool:
        """Whether passes gather from several devices."""
        return self.training.passes_gather and self.group_size > 1

    @property
    def divides(self) -> bool:
        """Whether whole weights are copies of parts, which may be freed, in this runtime."""
        training = self.training
        return training.gathers and (self.group_size > 1 or bool(training.offload_weights))

    @property
    def is_away(self) -> bool:
        """Whether these parts, their gradients and the optimizer are not on the device."""
        return bool(self.training.offload_weights) and not self.training.host_is_device

    @property
    def _is_copied(self) -> bool:
        """Whether whole weights are copies beside shards, of which a group of one has all."""
        return self.divides or (self.training.gathers and self.training.replicate > 1)

    @cached_property
    def beside(self) -> int:
        """Parameters of embedding and head; tied ones on one rank are one."""
        count = sum(self._ends)
        return self.shape.embedding_parameters * (min(1, count) if self.shape.tied_head else count)

    @cached_property
    def ends_trained(self) -> tuple[int, int]:
        """Trained parameters of the embedding and of the head, whose gradient comes first where
        they are one."""
        lora, (first, last) = self.training.lora, self._ends
        embedding, head = (True, True) if lora is None else (lora.embedding, lora.head)
        if self.shape.tied_head:
            embedding, head = (embedding or head) and not (first and last), embedding or head
        count = self.shape.embedding_parameters
        return count * (first and embedding), count * (last and head)

    @property
    def beside_trained(self) -> int:
        """Trained parameters of embedding and head."""
        return sum(self.ends_trained)

    @cached_property
    def all(self) -> int:
        """Parameters without adapters."""
        shape, (first, last) = self.shape, self._ends
        own = sum(shape.layers[n].parameters for n in self.layers)
        return own + self.beside + first * shape.entrance_parameters + last * shape.final_parameters

    @cached_property
    def packed(self) -> int:
        """Parameters in 4 bits."""
        if self.training.packed_bytes is None:
            return 0
        return sum(self.shape.layers[n].linear_parameters for n in self.layers)

    @property
    def floats(self) -> int:
        return self.all - self.packed

    @property
    def beside_floats(self) -> int:
        """Those beside all layers: the embedding, the head, and norms."""
        return self.floats - sum(self.float_layers())

    @cached_property
    def trained(self) -> int:
        lora = self.training.lora
        if lora is None:
            return self.all
        adapters = sum(lora.layer_parameters(self.shape, n) for n in self.layers)
        return adapters + self.beside_trained

    def float_layers(self) -> list[int]:
        """Parameters of each layer in floats, without adapters."""
        is_packed = self.training.packed_bytes is not None
        own = (self.shape.layers[n] for n in self.layers)
        return [n.parameters - (n.linear_parameters if is_packed else 0) for n in own]

    @property
    def groups(self) -> tuple[int, int, int]:
        """Parameters that are gathered together, in this runtime: beside the layers, of the
        embedding, and of the head. Tied ones are beside the layers."""
        embedding, head = (0 if self.shape.tied_head else self.shape.embedding_parameters * end
                           for end in self._ends)  # fmt: skip
        return self.beside_floats - embedding - head, embedding, head

    @property
    def in_use(self) -> int:
        """Parameters that passes compute with, but for those in 4 bits."""
        return self.floats + (self.trained if self.training.lora is not None else 0)

    def whole_bytes(self, stage: int) -> int:
        """Bytes of a stage's whole weights, as this runtime gathers them: with the embedding in
        front of the first and the head behind the last, unless these are tied."""
        own = RankWeights(self.training, self.shape, self.stages, frozenset((stage,)), 1)
        kept = own.beside if self.shape.tied_head else 0
        return (own.in_use - kept) * self.training.compute_bytes

    def freed_bytes(self, *whole: int) -> int:
        """Bytes of weights that are whole in `state`, and freed while those of the stages `whole`
        alone are, as this runtime gathers them."""
        if not self.divides:
            return 0
        return sum(n for stage, n in self._whole.items() if stage not in whole)

    @cached_property
    def _whole(self) -> dict[int, int]:
        """Bytes of the whole weights of each stage that the rank holds."""
        return {stage: self.whole_bytes(stage) for stage in self.held}

    @property
    def share_bytes(self) -> int:
        """Bytes of weights that stay on one device between steps."""
        in_use = self.beside_floats if self.passes_gather else self.in_use
        in_use *= self.training.compute_bytes
        return self.state.weights - (in_use if self.training.gathers else 0)

    @property
    def start_bytes(self) -> int:
        """Bytes of weights at the start of this runtime: the share, and the largest group of
        weights that is whole while it is read, divided or checked."""
        widest = max(self.training.master_bytes, self.training.compute_bytes)
        return self.share_bytes + max(*self.float_layers(), *self.groups) * widest

    def whole_at_a_time(self, *, reshards: bool) -> int:
        """Most bytes of whole weights at a time: of all stages, or of two neighbours; of two layers
        and what is beside them where passes gather."""
        if self.passes_gather:
            return self.gathered_bytes + self.beside_floats * self.training.compute_bytes
        freed = 0
        if reshards:
            freed = min(self.freed_bytes(stage, stage + 1) for stage in range(len(self.stages) - 1))
        return self.in_use * self.training.compute_bytes - freed

    @property
    def resharded_bytes(self) -> int:
        """Most bytes of the state in a step that frees the weights of stages, in this runtime:
        whole ones are of two stages at a time, whole gradients of one, the last one first."""
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
        """Bytes of one device's share."""
        training, here = self.training, not self.is_away
        shard = [1 if training.zero_stage < stage else self.group_size for stage in (2, 3)]
        weights = self.in_use * training.compute_bytes / shard[1]
        sums = self.trained / shard[0]
        if self.passes_gather:  # what is beside the layers is whole all through a step
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
        """Bytes in CPU memory where the weights lie there: a process's part of them, of a step's
        gradients and of the optimizer."""
        if not self.training.offload_weights:
            return 0
        return round(sum(self._parts_bytes) + self.returned_bytes)

    @property
    def returned_bytes(self) -> float:
        """Bytes of its part of the gradients, which go there once a step."""
        return self.trained * self.training.gradient_bytes / self.group_size

    @property
    def _parts_bytes(self) -> tuple[float, float]:
        """Bytes of the weights that a device has beside whole ones, and of its optimizer."""
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
        """Bytes that an Unshard of a stage brings from CPU memory to each device that has it: its
        part in the dtype in which that lies there. A weight that embedding and head share comes
        with the first stage."""
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
        """Bytes of the optimizer's state on all devices that share it."""
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
        """Bytes beside whole weights and gradients while a group gathers or adds them up: the
        largest layer passes through a buffer; so do the embedding and the head, one after the
        other, when gradients of layers are shards. `reuses`: whether whole gradients have waited,
        whose memory is there again when they are shards; a C library's heap keeps it. `at_once`:
        whether a stage adds up in its only Backward, or in each where passes gather, beside which
        the next layer makes its own.
        `regathers`: whether weights are gathered while gradients are added up."""
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
        """Bytes of the gradients that a stage's first Backward makes, of so many: in front of its
        layers, of each layer, and behind them.

        They are whole until they are reduced, which this runtime does in the last Backward of a
        stage, layer by layer, and ZeRO-3 in each; so does this runtime where passes gather.
        """
        front, *layers, behind = self._whole_gradients(stage)
        is_shard = self.training.zero_stage == 3 and not self.passes_gather
        of_ends = 1 / self.group_size if is_shard else 1.0
        is_shard |= self.passes_gather or (self.training.gathers and num_backwards == 1)
        share = 1 / self.group_size if is_shard else 1.0
        return [of_ends * front, *(share * own for own in layers), of_ends * behind]

    def _whole_gradients(self, stage: int) -> list[float]:
        """Bytes of those in front of a stage's layers, of each layer, and behind them."""
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
        """Stages whose Reduce leaves shards of gradients that the first Backward of `stage` has
        `made`, each with the bytes that are free from then on, in this runtime: all where shards
        lie elsewhere. A gradient that embedding and head share is reduced with the rank's first
        stage."""
        if not self.divides:
            return []
        share = 0.0 if self.is_away else 1 / self.group_size
        shards = (n * share for n in self._whole_gradients(stage))
        *freed, of_head = (n - shard for n, shard in zip(made, shards, strict=True))
        last = min(self.held) if self.shape.tied_head else stage
        return [(stage, sum(freed)), (last, of_head)]

    @property
    def gathered_bytes(self) -> int:
        """Weights in compute dtype that are whole at a time under ZeRO-3 without an Unshard: the
        largest layers, or the head."""
        training = self.training
        if training.zero_stage < 3 or self.group_size <= 1:
            return 0
        ends = self.shape.embedding_parameters * (any(self._ends) and not self.passes_gather)
        largest = sum(sorted(self.float_layers(), reverse=True)[:_GATHERED_LAYERS])
        return round(max(largest, ends) * training.compute_bytes)
