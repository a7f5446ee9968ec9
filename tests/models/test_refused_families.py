"""Families that no mend makes exact in chunks: refused by name, before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.attention_families import LATENT
from transformers import AutoConfig, AutoModelForCausalLM

import furlong
from furlong.errors import UnsupportedModelError
from furlong.models.build import build_model

_SMALL = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_INDEXED = {**_SMALL, **LATENT, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axk2": (_INDEXED, "learned indexer"),
    "minimax_m3_vl_text": ({}, "learned indexer"),
    "qwen4_exp_text": (
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        "learned indexer",
    ),
    "rwkv": ({}, "outside of transformers' cache"),
}
"""One by its type and its keys, two by their keys, one by its type; all types of the table of
families are in test_describe."""


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_folder_is_refused_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    """It has none: whoever looked for weights would say so."""
    settings, why = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UnsupportedModelError, match=why) as refusal:
        build_model(str(tmp_path))
    assert f"model type {model_type}" in str(refusal.value)


def test_a_model_is_refused_by_its_class() -> None:
    config = AutoConfig.for_model("deepseek_v32", **_INDEXED)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="DeepseekV32ForCausalLM, which picks the keys"):
        furlong.Engine(model).forward_backward([], furlong.ChunkOptions(size=8))
