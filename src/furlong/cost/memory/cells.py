"""Bytes of one cell: of all that a `keep` lets survive its forward, and of what works as it runs.

All figures are per token and per sp process; tokens T, query heads N, key-value heads K, head dim
H, hidden D, MLP width F, element size e.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from furlong.cost.memory.activations import Activations, eager
from furlong.cost.memory.training import Training
from furlong.cost.shapes.shape import ModelShape

TOKEN_BYTES = 24
"""Bytes of one token's id, position and label, int64 each."""
_FLOAT32 = 4


@dataclass(frozen=True)
class StageBytes:
    """Bytes per token of one stage on one sp process (tp shards everything alike)."""

    input: float
    """Bytes of the stage input; of token ids at stage 0."""
    graph_layers: tuple[float, ...]
    """Bytes of each layer's graph."""
    checkpointed: float
    """Bytes that a layer which is recomputed alone keeps: its input."""
    attention_layers: tuple[float, ...]
    """Bytes of each layer's attention output and log-sum-exp; 0 without attention."""
    working: float
    """Bytes of the largest set of tensors at work in one layer beside what it saves."""
    exchange: float
    """Bytes that a token's way to other processes of a pool and back takes in one layer beside what
    is at work there in any case: of its four ways (q, k, v; the output; its gradient; those of q,
    k, v) what comes in last and is not yet used, and a copy of what is sent."""
    message: float
    """Bytes of hidden states, or their gradient, between two stages."""
    kv_layer: float
    """Bytes of K and V of one layer in the store."""
    kv_gradient_layer: float
    """Bytes of dK and dV of one layer in the store."""
    ends: float
    """Bytes that final norm and loss keep for the backward; 0 except at the last stage."""
    state: int
    """Bytes of the states that leave a chunk, whatever its tokens."""
    largest_state: int
    """Bytes of those of one layer."""
    widest_saved: float
    """Bytes of the widest tensor that a graph saves."""
    logit: float
    """Bytes per logit of a tile; 0 except at the last stage."""
    head_gradient: float
    """Bytes of a trained head's gradient, which autograd makes whole for each tile before it is
    added to the others; 0 except at the last stage."""

    def attention(self, layers: range) -> float:
        """Bytes per token of the attention outputs of some layers."""
        return sum(self.attention_layers[layers.start : layers.stop])

    @property
    def widest_attention(self) -> float:
        """Bytes per token of the largest attention output."""
        return max(self.attention_layers, default=0.0)

    def graph(self, recompute_layers: int = 0) -> float:
        """Bytes per token of the stage's whole graph, its first layers checkpointed."""
        kept = sum(self.graph_layers[recompute_layers:])
        return kept + recompute_layers * self.checkpointed + self.ends


@lru_cache(maxsize=4096)
def stage_bytes(
    shape: ModelShape,
    stages: tuple[int, ...],
    stage: int,
    training: Training,
    activations: Activations | None = None,
    factor: float = 1.0,
) -> StageBytes:
    """Bytes per token of the cells of `stage`. `activations`: default `eager`; `factor` multiplies
    the graphs (a calibration's)."""
    element, tp = training.compute_bytes, training.tp_size
    saved = activations or eager(shape, element, training.lora)
    first = sum(stages[:stage])
    layers = range(first, first + stages[stage])
    is_last = stage == len(stages) - 1
    hidden = element * shape.hidden_size / tp
    widest = max((shape.mlps[layer].active_width for layer in layers), default=0)
    wide = max(element, _FLOAT32)
    lse = wide * shape.num_heads
    mixers = [shape.mixers[layer] for layer in layers]
    scans = [mixer.saved + mixer.saved_float32 * _FLOAT32 / element for mixer in mixers]
    at_work = max(3 * widest, 2 * shape.q_size + 2 * shape.kv_size, *(n / 2 for n in scans))
    # other frameworks' kernels add to it in place
    makes_one = is_last and activations is None and training.lora is None
    return StageBytes(
        input=TOKEN_BYTES if stage == 0 else hidden + TOKEN_BYTES,
        graph_layers=tuple(factor * saved.layer_bytes(shape, i, element) / tp for i in layers),
        checkpointed=hidden,
        attention_layers=tuple(
            (element * mixer.output_size + lse) / tp if mixer.attends else 0.0 for mixer in mixers
        ),
        working=3 * hidden + element * at_work / tp,
        exchange=element * (2 * shape.q_size + 2 * shape.kv_size) / tp,
        message=hidden,
        kv_layer=shape.stored_size * element / tp,
        kv_gradient_layer=shape.stored_size * training.kv_gradient_bytes / tp,
        state=shape.state_bytes(layers, element),
        largest_state=max(shape.state_bytes(range(i, i + 1), element) for i in layers),
        widest_saved=max(element * max(widest, shape.q_size), wide * shape.hidden_size) / tp,
        ends=factor * saved.end_bytes(shape, element) / tp if is_last else 0.0,
        logit=saved.logit_bytes / tp if is_last else 0.0,
        head_gradient=shape.embedding_parameters * element / tp if makes_one else 0.0,
    )
