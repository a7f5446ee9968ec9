"""Exact FLOPs of chunk-wise training: causal, windowed, grouped heads, experts.

A multiplication and an addition are two FLOPs. Counted are the matrices and the two products of
attention over exactly the (query, key) pairs that the mask allows; norms, activations, softmax and
the tiles that a kernel computes beyond the diagonal are not: they end up in the efficiency.

    forward of a token through a matrix of P parameters   2 P
    backward                                              4 P   (2 P where the matrix is frozen)
    attention, per pair of query and key, forward         4 N H
    backward (flash: scores again, then four products)    10 N H
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.linear - other.linear, self.attention - other.attention)

    def times(self, linear: float, attention: float) -> Flops:
        return Flops(self.linear * linear, self.attention * attention)


def attended_keys(start: int, stop: int, window: int | None = None) -> int:
    """(query, key) pairs of tokens [start, stop) of one sequence: token t sees min(t + 1, window)
    keys, those of its prefix included."""
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    full = min(max(window, start), stop)  # from this token on the window is full
    below = (full * (full + 1) - start * (start + 1)) // 2 if full > start else 0
    return below + (stop - full) * window


def attention_flops_per_key(shape: ModelShape) -> int:
    """Forward of one (query, key) pair in one layer, over all heads."""
    return 4 * shape.q_size


@dataclass(frozen=True)
class StageFlops:
    """Work of one stage per token and per attended key; all figures are of a forward."""

    linear_per_token: int
    """Of all its layers."""
    tail_per_token: int
    """Of its last layer behind the K,V projection: what a pass up to the last K,V leaves out."""
    attention_per_key: int
    """Of one layer."""
    window_layers: tuple[tuple[int | None, int], ...]
    """(window, number of layers that have it)."""
    last_window: int | None
    head_per_token: int
    """Of the language-model head; 0 unless it is the last stage."""
    layer_linear_per_token: tuple[int, ...]
    windows: tuple[int | None, ...]

    def forward(self, num_tokens: float, keys: dict[int | None, float]) -> Flops:
        """`keys`: attended keys for each window of the stage's layers."""
        pairs = sum(count * keys[window] for window, count in self.window_layers)
        return Flops(self.linear_per_token * num_tokens, self.attention_per_key * pairs)

    def first_layers(self, count: int, num_tokens: float, keys: dict[int | None, float]) -> Flops:
        """Forward of the first `count` layers (InfiniPipe's l, recomputed in the backward)."""
        pairs = sum(keys[window] for window in self.windows[:count])
        linear = sum(self.layer_linear_per_token[:count])
        return Flops(linear * num_tokens, self.attention_per_key * pairs)

    def after_last_kv(self, num_tokens: float, keys: dict[int | None, float]) -> Flops:
        """What a pass that stops at the last layer's K,V does not compute."""
        return Flops(
            self.tail_per_token * num_tokens, self.attention_per_key * keys[self.last_window]
        )

    def sequence(self, seq_len: int) -> Flops:
        """Forward of one whole sequence, head included."""
        windows = [window for window, _ in self.window_layers]
        keys = {window: float(attended_keys(0, seq_len, window)) for window in windows}
        return self.forward(seq_len, keys) + Flops(self.head_per_token * seq_len)

    def backward(
        self, num_tokens: float, keys: dict[int | None, float], frozen: bool = False
    ) -> Flops:
        """Without the head; `frozen`: only inputs get gradients, as under LoRA."""
        return self.forward(num_tokens, keys).times(1 if frozen else 2, ATTENTION_BACKWARD)


def stage_flops(shape: ModelShape, stages: tuple[int, ...], stage: int) -> StageFlops:
    """The work of `stage`, of a model cut into `stages` (layers of each)."""
    first = sum(stages[:stage])
    layers = range(first, first + stages[stage])
    linear = tuple(2 * shape.layer_active_parameters(layer) for layer in layers)
    windows = tuple(shape.windows[layer] for layer in layers)
    is_last = stage == len(stages) - 1
    return StageFlops(
        linear_per_token=sum(linear),
        tail_per_token=(linear[-1] - 2 * shape.qkv_parameters) if linear else 0,
        attention_per_key=attention_flops_per_key(shape),
        window_layers=tuple(sorted(Counter(windows).items(), key=str)),
        last_window=windows[-1] if windows else None,
        head_per_token=2 * shape.embedding_parameters if is_last else 0,
        layer_linear_per_token=linear,
        windows=windows,
    )


def sequence_flops(shape: ModelShape, seq_len: int) -> Flops:
    """Forward of one whole sequence through the whole model, head included."""
    return stage_flops(shape, (shape.num_layers,), 0).sequence(seq_len)


def step_flops(shape: ModelShape, seq_len: int) -> Flops:
    """Forward and backward of one whole sequence with nothing recomputed, all weights trained."""
    return sequence_flops(shape, seq_len).times(3, 1 + ATTENTION_BACKWARD)
