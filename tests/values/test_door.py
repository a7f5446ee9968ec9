"""`furlong.chunked`: a model that trainers of others call whole; its decoder runs in chunks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers import hybrids
from helpers.ranks import run_ranks
from helpers.tiny_families import build, build_other
from helpers.wide_norms import widen_norms
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

import furlong
from furlong.errors import ConfigError, UnsupportedModelError, UserError
from furlong.models.attention import CACHE_ARGUMENTS
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
IDS = torch.randint(3, 96, (3, 29), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 29, [1] * 20 + [0] * 9, [1] * 3 + [0] * 26])
LEFT = RIGHT.flip(1)
PACKED = torch.cat([torch.arange(12), torch.arange(4), torch.arange(13)])[None]
CALLS: dict[str, dict[str, Any]] = {
    "whole rows": {"input_ids": IDS},
    "padded behind": {"input_ids": IDS, "attention_mask": RIGHT},
    "padded in front": {"input_ids": IDS, "attention_mask": LEFT},
    "padded in front, with positions": {
        "input_ids": IDS, "attention_mask": LEFT,
        "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0),
    },
    "packed": {"input_ids": IDS[:1], "position_ids": PACKED, "use_cache": False},
    "packed rows": {
        "input_ids": IDS, "position_ids": PACKED.expand(3, -1), "use_cache": False,
    },
    "positions from 5 on": {"input_ids": IDS[:1], "position_ids": torch.arange(5, 34)[None]},
    "the last logits": {"input_ids": IDS, "logits_to_keep": 4, "use_cache": False},
    "with TRL's margin": {"input_ids": IDS, "margin": torch.ones(3), "use_cache": False},
}  # fmt: skip
OPTIONS = [
    furlong.ChunkOptions(size=8, keep="kv"), furlong.ChunkOptions(size=5, keep="attention"),
    furlong.ChunkOptions(size=64, keep="input"),
]  # fmt: skip
MODELS = {
    "llama": lambda: widen_norms(build("llama")),
    "mixtral": lambda: widen_norms(build("mixtral")),
    "gpt2 tied": lambda: build("gpt2", tie_word_embeddings=True),
}


def loss_of(model: Any, call: dict[str, Any]) -> Tensor:
    """A loss of all real tokens' logits."""
    logits = model(**call).logits
    mask = call.get("attention_mask", torch.ones_like(IDS))[: len(logits), -logits.shape[1] :]
    labels = call["input_ids"][:, -logits.shape[1] :]
    each = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * mask.flatten()).sum() + logits[mask.bool()].logsumexp(-1).pow(2).mean()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (call, OPTIONS[i % 3])
        for i, call in enumerate(CALLS)
    ],
)  # fmt: skip
@pytest.mark.few(8)
def test_calls_have_the_models_own_gradients(
    model: Any, call: str, options: furlong.ChunkOptions
) -> None:
    expected = loss_of(model, CALLS[call])
    expected.backward()
    truth = take_grads(model)
    assert furlong.chunked(model, options) is model
    try:
        found = loss_of(model, CALLS[call])
        found.backward()
    finally:
        furlong.unchunked(model)
    assert found.item() == pytest.approx(expected.item(), rel=BOUND)
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    assert "forward" not in model.get_decoder().__dict__


@pytest.fixture(scope="module")
def chunked() -> Any:
    return furlong.chunked(build("llama"), furlong.ChunkOptions(size=8, keep="kv"))


def test_labels_go_through_the_models_own_loss(chunked: Any) -> None:
    labels = IDS.masked_fill(LEFT == 0, -100)
    labels[1:, :-2] = -100
    call = {"input_ids": IDS, "attention_mask": LEFT, "labels": labels}
    chunked(**call).loss.backward()
    grads = take_grads(chunked)
    furlong.unchunked(chunked)(**call).loss.backward()
    furlong.chunked(chunked, furlong.ChunkOptions(size=8, keep="kv"))
    assert worst_relative_error(grads, take_grads(chunked)) <= 2e-6  # it is float32


def ran(model: Any, **call: Any) -> int:
    """Rows of the longest call of a layer."""
    rows: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    model(**call)
    rows.clear()  # with a hook it was checked anew
    model(**call)
    hook.remove()
    return max(rows)


