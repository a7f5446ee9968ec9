"""Families of more than plain attention (latents, attention blocks, shared keys, states): the
gradients of float64 twins of transformers' modeling files, in whatever chunks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import hybrids
from helpers.attention_families import TWINS, VOCAB_SIZE, twin_of
from helpers.batches import batch
from helpers.covering import Design, Row
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING

import furlong
from furlong.errors import UnsupportedModelError
from furlong.kv.store import KVStore
from furlong.planners.spaco import EXACT, Factors, sample_backwards
from furlong.testing import reference_loss, take_grads, worst_relative_error

BOUND = 1e-9
LENS, SHORT_LENS = (70, 33, 9, 5), (27, 6, 2)
"""The second ones are for chunks of a single token."""
HYBRIDS = [family for family in hybrids.HYBRIDS if family in CONFIG_MAPPING]
QUICK = ("lfm2", "nemotron_h", "jamba", "minimax", "qwen3_next")
"""A convolution alone, and states of each kind: given to the scan, added to it, of an own cache."""
SHARED = "gemma4 with shared keys"
UNCUT = ("gemma4", SHARED, "zamba", "zamba2", "recurrent_gemma")


def design(families: Sequence[str]) -> Design:
    return Design(
        {
            "family": families,
            "size": (16, 7, 1, 48),
            "keep": ("kv", "input", "attention", "all"),
            "num_retained": (0, 1, 3),
            "hybrid": (True, False),
            "stage_layers": (0, 1, 2),
            "recompute_layers": (0, 1, 2),
            "offload": ("none", "cpu", "disk"),
            "segment_tokens": (0, 8),
            "kind": ("gradients", "hidden states"),
        },
        {
            "num_retained": lambda c: c["keep"] != "all",
            "stage_layers": lambda c: c["family"] not in UNCUT,
            "kind": lambda c: c["keep"] != "all" and not c["stage_layers"],
        },
        steering=("family", "keep", "stage_layers"),
        loose=["family"],
    )


FEW = design((*TWINS, *QUICK)).array(2)
"""Every pair of dials."""
EVERY = design((*TWINS, *HYBRIDS))
PAIRS, TRIPLES = EVERY.array(2, FEW), EVERY.array(3, FEW)
"""Every family; every triple of dials, and every pair of a family and a value of one."""
_LONG_LAST = sorted(FEW, key=lambda row: (row["size"], str(row)))
ONE_EACH = [*{row["family"]: row for row in _LONG_LAST}.values()]
"""A row of each family, in the longest chunks that it has there."""


def with_adapters(model: Any) -> Any:
    """The model with LoRA on all linear layers, none of which is zero."""
    layers = model.get_decoder().layers
    linear = {name.rpartition(".")[2] for name, m in layers.named_modules() if type(m) is nn.Linear}
    linear = {name for name in linear if not name.isdigit()}  # others have that name, too
    if model.config.model_type in ("mamba2", "nemotron_h"):
        linear.discard("out_proj")  # which peft refuses there
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=sorted(linear))).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return adapted


def loss_of_hidden(hidden: Sequence[torch.Tensor]) -> float:
    """A loss that the caller makes of hidden states (T, D), with its gradients in the model."""
    loss = sum((h * torch.linspace(-1, 1, h.numel()).view_as(h)).sum() for h in hidden)
    loss.backward()
    return float(loss)


@functools.lru_cache(maxsize=2)
def model_and_truth(family: str, kind: str = "gradients", lens: Sequence[int] = LENS) -> Any:
    model: Any = twin_of(family) if family in TWINS else hybrids.build(family, twin=True)
    model = with_adapters(model) if kind == "lora" else model
    sequences = batch(lens, vocab_size=VOCAB_SIZE, masked=[range(10)])
    if kind == "hidden states":
        decoder, ids = model.get_decoder(), [s["input_ids"][None] for s in sequences]
        if decoder is model:  # Llama 4's
            decoder = model.model
        whole = [decoder(input_ids=i, use_cache=False).last_hidden_state[0] for i in ids]
        loss = loss_of_hidden(whole)
    else:
        loss = reference_loss(model, sequences)
    return model, sequences, loss, take_grads(model)


def check(family: str, options: furlong.ChunkOptions, kind: str = "gradients") -> None:
    lens = LENS if options.size > 1 else SHORT_LENS
    model, sequences, loss, truth = model_and_truth(family, kind, lens)
    engine = furlong.Engine(model, storage=furlong.Storage(poison=True))
    if kind == "hidden states":
        given = loss_of_hidden(engine.hidden_states(sequences, options))
    else:
        given = engine.forward_backward(sequences, options).loss
    assert abs(given - loss) <= BOUND * abs(loss)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def check_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are expanded a few tokens at a time, and kept in segments of a few."""
    dials = dict(row)
    family, kind, segment_tokens = (dials.pop(n) for n in ("family", "kind", "segment_tokens"))
    if segment_tokens:
        monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: segment_tokens)
        monkeypatch.setattr("furlong.ops.latent._MIN_TOKENS", 3)
    dials["order"] = "layer-first" if dials["stage_layers"] else "chunk-first"
    dials["stage_layers"] = dials["stage_layers"] or None
    check(family, furlong.ChunkOptions(**dials), kind)


