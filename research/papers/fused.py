"""Bytes in the frameworks that papers used: Megatron-LM and its kin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from furlong.cost.memory import PlanMemory, StageBytes, stage_bytes
from furlong.cost.shape import ModelShape
from furlong.cost.training import Training


@dataclass(frozen=True, slots=True)
class Counted:
    """Tensors of two bytes an element that each layer of a dense model saves: q, k, v, attention's
    output with its log-sum-exp, and these."""

    hidden: float = 0.0
    """Tensors of width D, from norms and residual stream."""
    mlp: float = 0.0
    """Tensors of width F."""
    end_hidden: float = 0.0
    """Tensors of width D behind the layers."""
    logit_bytes: float = 0.0
    """Bytes of one logit at the peak of the loss, its gradient included."""

    def layer_bytes(self, shape: ModelShape, layer: int, element_bytes: int) -> float:
        own = shape.layers[layer]
        attention = own.query_size + own.output_size + own.kv_width
        count = self.hidden * shape.hidden_size + attention + self.mlp * own.width
        return element_bytes * count + 4 * shape.num_heads

    def end_bytes(self, shape: ModelShape, element_bytes: int) -> float:
        return element_bytes * self.end_hidden * shape.hidden_size


def fused(shape: ModelShape) -> Counted:
    """Saved tensors of Megatron-like training: fused norms, rotary and activation, flash attention.

    Two residual tensors and two norms' outputs, q, k, v and attention's output, the outputs of the
    MLP's matrices and its last input; logits in float32 with their gradient in place. Korthikanti
    et al. (2022) count 34 D bytes for a two-matrix MLP of width 4 D; without dropout masks and with
    flash attention that is 4 D + 2 N H + 2 K H + 2 F elements, 32 D bytes.
    """
    is_gated = shape.family != "gpt_neox"
    return Counted(hidden=4, mlp=3 if is_gated else 2, end_hidden=2, logit_bytes=4)


def saving(
    cell: StageBytes,
    saved: Counted,
    shape: ModelShape,
    layers: range,
    element: int,
    factor: float = 1.0,
) -> StageBytes:
    """A cell whose graph saves other tensors than those of transformers' modules. Kernels of other
    frameworks add to the head's gradient in place."""
    is_last = bool(cell.logit)
    return replace(
        cell,
        graph_layers=tuple(factor * saved.layer_bytes(shape, i, element) for i in layers),
        ends=factor * saved.end_bytes(shape, element) if is_last else 0.0,
        logit=saved.logit_bytes if is_last else 0.0,
        head_gradient=0.0,
    )


def whole_cell(shape: ModelShape, training: Training, saved: Counted) -> StageBytes:
    """Bytes per token of a cell of a whole model whose layers save these tensors."""
    cell = stage_bytes(shape, (shape.num_layers,), 0, training)
    return saving(cell, saved, shape, range(shape.num_layers), training.compute_bytes)


_SHARED = (
    "working", "exchange", "message", "kv_layer", "kv_gradient_layer", "widest_saved", "ends",
    "logit", "head_gradient",
)  # fmt: skip
"""Bytes per token that tensor parallelism divides."""


@dataclass(frozen=True)
class OtherMemory(PlanMemory):
    """The memory of a plan in another framework, the loss over the logits of a whole chunk unless
    it is cut; on one device of a tensor-parallel group, where `training` is of one, too."""

    saved: Counted | None = None
    """Tensors that a layer saves; None: those of transformers' modules."""
    logit_bytes: float | None = None
    """Bytes of one logit, where they are not those of `saved` or of tiles."""
    tp_size: int = 1
    """Tensor parallelism with Megatron's sequence parallelism."""
    cut: bool = False

    def loss_bytes(self, cell: StageBytes, num_tokens: float, *, backward: bool) -> float:
        if self.cut:
            return super().loss_bytes(cell, num_tokens, backward=backward)
        logits = cell.logit * self.shape.vocab_size * num_tokens
        return logits + (cell.head_gradient if backward else 0.0)

    def cell(self, stages: tuple[int, ...], stage: int) -> StageBytes:
        cell, tp = super().cell(stages, stage), self.tp_size
        if self.saved is not None:
            layers = range(sum(stages[:stage]), sum(stages[: stage + 1]))
            element, factor = self.training.compute_bytes, self.activation_factor
            cell = saving(cell, self.saved, self.shape, layers, element, factor)
        if self.logit_bytes is not None and cell.logit:
            cell = replace(cell, logit=self.logit_bytes)
        return replace(
            cell,
            graph_layers=tuple(n / tp for n in cell.graph_layers),
            attention_layers=tuple(n / tp for n in cell.attention_layers),
            **{name: getattr(cell, name) / tp for name in _SHARED},
        )
