"""The training of a model, as far as bytes and seconds depend on it: dtypes, optimizer, ZeRO, LoRA.

    weights     in compute dtype (bf16: 2 bytes) plus the float32 master copy of trained ones (4);
                frozen linear layers in 4 bits: half a byte and their scales
    gradients   of trained weights, float32 (4)
    optimizer   AdamW: two float32 moments (8); others: `planners.decide.with_optimizer`

Under ZeRO the n ranks of a sharding group hold 1/n of: 1 the optimizer state and the master copy;
2 also the gradients; 3 also the weights in compute dtype, of which some layers are whole at a time.

A plan reduces the gradients of a stage once, in its Reduce behind the last Backward. Until then
ZeRO-2 holds them whole, as ZeRO-1 does, and replicas need no lockstep (DeepSpeed's reduces with
every micro-batch); under ZeRO-3 every Backward reduces. This runtime (`Training.gathers`) reduces
those of its layers so; what is beside the layers is gathered and summed whole all through a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from furlong.cost.shape import ModelShape

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
    attention: bool = True
    """Whether the q, k, v and output matrices have them."""
    mlp: bool = False
    """Whether the MLP's matrices have them."""
    experts: bool = False
    """Whether all experts have them, on both of their parameters."""
    embedding: bool = False
    head: bool = False
    """Whether a copy of the input embeddings, or of the head, is trained whole beside them."""

    def layer_parameters(self, shape: ModelShape, layer: int) -> int:
        own = shape.layers[layer]
        attention, mlp = own.lora
        # of each expert (D, 2F) and (F, D)
        experts = (
            2 * shape.hidden_size * own.num_experts + own.expert_parameters // shape.hidden_size
        )
        experts *= self.experts and own.expert_parameters > 0
        return self.rank * (self.attention * attention + self.mlp * mlp + experts)

    def beside_parameters(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> int:
        """Trained parameters of a rank's embedding and head; tied ones are one."""
        if shape.tied_head and (self.embedding or self.head):
            return _beside(shape, stages, held)
        ends = self.embedding * (0 in held) + self.head * (len(stages) - 1 in held)
        return shape.embedding_parameters * ends


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
    gathers: bool = False
    """Whether the state is that of this runtime, on FSDP2: every step gathers whole weights from
    the shards of a group and adds gradients up into shards, and shards of weights lie beside whole
    ones. The plan says whether they are kept for the step or come with every pass."""
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

    @property
    def regathers(self) -> bool:
        """Whether each pass gathers weights, unless they are unsharded for longer; a plan that is
        made for it says so too."""
        return self.zero_stage == 3

    def under(self, regathers: bool) -> Training:
        """The training under a plan that says so much of its weights (`ChunkPlan.regathers`)."""
        return replace(self, zero_stage=3) if self.gathers and regathers else self

    def trained_parameters(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> int:
        """Number of trained parameters of a rank that holds the stages `held`."""
        if self.lora is None:
            return self.held_parameters(shape, stages, held)
        own = sum(self.lora.layer_parameters(shape, layer) for layer in _layers(stages, held))
        return own + self.beside_parameters(shape, stages, held)

    def layer_parameters(self, shape: ModelShape, layer: int) -> int:
        """Parameters of a layer in floats, without adapters."""
        own = shape.layers[layer]
        return own.parameters - (0 if self.packed_bytes is None else own.linear_parameters)

    def packed_parameters(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> int:
        """Number of parameters in 4 bits of a rank that holds the stages `held`."""
        own = _layers(stages, held)
        return sum(shape.layer_parameters(n) - self.layer_parameters(shape, n) for n in own)

    def held_parameters(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> int:
        """Number of parameters of a rank that holds the stages `held`, without adapters. A rank
        with both ends shares a tied head with the embedding."""
        count = sum(shape.stage_parameters(stages, stage) for stage in held)
        both_ends = len(stages) > 1 and {0, len(stages) - 1} <= held
        return count - (shape.embedding_parameters if both_ends and shape.tied_head else 0)

    def beside_parameters(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> int:
        """Trained parameters of a rank's embedding and head."""
        beside = self.lora.beside_parameters if self.lora else _beside
        return beside(shape, stages, held)

    def state_bytes(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int], group_size: int
    ) -> StateBytes:
        """State of a device that holds the stages `held`; `group_size` devices share it."""
        packed = self.packed_parameters(shape, stages, held)
        base = self.held_parameters(shape, stages, held) - packed
        trained = self.trained_parameters(shape, stages, held)
        in_use = base + (trained if self.lora is not None else 0)
        shard = [1 if self.zero_stage < stage else group_size for stage in (1, 2, 3)]
        weights = in_use * self.compute_bytes / shard[2] + trained * self.master_bytes / shard[0]
        if self.gathers and group_size > 1 and self.zero_stage < 3:
            frozen = in_use - trained
            weights += (frozen + (0 if self.master_bytes else trained)) * (
                self.compute_bytes / group_size
            )
        return StateBytes(
            weights=round(weights + packed * (self.packed_bytes or 0)),
            gradients=round(trained * self.gradient_bytes / shard[1]),
            optimizer=round(self._optimizer_state_bytes(shape, stages, held) / shard[0]),
        )

    def _optimizer_state_bytes(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]
    ) -> float:
        trained = self.trained_parameters(shape, stages, held)
        if self.matrix_bytes is None:
            return trained * self.optimizer_bytes
        others = self.beside_parameters(shape, stages, held)
        if self.lora is None:
            others += sum(shape.layers[n].expert_parameters for n in _layers(stages, held))
        return (trained - others) * self.matrix_bytes + others * self.optimizer_bytes

    def collective_bytes(
        self,
        shape: ModelShape,
        stages: tuple[int, ...],
        held: frozenset[int],
        group_size: int,
        *,
        reuses: bool = True,
    ) -> int:
        """Bytes beside whole gradients where they are added up by a group: the largest layer passes
        through a buffer; so does what is beside the layers, which by then are shards. Under ZeRO-3
        that layer's gradient is whole in compute dtype, too. `reuses`: whether the memory of whole
        gradients is there again when they are shards; a C library's heap does not give it back."""
        if not self.gathers or group_size <= 1:
            return 0
        layers = [self.layer_parameters(shape, n) for n in _layers(stages, held)]
        is_freed = reuses and self.zero_stage < 3
        freed = sum(layers) * (1 - 1 / group_size) if is_freed else 0.0
        added = self.gradient_bytes if self.lora is None else 0
        element_bytes = max(self.compute_bytes, added)
        widest = max(*layers, _beside(shape, stages, held) - freed) * element_bytes
        if self.zero_stage == 3 and self.lora is None:
            widest = max(widest, max(layers) * (element_bytes + self.compute_bytes))
        return round(widest)

    def unreduced_bytes(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int], group_size: int
    ) -> int:
        """Bytes of gradients beyond their shard that wait for a Reduce: all under ZeRO-2; under
        this runtime's ZeRO-3 those beside the layers."""
        if self.zero_stage == 2:
            trained = self.trained_parameters(shape, stages, held)
        elif self.zero_stage == 3 and self.gathers:
            trained = self.beside_parameters(shape, stages, held)
        else:
            return 0
        return round(trained * self.gradient_bytes * (1 - 1 / group_size))

    def gathered_bytes(
        self, shape: ModelShape, stages: tuple[int, ...], held: frozenset[int], group_size: int
    ) -> int:
        """Weights in compute dtype that are whole at a time under ZeRO-3 without an Unshard: the
        largest layers, or the head; in this runtime both, and the embedding."""
        if self.zero_stage < 3 or group_size <= 1:
            return 0
        own = (self.layer_parameters(shape, n) for n in _layers(stages, held))
        layers = sorted(own, reverse=True)
        largest = sum(layers[:_GATHERED_LAYERS])
        ends = {0, len(stages) - 1} & held
        widest = max(largest, shape.embedding_parameters if ends else 0)
        if self.gathers:
            widest = largest + _beside(shape, stages, held)
        return round(widest * self.compute_bytes)


def _layers(stages: tuple[int, ...], held: frozenset[int]) -> list[int]:
    """The layers of the stages `held`."""
    return [sum(stages[:stage]) + i for stage in held for i in range(stages[stage])]


def _beside(shape: ModelShape, stages: tuple[int, ...], held: frozenset[int]) -> int:
    """Parameters beside the layers: of the embedding and the head, on a rank with those stages."""
    ends = (0 in held) + (len(stages) - 1 in held)
    return shape.embedding_parameters * (min(1, ends) if shape.tied_head else ends)
