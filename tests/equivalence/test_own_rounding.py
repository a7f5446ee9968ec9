"""As transformers ships them, recurrent layers round to float32: chunks move their gradients by no
more than another length of their own inner chunks does."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest
from helpers.batches import batch
from helpers.hybrids import VOCAB_SIZE, build
from torch import Tensor, nn

import furlong
from furlong.testing import TokenSequences, reference_loss, take_grads, worst_error

LENS = (70, 33, 9, 5)
TIMES = 3
"""Bound, in times of the family's own change."""
LEAST_SHARE = 1e-3
"""Share of the whole gradient's norm against which smaller ones count: theirs cancel."""
DELTA_RULE = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear",
    "bailing_hybrid",
)  # fmt: skip
"""Families whose inner chunk is the default of a function; of the others it is in the config."""
CONFIGURED = {
    "bamba": "mamba_chunk_size", "granitemoehybrid": "mamba_chunk_size",
    "falcon_h1": "mamba_chunk_size", "nemotron_h": "chunk_size", "zamba2": "chunk_size",
    "mamba2": "chunk_size", "minimax": "block_size",
}  # fmt: skip
QUICK = ("bamba",)
NIGHTLY = ("granitemoehybrid", "zamba2", "mamba2", "qwen3_5_moe_text", "olmo_hybrid")
slow, nightly = pytest.mark.slow, pytest.mark.nightly
Grads = dict[str, Tensor]


def own_grads(model: nn.Module, sequences: TokenSequences) -> Grads:
    reference_loss(model, sequences)
    return take_grads(model)


def with_other_inner_chunks(
    family: str, sequences: TokenSequences, patch: pytest.MonkeyPatch
) -> Grads:
    """The gradients of the same weights with inner chunks of half the length."""
    if family in CONFIGURED:
        return own_grads(build(family, wide=False, **{CONFIGURED[family]: 8}), sequences)
    model = build(family, wide=False)
    modeling = sys.modules[type(model).__module__]
    scans = {
        name: function
        for name, function in vars(modeling).items()
        if inspect.isfunction(function) and "chunk_size" in inspect.signature(function).parameters
    }
    assert scans, f"{modeling.__name__} has no scan in inner chunks"
    with patch.context() as patched:
        for name, function in scans.items():
            patched.setattr(modeling, name, partial(function, chunk_size=32))
        return own_grads(model, sequences)


def measured(family: str, patch: pytest.MonkeyPatch) -> tuple[float, float]:
    """How far the gradients of a family move in chunks, and with other inner chunks."""
    model: Any = build(family, wide=False)
    sequences = batch(LENS, vocab_size=VOCAB_SIZE, masked=[range(3)])
    truth = own_grads(model, sequences)
    furlong.forward_backward(model, sequences, furlong.ChunkOptions(size=16, keep="attention"))
    found = take_grads(model), with_other_inner_chunks(family, sequences, patch)
    error, own = (worst_error(grads, truth, least=LEAST_SHARE)[0] for grads in found)
    return error, own


@pytest.mark.parametrize(
    "family",
    [
        family
        if family in QUICK
        else pytest.param(family, marks=nightly if family in NIGHTLY else slow)
        for family in (*CONFIGURED, *DELTA_RULE)
    ],
)
def test_chunks_move_a_gradient_less_than_inner_chunks_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, own = measured(family, monkeypatch)
    assert own > 0, "another inner chunk changes nothing: there is nothing to compare with"
    assert error <= TIMES * own, (error, own)
