"""Model FLOPs utilisation against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from furlong.cost.machine import known_card
from furlong.models.describe import describe
from furlong.train.metrics import MfuMeter, build_meter

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
    meter = MfuMeter(describe(CONFIG), known_card("NVIDIA H200").peak_flops_per_s, frozen)
    pairs = 10 * 11 // 2 + 500 * 501 // 2
    flops = forwards * 2 * LINEAR * 510 + 3 * 3 * 4 * 64 * pairs
    assert meter.mfu([10, 500], 2.0) == pytest.approx(flops / (2.0 * 989e12))


@pytest.mark.parametrize(
    ("is_counted", "device", "dtype"),
    [
        (True, "cpu", "bfloat16"),
        (True, "NVIDIA H200", "float32"),
        (True, "NVIDIA H200 NVL", "bfloat16"),
        (False, "NVIDIA H200", "bfloat16"),
    ],
)
def test_what_is_not_known_is_not_invented(
    monkeypatch: pytest.MonkeyPatch, is_counted: bool, device: str, dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    where = torch.device("cpu" if device == "cpu" else "cuda")
    shape = describe(CONFIG) if is_counted else None
    assert build_meter(shape, where, dtype, has_frozen_base=False) is None
    known = build_meter(describe(CONFIG), torch.device("cuda"), "bfloat16", has_frozen_base=False)
    assert (known is not None) == (device == "NVIDIA H200")
