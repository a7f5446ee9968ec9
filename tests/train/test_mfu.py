"""Model FLOPs utilisation against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from furlong.train.figures.mfu import build_meter

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LINEAR = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 64 * 1000
"""Parameters of q, k and v, the output and the MLP in three layers, and of the head."""


@pytest.mark.parametrize(("frozen", "forwards"), [(False, 3), (True, 2)])
def test_mfu_counts_matrices_and_causal_pairs(frozen: bool, forwards: int) -> None:
    meter = build_meter(CONFIG, "NVIDIA H200", torch.bfloat16, has_frozen_base=frozen)
    assert meter is not None
    pairs = 10 * 11 // 2 + 500 * 501 // 2
    flops = forwards * 2 * LINEAR * 510 + 3 * 3 * 4 * 64 * pairs
    assert meter.mfu([10, 500], 2.0) == pytest.approx(flops / (2.0 * 989e12))


@pytest.mark.parametrize(
    ("config", "device", "dtype"),
    [
        (CONFIG, None, torch.bfloat16),
        (CONFIG, "NVIDIA H200", torch.float32),
        (CONFIG, "NVIDIA H200 NVL", torch.bfloat16),
        (PretrainedConfig(), "NVIDIA H200", torch.bfloat16),
    ],
)
def test_what_is_not_known_is_not_invented(
    config: PretrainedConfig, device: str | None, dtype: torch.dtype
) -> None:
    assert build_meter(config, device, dtype, has_frozen_base=False) is None
