"""Exact FLOPs of chunk-wise training: causal, windowed, grouped heads, experts.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace

from furlong.cost.shapes.shape import ModelShape

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
        attention_per_key=tuple(shape.mixers[layer].key_flops for layer in layers),
        head_per_token=2 * shape.embedding_parameters if is_last else 0,
        layer_linear_per_token=linear,
        windows=tuple(shape.windows[layer] for layer in layers),
        layer_idle=tuple(_idle(shape, layer) for layer in layers),
    )


def _idle(shape: ModelShape, layer: int) -> tuple[float, int]:
    mlp = shape.mlps[layer]
    idle = mlp.num_experts - mlp.num_active
    return mlp.unvisited, 2 * idle * mlp.num_matrices * shape.hidden_size * mlp.width


def _tail_flops(shape: ModelShape, layer: int) -> int:
    """FLOPs of a layer per token behind what later chunks need of it."""
    return 2 * (shape.layer_active_parameters(layer) - shape.mixers[layer].before_kv)


def sequence_flops(shape: ModelShape, seq_len: int) -> Flops:
    """FLOPs of one whole sequence's forward through the whole model, head included."""
    return stage_flops(shape, (shape.num_layers,), 0).sequence(seq_len)
