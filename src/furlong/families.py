"""The decoder families of transformers: the keys of their configs, and what is special about some.

A family is trained if the engine's self-check finds it exact; its work and memory are measured
(`models.describe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Keys by their meaning: families spell them differently.
ATTENTION_DROPOUTS = (
    "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob",
)  # fmt: skip
INNER_CHUNKS = ("mamba_chunk_size", "chunk_size", "block_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
ATTENTION_BLOCK = "attention_chunk_size"
CHUNKED = "chunked_attention"
"""The value of `layer_types` for layers in which a token sees its own attention block only, of
`attention_chunk_size` (ATTENTION_BLOCK) tokens."""
Recurrent = Literal[
    "none", "gated delta", "key delta", "low-rank key delta", "mamba", "mamba2", "conv",
    "lightning", "rg-lru",
]  # fmt: skip
"""The ways in which a state goes from token to token: a delta rule with a gate per head (Gated
DeltaNet) or per key (Kimi Delta Attention), a state space, a short convolution alone, linear
attention with a fixed decay (MiniMax), a gated recurrence (Griffin)."""


@dataclass(frozen=True, slots=True)
class Family:
    """The special sides of one `model_type` of transformers."""

    not_in_chunks: str = ""
    """Why no model of this type is trained in chunks, as the end of "which ..."; "" for others."""
    whole: str = ""
    """Why its decoder is not divided between layers, as the end of "which ..."; "" for others."""
    attends: bool = True
    """Whether any layer has attention."""
    recurrent: Recurrent = "none"
    shares_block: bool = False
    """Whether some layers share the weights of a block of attention and MLP (Zamba)."""


_OWN_ATTENTION = "computes attention outside of transformers' AttentionInterface"
_EMBEDS = "adds the original embeddings again in later layers"
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(recurrent="key delta"),
    "bloom": Family(not_in_chunks=_OWN_ATTENTION),
    "falcon": Family(not_in_chunks=_OWN_ATTENTION),
    "bamba": Family(recurrent="mamba2"),
    "falcon_h1": Family(recurrent="mamba2"),
    "falcon_mamba": Family(recurrent="mamba", attends=False),
    "gemma4_text": Family(whole="feeds token ids and shared keys and values to later layers"),
    "granitemoehybrid": Family(recurrent="mamba2"),
    "jamba": Family(recurrent="mamba"),
    "kimi_linear": Family(recurrent="low-rank key delta"),
    "lfm2": Family(recurrent="conv"),
    "lfm2_moe": Family(recurrent="conv"),
    "lfm3": Family(recurrent="conv"),
    "mamba": Family(recurrent="mamba", attends=False),
    "mamba2": Family(recurrent="mamba2", attends=False),
    "minimax": Family(recurrent="lightning"),
    "nemotron_h": Family(recurrent="mamba2"),
    "olmo_hybrid": Family(recurrent="gated delta"),
    "qwen3_5_moe_text": Family(recurrent="gated delta"),
    "qwen3_5_text": Family(recurrent="gated delta"),
    "qwen3_next": Family(recurrent="gated delta"),
    "recurrent_gemma": Family(whole="scales whatever enters its first layer", recurrent="rg-lru"),
    "rwkv": Family(not_in_chunks="keeps its state outside of transformers' cache"),
    "xlstm": Family(not_in_chunks="keeps its state outside of transformers' cache"),
    "zamba": Family(whole=_EMBEDS, recurrent="mamba", shares_block=True),
    "zamba2": Family(whole=_EMBEDS, recurrent="mamba2", shares_block=True),
}
"""The families with something special."""


def family_of(model_type: str) -> Family:
    """The row of a `model_type`; a plain one where it has none."""
    return FAMILIES.get(model_type, Family())


def for_all_layers(config: Any, name: str, default: Any = None) -> Any:
    """An attribute of a transformers config, the default also where layers differ in it."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers' own, of a config that has one value per layer
        return default