def test_what_wants_a_cache_and_no_gradient_goes_the_old_way(chunked: Any) -> None:
    ids = IDS[:1]
    assert ran(chunked, input_ids=ids) == 8
    with torch.no_grad():
        assert ran(chunked, input_ids=ids) == 8  # it trains
        assert ran(chunked, input_ids=ids, use_cache=True) == 29
        for name in CACHE_ARGUMENTS:  # of whatever release the caller was written for
            assert ran(chunked, input_ids=ids, **{name: DynamicCache()}) == 29
        chunked.eval()
        assert ran(chunked, input_ids=ids, use_cache=False) == 8
        assert ran(chunked, input_ids=ids) == 29
        cache = chunked(input_ids=ids).past_key_values
        assert cache.get_seq_length() == 29
        step = chunked(input_ids=ids[:, :1], past_key_values=cache).logits
        tokens = chunked.generate(ids[:, :5], max_new_tokens=6, do_sample=False)
    furlong.unchunked(chunked)
    with torch.no_grad():
        whole = chunked(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(step, whole, rtol=1e-10, atol=1e-10)
        assert torch.equal(tokens, chunked.generate(ids[:, :5], max_new_tokens=6, do_sample=False))
    furlong.chunked(chunked.train(), furlong.ChunkOptions(size=8, keep="kv"))


def test_evaluation_makes_no_cache_and_goes_in_chunks() -> None:
    """`config.use_cache` speaks where a call does not, and a call with labels asks for a loss."""
    model = furlong.chunked(build("llama"), OPTIONS[0]).eval()
    ids = IDS[:1]
    with torch.no_grad():
        assert ran(model, input_ids=ids, labels=ids) == 8
        assert ran(model, input_ids=ids, labels=ids, use_cache=True) == 29
        expected = model(input_ids=ids, labels=ids).loss
        with torch.inference_mode():
            assert model(input_ids=ids, labels=ids).loss == expected
        model.config.use_cache = False
        assert ran(model, input_ids=ids) == 8
        rows = []
        hook = model.model.layers[0].register_forward_pre_hook(
            lambda _, x: rows.append(x[0].shape[1])
        )
        model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)
        assert rows == [29, 1, 1]
        hook.remove()


@pytest.mark.slow
def test_copies_have_no_door(chunked: Any, tmp_path: Any) -> None:
    chunked.save_pretrained(tmp_path)
    copies = [
        copy.deepcopy(chunked), pickle.loads(pickle.dumps(chunked)),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train(),
    ]  # fmt: skip
    for other in copies:
        assert ran(other, input_ids=IDS[:1]) == 29
        torch.testing.assert_close(other(input_ids=IDS).logits, chunked(input_ids=IDS).logits)
    assert ran(furlong.chunked(copies[0], furlong.ChunkOptions(size=4)), input_ids=IDS[:1]) == 4
    assert ran(chunked, input_ids=IDS[:1]) == 8
    assert "furlong" not in " ".join(chunked.state_dict())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a cache with gradients": ({"use_cache": True}, "a cache together with gradients"),
    "embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 32).double()},
        "prompt tuning and images train without furlong",
    ),
    "all hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "images": ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "train on text alone"),
    "attention in both directions": ({"is_causal": False}, "is_causal=False"),
    "packing without positions": ({"cu_seq_lens_q": torch.tensor([0, 29])}, "cu_seq_lens_q"),
    "token types": ({"token_type_ids": torch.zeros_like(IDS)}, "token_type_ids"),
    "a 4D mask": ({"attention_mask": torch.zeros(3, 1, 29, 29)}, "attention is causal"),
    "a mask of several kinds": ({"attention_mask": {"full_attention": RIGHT}}, "of type dict"),
    "holes": ({"attention_mask": RIGHT - RIGHT * (IDS % 2)}, "holes in row 0"),
    "an empty row": ({"attention_mask": RIGHT * torch.tensor([[1], [0], [1]])}, "no token"),
    "packed beside a mask": (
        {"attention_mask": torch.ones_like(IDS), "position_ids": PACKED.expand(3, -1)},
        "jump within row 0, beside an attention_mask",
    ),
    "packed beside a cache": (
        {"position_ids": PACKED.expand(3, -1)}, "jump within row 0, beside a cache",
    ),
    "positions of other rows": ({"position_ids": torch.arange(7)[None]}, "(1, 7)"),
    "positions below 0": ({"position_ids": torch.arange(-1, 28)[None]}, "below 0"),
    "ids beyond": ({"input_ids": torch.full((1, 4), 96)}, "token id 96"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_door_does_not_know_is_refused_by_name(chunked: Any, case: str) -> None:
    call, told = REFUSED[case]
    with pytest.raises(UserError) as error:
        chunked.model(**{"input_ids": IDS, **call})
    parts = error.value.given, error.value.required, error.value.source, error.value.change
    assert all(parts) and told in f"{parts[0]} {parts[1]} {parts[3]}"
    assert ran(chunked, input_ids=IDS[:1]) == 8


def test_models_and_options_that_cannot_be_chunked_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="router loss"):
        furlong.chunked(build_other("doge", is_moe=True, output_router_logits=True))
    with pytest.raises(ConfigError, match="keep = 'all'"):
        furlong.chunked(build("llama"), furlong.ChunkOptions(keep="all"))
    model = build("llama")
    model.model.forward = model.model.forward
    with pytest.raises(ConfigError, match="a forward that was set on it"):
        furlong.chunked(model)


