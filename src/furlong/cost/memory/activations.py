"""The tensors of a layer's graph between forward and backward, as multiples of its widths.

N H queries' width, K H keys' width, D hidden size, F MLP width that one token passes, e element
size; log-sum-exp and experts' routes included, id and position tensors left out
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.cost.memory.training import Lora
from furlong.cost.shapes.shape import ModelShape
from furlong.families import family_of

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Tensors that one layer saves, per token: how many there are of each width; e bytes an
    element, 4 where it says float32."""

    hidden: float
    """Tensors of width D, from norms and residual stream."""
    hidden_float32: float = 0.0
    query: float = 2.0
    """Tensors of width N H: q, and attention's output."""
    kv: float = 1.0
    """Tensors of width 2 K H: k and v."""
    qk: float = 0.0
    """Tensors of width N H + K H, from norms of q and k."""
    qk_float32: float = 0.0
    mlp: float = 4.0
    """Tensors of width F."""
    routed: float = 0.0
    """Tensors of width D for every expert that the token visits."""
    end_hidden: float = 0.0
    """Tensors of width D: the final norm's, and the hidden states that the loss waits for."""
    end_float32: float = 0.0
    logit_bytes: float = 0.0
    """Bytes of one logit at the peak of the loss, its gradient included."""

    def layer_bytes(self, shape: ModelShape, layer: int, element_bytes: int) -> float:
        """Bytes per token of one layer's graph."""
        mlp, mixer = shape.mlps[layer], shape.mixers[layer]
        routed = self.routed * (mlp.num_active if mlp.router else 0)
        qk_size = mixer.query_size + mixer.kv_width // 2
        narrow = (
            (self.hidden + routed) * shape.hidden_size
            + (self.query - 1) * mixer.query_size
            + mixer.output_size
            + self.kv * mixer.kv_width
            + self.qk * qk_size
            + self.mlp * mlp.active_width
            + mixer.saved
        )
        wide = self.hidden_float32 * shape.hidden_size + self.qk_float32 * qk_size
        wide += (shape.num_heads if mixer.attends else 0) + mixer.saved_float32
        return element_bytes * narrow + _FLOAT32 * wide

    def end_bytes(self, shape: ModelShape, element_bytes: int) -> float:
        """Bytes per token behind the last layer."""
        each = element_bytes * self.end_hidden + _FLOAT32 * self.end_float32
        return each * shape.hidden_size


# (float32 tensors, narrow ones) that a norm saves beside its output; float32 ones are copies that
# exist only where the computation is narrower. A frozen weight needs no factor of its product.
_NORM_SAVES = {"rms": (1, 1), "rms32": (2, 0), "layer": (0, 1), "layer32": (3, 0)}
_FROZEN_NORM_SAVES = {"rms": (1, 0), "rms32": (1, 0), "layer": (0, 1), "layer32": (2, 0)}


def eager(shape: ModelShape, element_bytes: int, lora: Lora | None = None) -> Activations:
    """Saved tensors of transformers' own modules around chunk attention (the tests count on them).

    Norms save their input, in float32 where they compute in it, the normalised input and, unless it
    is only added, their output; attention q, k, v, its output; a gated MLP the outputs of gate,
    activation and up, and their product. Under LoRA a matrix without adapter saves no input. Logits
    exist for a tile: in compute dtype and in float32, with their log-softmax and both gradients.
    """
    family = family_of(shape.family)
    in_float32, narrow = (_FROZEN_NORM_SAVES if lora else _NORM_SAVES)[family.norm]
    if element_bytes >= _FLOAT32:  # nothing is copied: float32 tensors are the only ones
        in_float32, narrow = 0, in_float32 + narrow
    # Of the outputs of norms, or inputs of the residual stream, a matrix saves two at most.
    outputs: float = min(family.num_norms, 2)
    mlp = family.mlp_saves or (4 if family.gated else 2)
    if lora is not None and not lora.mlp:
        outputs, mlp = (outputs / 2 if lora.attention else 0), mlp - 1
    has_qk_norm = family.qk_norm in ("head", "width")
    wide, loss = element_bytes >= _FLOAT32, 3 * max(element_bytes, _FLOAT32)
    return Activations(
        hidden=family.num_norms * narrow + outputs,
        hidden_float32=family.num_norms * in_float32,
        query=3 if family.fused_qkv else 2,
        kv=1.5 if family.fused_qkv else 1,
        qk=narrow if has_qk_norm else 0,
        qk_float32=in_float32 if has_qk_norm else 0,
        mlp=mlp,
        routed=2,
        end_hidden=narrow + 1,
        end_float32=in_float32,
        logit_bytes=loss if wide else loss + 2 * element_bytes,
    )
