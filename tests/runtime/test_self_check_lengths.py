"""The start-up check of what a model does beyond thousands of tokens: a tiny copy shows it."""

from __future__ import annotations

import pytest
from helpers.attention_families import twin_of

from furlong.errors import UnsupportedModelError
from furlong.models import attention
from furlong.models.causal_lm import CausalLM
from furlong.models.layer_cache import LayerCache
from furlong.ops.choose import ProbedBackend
from furlong.runtime.checks.self_check import self_check

LONG = {"attention_chunk_size": 8192, "floor_scale": 8192}
FAULTS = {
    "block ignored": (attention, "attention_block", lambda *_: None),
    "temperature ignored": (LayerCache, "get_seq_length", lambda *_: 0),
}


def check(name: str = "llama4", **lengths: int) -> float:
    return self_check(CausalLM(twin_of(name, **lengths)), ProbedBackend())


@pytest.mark.parametrize("lengths", [{}, LONG], ids=["short", "long"])
def test_llama_4_passes(lengths: dict[str, int]) -> None:
    assert check(**lengths) <= 1e-6  # the copy is transformers' own class, which rounds to float32


@pytest.mark.parametrize("lengths", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_though_the_lengths_are_beyond_the_check(
    fault: str, lengths: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(UnsupportedModelError, match="other hidden states in chunks"):
        check(**lengths)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4 with shared keys"])
def test_a_dropped_relay_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latents it goes another way than that of keys and values."""
    assert check(name) <= 1e-12
    monkeypatch.setattr("furlong.runtime.cells.layer_view.LayerView.relayed", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="other gradients in chunks"):
        check(name)
