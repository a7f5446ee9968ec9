#!/usr/bin/env python3
"""Write cost/known_models.json: known models by name, measured on the meta device.

Published models are given by the keys of their own config.json on the hub. The GPT models of
InfiniPipe and FPDT are described by their sizes only: a two-matrix MLP of width 4 D and full heads
is what GPT-3 has; biases, vocabulary and the tied head are assumptions. 2.7B, 6.7B and 13B are of
Brown et al. 2020, Table 2.1 (13B with 5,120 for 5,140, divisible by 40 heads); InfiniPipe names 7B,
taken as 6.7B, and 30B, of which it checkpoints 55 layers: 60 layers of 6,656, as LLaMA has them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from furlong.models.describe import describe

TABLE = Path(__file__).parents[1] / "src/furlong/cost/known_models.json"


def _sized(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
        "vocab_size": vocab, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen2_5(*sizes: int, positions: int = 131072, **more: Any) -> dict[str, Any]:
    given = {"use_sliding_window": False, "max_position_embeddings": positions}
    return _sized("qwen2", *sizes, **given, **more)


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    given = {"use_sliding_window": False, "max_position_embeddings": 40960}
    return _sized("qwen3", *sizes, 151936, head_dim=128, **given, **more)


def _llama(positions: int, *sizes: int, scaled: float = 0, **more: Any) -> dict[str, Any]:
    if scaled:
        more["rope_parameters"] = {
            "rope_type": "llama3", "factor": scaled, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5,
        }  # fmt: skip
    return _sized("llama", *sizes, max_position_embeddings=positions, **more)


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": 50304,
        "tie_word_embeddings": True,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _qwen2_5(896, 24, 14, 2, 4864, 151936, positions=32768, **_TIED),
    "Qwen2.5-1.5B": _qwen2_5(1536, 28, 12, 2, 8960, 151936, **_TIED),
    "Qwen2.5-7B": _qwen2_5(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _qwen2_5(5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _qwen2_5(5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _qwen2_5(8192, 80, 64, 8, 29568, 152064),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, **_TIED),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, **_TIED),
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-30B-A3B-Instruct-2507": _sized(
        "qwen3_moe",
        *(2048, 48, 32, 4, 6144, 151936),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=262144,
    ),
    "Olmo-Hybrid-7B": {"model_type": "olmo_hybrid"},  # the defaults of its class
    "Llama-2-7B": _llama(4096, 4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": _llama(4096, 5120, 40, 40, 40, 13824, 32000),
    "Llama-3-8B": _llama(8192, 4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-8B": _llama(131072, 4096, 32, 32, 8, 14336, 128256, scaled=8.0),
    "Llama-3.1-70B": _llama(131072, 8192, 80, 64, 8, 28672, 128256, scaled=8),
    "Llama-3.2-1B": _llama(131072, 2048, 16, 32, 8, 8192, 128256, scaled=32.0, **_TIED),
    "GPT-2.7B": _gpt(2560, 32, 32),
    "GPT-6.7B": _gpt(4096, 32, 32),
    "GPT-7B": _gpt(4096, 32, 32),
    "GPT-13B": _gpt(5120, 40, 40),
    "GPT-30B": _gpt(6656, 60, 52),
}


def row(name: str) -> dict[str, Any]:
    """A model's config and its shape; positions are known where the config tells them."""
    config = CONFIGS[name]
    shape = describe(AutoConfig.for_model(**config), f"the preset {name}").to_values()
    if "max_position_embeddings" not in config:
        shape["num_positions"] = None
    return {"config": config, "shape": shape}


def main() -> None:
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row(name))}" for name in CONFIGS)
    TABLE.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
