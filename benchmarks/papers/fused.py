"""Bytes of a graph in the frameworks that papers used: Megatron-LM and its kin."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.cost.memory import Activations
from furlong.cost.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Counted(Activations):
    """Tensors of two bytes an element that each layer of a dense model saves: q, k, v, attention's
    output with its log-sum-exp, and these."""

    hidden: float = 0.0
    """Tensors of width D, from norms and residual stream."""
    mlp: float = 0.0
    """Tensors of width F."""
    end_hidden: float = 0.0
    """Tensors of width D behind the layers."""

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
