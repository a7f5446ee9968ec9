"""Calls that nobody would plan: sequences that begin alike or end early, labels that are missing,
several calls under one loss, values that get no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.nightly import SEED
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_losses import shared, whole_values
from torch import Tensor
from torch.nn.functional import logsigmoid

import furlong
from furlong.testing import TokenSequences, take_grads, worst_relative_error

BOUND = 1e-12
IDS = torch.randint(3, 96, (4, 60), generator=torch.Generator().manual_seed(4))
ENDS = torch.randint(3, 96, (5, 40), generator=torch.Generator().manual_seed(6))


def sequence(prompt: int, prompt_tokens: int, end: int, end_tokens: int, labels: str) -> Any:
    """Tokens of a prompt, and behind them those of an answer."""
    ids = torch.cat([IDS[prompt, :prompt_tokens], ENDS[end, :end_tokens]])
    own = ids.clone()
    if labels == "answer":
        own[:prompt_tokens] = -100
    elif labels == "none":
        own[:] = -100
    elif labels == "scattered":
        own[::3] = -100
    return {"input_ids": ids, "labels": own}


SEQUENCES = st.builds(
    sequence, st.integers(0, 1), st.integers(1, 60), st.integers(0, 2), st.integers(0, 40),
    st.sampled_from(["answer", "answer", "all", "none", "scattered"]),
)  # fmt: skip
LABELLED = st.builds(
    sequence, st.integers(0, 1), st.integers(2, 60), st.integers(0, 2), st.integers(1, 40),
    st.just("all"),
)  # fmt: skip
CALLS = st.lists(st.tuples(LABELLED, st.lists(SEQUENCES, max_size=4)), min_size=1, max_size=2)
GRADIENTS = st.sampled_from(["returned", "added"])
OPTIONS = st.builds(
    furlong.ChunkOptions, size=st.integers(3, 40),
    keep=st.sampled_from(["kv", "attention", "input"]),
    offload=st.sampled_from(["none", "cpu", "disk"]), recompute_layers=st.integers(0, 3),
)  # fmt: skip
FAMILIES = st.sampled_from(["llama", "llama", "mixtral", "qwen2 tied"])
USES = st.lists(
    st.sampled_from(["sum", "detached", "unused", "squares", "product"]), min_size=10, max_size=10
)


def loss_of(values: list[Tensor], uses: list[str]) -> Tensor:
    """A loss that couples all sequences, some of which get no gradient."""
    total = values[0].sum() * 0.1
    for own, use in zip(values, uses, strict=False):
        if use == "sum":
            total = logsigmoid(0.01 * (total - own.sum())) + total
        elif use == "detached":
            total = total * (1 + 1e-3 * own.detach().sum())
        elif use == "squares":
            total = total + 1e-2 * own.pow(2).sum()
        elif use == "product":  # no sum over tokens
            total = total + 1e-2 * own[len(own) // 2] * values[0][-1]
    return total


@pytest.mark.slow
@settings(max_examples=150 if SEED else 15)
@given(CALLS, OPTIONS, USES, GRADIENTS, FAMILIES)
def test_any_calls_under_one_loss(
    calls: list[Any], options: furlong.ChunkOptions, uses: list[str], gradients: Any, family: str
) -> None:
    model, engine = shared(family)
    shares = family != "mixtral"  # its router rounds to float32 what answers add up at a prompt
    batches: list[TokenSequences] = [[first, *more] for first, more in calls]
    whole = [own for sequences in batches for own in whole_values(model, sequences)]
    loss_of(whole, uses).backward()
    truth = take_grads(model)
    found = [
        own
        for sequences in batches
        for own in engine.token_values(
            sequences, options, gradients=gradients, share_prompts=shares
        )
    ]
    moved = [float((a - b).detach().abs().max()) for a, b in zip(found, whole, strict=True)]
    assert max(moved) <= BOUND * 10  # log-probabilities are up to 10
    loss_of(found, uses).backward()
    del found  # of a call of which no value was used something is held as long
    grads = take_grads(model)
    for name in truth.keys() - grads.keys():
        assert not truth[name].any(), name
    # what nobody reaches has no gradient, or zeros
    wide = {name: grads.get(name, torch.zeros_like(x)) for name, x in truth.items()}
    assert worst_relative_error(wide, truth) <= BOUND
    assert engine._session.state.opened.arena.taken_bytes == 0


def test_packed_rows_that_repeat_a_prompt() -> None:
    """Behind the door, as sequences of one row: positions tell them apart."""
    model, _ = shared()
    parts = [sequence(0, 40, end, 17, "all")["input_ids"] for end in range(3)]
    call = {
        "input_ids": torch.cat(parts)[None], "use_cache": False,
        "position_ids": torch.cat([torch.arange(57)] * 3)[None],
    }  # fmt: skip
    model(**call).logits.pow(2).sum().backward()
    truth = take_grads(model)
    rows: list[int] = []
    options = furlong.ChunkOptions(size=16, keep="kv")
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[1]))
    try:
        furlong.chunked(model, options)
        rows.clear()  # with a hook it was checked anew
        logits = model(**call).logits
        assert sum(rows) == 40 + 3 * 17
        logits.pow(2).sum().backward()
    finally:
        hook.remove()
        furlong.unchunked(model)
    assert worst_relative_error(take_grads(model), truth) <= BOUND
