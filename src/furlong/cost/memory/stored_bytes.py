"""Bytes that a long sequence keeps from its forward to its backward, per token.

What grows with the length, and nothing else: which of K,V and hidden states is the smaller depends
on the model alone. Layers with a window are counted as if they saw all; a process holds everything.

    L layers, D hidden size, K H width of keys, e bytes of a number, g bytes of a gradient's
"""

from __future__ import annotations

from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape


def kv_bytes_per_token(shape: ModelShape, training: Training) -> int:
    """K and V of all layers: 2 L K H e."""
    return shape.num_layers * _layer_kv_bytes(shape, training.compute_bytes)


def kv_gradient_bytes_per_token(shape: ModelShape, training: Training) -> int:
    """dK and dV of all layers: 2 L K H g."""
    return shape.num_layers * _layer_kv_bytes(shape, training.kv_gradient_bytes)


def checkpoint_bytes_per_token(shape: ModelShape, training: Training) -> int:
    """The input of every layer, as layer-wise checkpointing keeps it: L D e."""
    return shape.num_layers * shape.hidden_size * training.compute_bytes


def layer_first_bytes_per_token(shape: ModelShape, training: Training, stage_layers: int) -> int:
    """The inputs of all stages of at most `stage_layers` layers (that of the first is token ids),
    and K,V with their gradients of one stage."""
    num_stages = -(-shape.num_layers // stage_layers)
    height = -(-shape.num_layers // num_stages)
    inputs = (num_stages - 1) * shape.hidden_size * training.compute_bytes
    number_bytes = training.compute_bytes + training.kv_gradient_bytes
    return inputs + height * _layer_kv_bytes(shape, number_bytes)


def smallest_stage_layers(shape: ModelShape, training: Training) -> int:
    """The stage height from 1 to L that keeps the fewest bytes per token; the lowest of several."""
    return min(
        range(1, shape.num_layers + 1),
        key=lambda height: (layer_first_bytes_per_token(shape, training, height), height),
    )


def _layer_kv_bytes(shape: ModelShape, number_bytes: int) -> int:
    return 2 * shape.kv_size * number_bytes