@pytest.mark.parametrize("row", sorted(ONE_EACH, key=lambda r: (-r["size"], str(r))), ids=str)
@pytest.mark.few(4)
def test_every_family_is_exact(row, monkeypatch):
    check_row(row, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in sorted(FEW + PAIRS, key=str) if row not in ONE_EACH], ids=str
)
def test_every_pair_of_dials_is_exact(row, monkeypatch):
    check_row(row, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("row", sorted(TRIPLES, key=str), ids=str)
def test_every_triple_of_dials_is_exact(row, monkeypatch):
    check_row(row, monkeypatch)


ADAPTED = (
    "qwen3_next", "kimi_linear", "lfm2", "bamba", "jamba", "mamba2", "zamba2",
)  # fmt: skip


@pytest.mark.parametrize(
    "family", ["nemotron_h", *(pytest.param(f, marks=pytest.mark.slow) for f in ADAPTED)]
)
def test_adapters_on_all_linear_layers(family):
    check(family, furlong.ChunkOptions(size=16, keep="kv"), "lora")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nemotron_h", "lfm2"])
def test_the_mean_over_every_draw_of_four_chunks_is_the_gradient(family):
    model = hybrids.build(family, twin=True)
    sequences = batch([27, 7], vocab_size=VOCAB_SIZE, masked=[range(3)])
    reference_loss(model, sequences)
    truth, mean = take_grads(model), {}
    engine = furlong.Engine(model)
    options = furlong.ChunkOptions(size=7, keep="attention", num_retained=0, hybrid=False)
    whole = engine.plan([len(s["input_ids"]) for s in sequences], options)
    assert len(whole.chunks) == 5
    for draw in itertools.product((False, True), repeat=4):
        drawn = dict.fromkeys(itertools.compress(range(4), draw), Factors(2, 2))
        engine.run(sample_backwards(whole, drawn | {4: EXACT}, report_loss=False), sequences)
        for name, grad in take_grads(model).items():
            mean[name] = mean.get(name, 0) + grad / 2**4
    assert worst_relative_error(mean, truth) <= BOUND


def test_a_decoder_inside_a_model_that_calls_itself_its_decoder():
    """The trainer's own forward of Llama 4 goes through chunks."""
    model, sequences, _, truth = model_and_truth("llama4")
    divisor = sum(int((s["labels"][1:] != -100).sum()) for s in sequences)
    furlong.chunked(model, furlong.ChunkOptions(size=16))
    try:
        for sequence in sequences:
            logits = model(input_ids=sequence["input_ids"][None]).logits[0, :-1]
            loss = cross_entropy(logits, sequence["labels"][1:], reduction="sum")
            (loss / divisor).backward()
    finally:
        furlong.unchunked(model)
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def test_keys_that_layers_share_are_stored_once(monkeypatch):
    """Layers 4 and 5 of 6 attend to the keys and values of layers 2 and 3."""
    written = set()
    plain = KVStore.write

    def write(store, seq_id, layer, *more):
        written.add(layer)
        plain(store, seq_id, layer, *more)

    monkeypatch.setattr(KVStore, "write", write)
    for options in (
        furlong.ChunkOptions(size=7, num_retained=1, keep="attention"),
        furlong.ChunkOptions(size=16, recompute_layers=6),
    ):
        written.clear()
        check(SHARED, options)
        assert written == {0, 1, 2, 3}


def test_layers_that_share_keys_are_not_cut_into_stages():
    model, sequences, *_ = model_and_truth(SHARED)
    options = furlong.ChunkOptions(size=16, order="layer-first", stage_layers=3)
    with pytest.raises(UnsupportedModelError, match="cut between any two layers"):
        furlong.forward_backward(model, sequences, options)
