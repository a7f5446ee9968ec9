"""The decoder families of transformers: config keys, special cases, and the tested releases.

A family can be trained if it passes the engine's self-check. Its FLOPs and memory are measured
(`models.describe`), not listed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from furlong.version import __version__

OLDEST_RELEASE, NEWEST_RELEASE = (5, 21), (5, 24)
"""The first and last release of transformers on which `benchmarks/families.py --check` passed.
On 5.17 moshi is refused, and cohere_compass_text fails."""

# Config keys with one meaning, which families spell differently.
ATTENTION_DROPOUTS = (
    "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob",
)  # fmt: skip
INNER_CHUNKS = ("mamba_chunk_size", "chunk_size", "block_size")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
ATTENTION_BLOCK = "attention_chunk_size"
CHUNKED = "chunked_attention"
"""The `layer_types` value of layers whose tokens attend within blocks of `attention_chunk_size`
(ATTENTION_BLOCK) tokens."""
Recurrent = Literal["none", "in chunks", "token by token"]
"""How transformers' PyTorch code computes recurrent states: in inner chunks (delta rules, Mamba 2,
linear attention; short convolutions at once), or token by token (Mamba, Griffin)."""


@dataclass(frozen=True, slots=True)
class Family:
    """The special cases of one `model_type` of transformers."""

    not_in_chunks: str = ""
    """Why this type cannot be trained in chunks, as the end of "which ..."; "" if it can."""
    whole: str = ""
    """Why its layers cannot be split into stages, as the end of "which ..."; "" if they can."""
    recurrent: Recurrent = "none"
    shares_block: bool = False
    """Whether some layers share the weights of a block of attention and MLP (Zamba)."""


_OWN_ATTENTION = "computes attention outside of transformers' AttentionInterface"
_OWN_CACHE = "keeps its state outside of transformers' cache"
_EMBEDS = "adds the original embeddings again in later layers"
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "lfm3",
            "mamba2",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
        ),
        Family(recurrent="in chunks"),
    ),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), Family(recurrent="token by token")),
    **dict.fromkeys(("bloom", "falcon", "mpt", "xglm"), Family(not_in_chunks=_OWN_ATTENTION)),
    **dict.fromkeys(("rwkv", "xlstm"), Family(not_in_chunks=_OWN_CACHE)),
    "gemma4_text": Family(whole="feeds token ids and shared keys and values to later layers"),
    "recurrent_gemma": Family(
        whole="scales whatever enters its first layer", recurrent="token by token"
    ),
    "zamba": Family(whole=_EMBEDS, recurrent="token by token", shares_block=True),
    "zamba2": Family(whole=_EMBEDS, recurrent="in chunks", shares_block=True),
}
"""The families with special cases, by `model_type`."""


def family_of(model_type: str) -> Family:
    """Return the `Family` of a `model_type`; the default one if it has no special cases."""
    return FAMILIES.get(model_type, Family())


def for_all_layers(config: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a transformers config; `default` if it is missing or differs between
    layers."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # from transformers: this config has one value per layer
        return default


def versions() -> dict[str, str]:
    """Return the installed versions of furlong, torch and transformers, without importing them."""
    from importlib.metadata import version

    return {"furlong": __version__} | {name: version(name) for name in ("torch", "transformers")}


def versions_in_words() -> str:
    """Return `versions()` in one line, as `furlong --version` prints them."""
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def installed_release() -> tuple[int, ...]:
    """Return the numbers (major, minor) of the installed transformers."""
    return tuple(map(int, re.findall(r"\d+", versions()["transformers"])[:2]))