def test_another_head_than_a_language_models() -> None:
    """A reward model: its scores of the last tokens, chosen against rejected."""
    config = build("llama").config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).double().train()
    call = {"input_ids": IDS[:2] * RIGHT[:2], "attention_mask": RIGHT[:2]}  # 0 is padding
    grads = []
    for options in (None, furlong.ChunkOptions(size=8, keep="attention")):
        if options is not None:
            furlong.chunked(model, options)
            assert ran(model, **call) == 8
        scores = model(**call).logits[:, 0]
        (scores[0] - scores[1]).sigmoid().log().backward()
        grads.append(take_grads(model))
    assert worst_relative_error(grads[1], grads[0]) <= BOUND
    with pytest.raises(UnsupportedModelError, match="no causal language-model head"):
        furlong.Engine(model)


def test_a_forgotten_model_is_freed() -> None:
    model = furlong.chunked(build("llama"), furlong.ChunkOptions(size=8))
    model(input_ids=IDS).logits.sum().backward()
    gone = weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None


def test_autocast_and_checkpointing_of_the_caller() -> None:
    """As transformers' Trainer calls a model in bf16 with gradient checkpointing."""
    model = furlong.chunked(build("llama", torch.float32), furlong.ChunkOptions(size=8))
    model.gradient_checkpointing_enable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, CALLS["padded in front"])
    loss.backward()
    found = take_grads(model)
    furlong.unchunked(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model, CALLS["padded in front"]).backward()
    assert 0 < worst_relative_error(found, take_grads(model)) < 0.2


@pytest.mark.parametrize("family", [pytest.param("jamba", marks=pytest.mark.slow), "mamba"])
def test_states_of_recurrent_layers_are_relayed_behind_a_door(family: str) -> None:
    """They are found in the decoder's cache, of which the door's own signature says nothing.

    transformers' scans round to float32.
    """
    model: Any = hybrids.build(family)
    for call in ("whole rows", "padded behind"):
        loss_of(model, CALLS[call]).backward()
        truth = take_grads(model)
        furlong.chunked(model, furlong.ChunkOptions(size=8, keep="kv"))
        try:
            loss_of(model, CALLS[call]).backward()
        finally:
            furlong.unchunked(model)
        assert worst_relative_error(take_grads(model), truth) <= 2e-6


def on_replica(rank: int, *, unused: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients of two batches of this process, and the rows of the longest call.
    `unused`: whether it has parameters, too, that no call reaches."""
    model: Any = furlong.chunked(build("llama"), OPTIONS[0])
    rows: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    if unused:
        model.model.beside = torch.nn.Linear(2, 2, dtype=torch.float64)
    replica = DistributedDataParallel(model, find_unused_parameters=unused)
    for number, ids in enumerate(batches_of(rank)):
        with nullcontext() if number else replica.no_sync():
            replica(input_ids=ids, use_cache=False).logits.pow(2).sum().backward()
        with torch.no_grad():  # one process evaluates more batches than the other
            for _ in range(rank * (1 + number)):
                model(input_ids=ids, use_cache=False)
    return take_grads(model), max(rows)


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(3, 96, (2, n), generator=generator) for n in (21, 34)]


@pytest.mark.slow
@pytest.mark.parametrize("unused", [False, True])
def test_replicas_of_ddp_add_up(unused: bool) -> None:
    model = build("llama")
    for ids in (ids for rank in range(2) for ids in batches_of(rank)):
        (model(input_ids=ids).logits.pow(2).sum() / 2).backward()
    truth = take_grads(model)
    for grads, rows in run_ranks(partial(on_replica, unused=unused), num_ranks=2):
        beside = [grads.pop(name) for name in [*grads] if "beside" in name]
        assert not any(grad.any() for grad in beside)
        assert worst_relative_error(grads, truth) <= BOUND
        assert rows <= 16  # in the check at the start; chunks have 8
