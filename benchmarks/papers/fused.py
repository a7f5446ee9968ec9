"""Bytes of a graph in the frameworks that papers used: Megatron-LM and its kin."""

from __future__ import annotations

from furlong.cost.memory import Activations
from furlong.cost.shape import ModelShape


def fused(shape: ModelShape) -> Activations:
    """Saved tensors of Megatron-like training: fused norms, rotary and activation, flash attention.

    Two residual tensors and two norms' outputs, q, k, v and attention's output, the outputs of the
    MLP's matrices and its last input; logits in float32 with their gradient in place. Korthikanti
    et al. (2022) count 34 D bytes for a two-matrix MLP of width 4 D; without dropout masks and with
    flash attention that is 4 D + 2 N H + 2 K H + 2 F elements, 32 D bytes.
    """
    gated = shape.mlps[0].num_matrices == 3
    return Activations(hidden=4, mlp=3 if gated else 2, end_hidden=2, logit_bytes=4)
