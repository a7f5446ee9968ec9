"""How the tokens of a layer meet: the sizes of its attention, of its recurrence, or of neither.

D hidden size, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.families import Family, is_set


@dataclass(frozen=True, slots=True)
class MixerShape:
    """One layer without its MLP and without the norms that every layer has."""

    matrices: int = 0
    """Parameters of the matrices that one token is multiplied with."""
    before_kv: int = 0
    """Parameters among `matrices` that a token meets before its K,V, or its state, are there."""
    vectors: int = 0
    """Parameters of biases, norms, convolutions, decays and other things per channel."""
    shared: int = 0
    """Parameters among `matrices` and `vectors` that are counted with an earlier layer."""
    key_flops: int = 0
    """FLOPs of one (query, key) pair over all heads; 0 without attention."""
    query_size: int = 0
    """Width of one token's queries over all heads."""
    output_size: int = 0
    """Width of what attention gives."""
    kv_width: int = 0
    """Width of one token's keys and values together, as attention reads them."""
    stored: int = 0
    """Numbers of one token in the KV store: K and V, or the vector that they are made of."""
    state_float32: int = 0
    """Numbers of the recurrence's state that leaves a chunk, in float32."""
    state_columns: int = 0
    """Numbers of the convolution's state that leaves a chunk, in compute dtype."""
    scan_flops: int = 0
    """FLOPs of the recurrence and its convolution, per token."""
    saved: float = 0.0
    """Numbers that a graph saves per token beside attention's, in compute dtype."""
    saved_float32: float = 0.0
    """Numbers that a graph saves per token beside attention's, in float32."""

    @property
    def attends(self) -> bool:
        return self.key_flops > 0

    @property
    def is_recurrent(self) -> bool:
        return self.state_float32 + self.state_columns > 0

    @property
    def parameters(self) -> int:
        """All parameters that are counted with this layer."""
        return self.matrices + self.vectors - self.shared

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of the state at the end of a chunk."""
        return max(4, element_bytes) * self.state_float32 + element_bytes * self.state_columns


def attention_mixer(
    config: Mapping[str, Any], family: Family, *, hidden: int, heads: int, kv_heads: int, dim: int
) -> MixerShape:
    """Attention whose heads have keys and values of their own."""
    q, kv = heads * dim, kv_heads * dim
    queries = q * (2 if family.gate == "wide" else 1)
    matrices = hidden * (queries + q + 2 * kv)
    mixer = MixerShape(
        matrices=matrices,
        before_kv=hidden * (queries + 2 * kv),
        vectors=_attention_vectors(config, family, queries, q, kv, dim, heads, hidden),
        key_flops=4 * q,
        query_size=q,
        output_size=q,
        kv_width=2 * kv,
        stored=2 * kv,
        saved=3 * q if family.gate == "wide" else 0,
    )
    return _with_head_gate(config, family, mixer, hidden, heads)


def _attention_vectors(
    config: Mapping[str, Any], family: Family, queries: int, q: int, kv: int, dim: int, heads: int,
    hidden: int,
) -> int:  # fmt: skip
    """Parameters of one layer's attention outside its matrices."""
    count = queries + 2 * kv if is_set(config, family.qkv_bias) else 0
    count += hidden if is_set(config, family.out_bias) else 0
    if family.qk_norm == "head":
        count += 2 * dim
    asked = config.get("use_qk_norm") or config.get("qk_layernorm")
    if family.qk_norm == "width" or (family.qk_norm == "heads" and asked):
        count += q + kv
    return count + (heads if family.sinks else 0)


def latent_mixer(
    config: Mapping[str, Any], family: Family, *, hidden: int, heads: int
) -> MixerShape:
    """Attention whose keys and values are made of one narrow vector per token (DeepSeek's MLA)."""
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries, q_rank = heads * (nope + rope), int(config.get("q_lora_rank") or 0)
    q_matrices = q_rank * (hidden + queries) if q_rank else hidden * queries
    narrow = hidden * (rank + rope)
    wide = rank * heads * (nope + value)
    bias = bool(config.get("attention_bias"))
    mixer = MixerShape(
        matrices=q_matrices + narrow + wide + heads * value * hidden,
        before_kv=q_matrices + narrow + wide,
        vectors=q_rank + rank + (q_rank + rank + rope + hidden if bias else 0),
        key_flops=2 * heads * (nope + rope + value),
        query_size=queries,
        output_size=heads * value,
        kv_width=heads * (nope + rope + value),
        stored=rank + rope,
        saved=2 * q_rank + 2 * rank + rope,
    )
    return _with_head_gate(config, family, mixer, hidden, heads)


def _with_head_gate(
    config: Mapping[str, Any], family: Family, mixer: MixerShape, hidden: int, heads: int
) -> MixerShape:
    """The mixer with a gate of one number per head that scales its output, if the family has it."""
    if family.gate != "heads" or config.get("use_attention_gate") is False:
        return mixer
    return replace(
        mixer, matrices=mixer.matrices + hidden * heads, saved=mixer.saved + mixer.output_size
    )


def side_by_side(first: MixerShape, second: MixerShape) -> MixerShape:
    """Attention and recurrence in one layer."""
    names = MixerShape.__dataclass_fields__
    return MixerShape(**{name: getattr(first, name) + getattr(second, name) for name in names})


def shared_block(
    config: Mapping[str, Any], family: Family, recurrent: MixerShape, *, is_first: bool
) -> MixerShape:
    """A recurrence behind a block of attention and MLP that other layers have too (Zamba): it
    reads the layer's input and the original embeddings, and a matrix leads back."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("attention_head_dim") or 2 * hidden // heads)
    wide, q, width = 2 * hidden, heads * dim, int(config["intermediate_size"])
    attention = 3 * wide * q + q * hidden
    mlp, norms = 3 * hidden * width, wide + hidden
    rank, adapters = int(config.get("adapter_rank") or 0), 0
    if family.recurrent == "mamba2":  # only Zamba2 adapts its blocks to their layers
        adapters = rank * (hidden + 2 * width)
        adapters += 6 * rank * wide if config.get("use_shared_attention_adapter") else 0
    block = MixerShape(
        matrices=attention + mlp + adapters + hidden * hidden,
        before_kv=attention + mlp + adapters + hidden * hidden,  # the state comes behind it
        vectors=norms,
        shared=0 if is_first else attention + mlp + norms,
        key_flops=4 * q,
        query_size=q,
        output_size=q,
        kv_width=2 * q,
        stored=2 * q,
        saved=2 * wide + 4 * width + 2 * hidden,
    )
    return side_by_side(block, recurrent)
