"""Families that read positions, or the place of a token in its row, in ways of their own."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hybrids
from helpers.attention_families import twin_of
from helpers.tiny_families import build_other
from test_door import CALLS, loss_of
from torch import Tensor

import furlong
from furlong.errors import DataError
from furlong.testing import take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8, keep="kv")


def row_by_row(model: Any, call: dict[str, Any]) -> Tensor:
    """The last hidden states of each sequence of a call by itself, by the model's own forward."""
    ids = call["input_ids"]
    positions = call["position_ids"].expand_as(ids)
    mask = call.get("attention_mask", torch.ones_like(ids)).bool()
    found = []
    for row, place, real in zip(ids, positions, mask, strict=True):
        own, at = row[real], place[real]
        starts = [*(at == 0).nonzero().flatten().tolist(), len(own)]
        for start, stop in pairwise(starts):
            found.append(model(input_ids=own[None, start:stop], use_cache=False).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("call", ["padded in front", "padded behind"])
def test_attention_blocks_begin_behind_the_padding(call: str) -> None:
    model = twin_of("llama4")
    loss_of(model, CALLS[call]).backward()
    truth = take_grads(model)
    loss_of(furlong.chunked(model, OPTIONS), CALLS[call]).backward()
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


@pytest.mark.parametrize(
    ("family", "call", "bound"),
    [
        ("llama4", "padded in front, with positions", 1e-12), ("llama4", "packed", 1e-12),
        ("jamba", "packed", 2e-6), ("recurrent_gemma", "packed", 2e-6),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_sequences_with_positions_of_their_own_are_as_if_each_were_alone(
    family: str, call: str, bound: float
) -> None:
    """transformers' Llama 4 takes the column for the position where it scales queries, and begins
    blocks of attention at the row; states of others go on. Their scans round to float32."""
    model: Any = twin_of(family) if family == "llama4" else hybrids.build(family)
    given = CALLS[call]
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    alone = row_by_row(model, given)
    assert float((model(**given).logits[mask] - alone).detach().abs().max()) > 1e-6
    alone.pow(2).sum().backward()
    truth = take_grads(model)
    found = furlong.chunked(model, OPTIONS)(**given).logits[mask]
    torch.testing.assert_close(found, alone, rtol=bound, atol=bound)
    found.pow(2).sum().backward()
    assert worst_relative_error(take_grads(model), truth) <= bound


def test_layers_that_carry_padding_in_their_states() -> None:
    model = furlong.chunked(hybrids.build("recurrent_gemma"), OPTIONS)
    for call in ("padded in front", "padded in front, with positions"):
        with pytest.raises(DataError, match="padding in front: its own recurrent layers"):
            loss_of(model, CALLS[call])
    loss_of(model, CALLS["padded behind"]).backward()


@pytest.mark.slow
def test_the_page_names_the_families_whose_masks_do_not_look_at_positions() -> None:
    """Behind the door their packed sequences are each alone all the same."""
    page = Path(__file__).parents[2] / "docs" / "post-training.md"
    [named] = re.findall(
        r"do not look at positions \((.*?) in transformers", page.read_text(), re.S
    )
    packed = {"input_ids": CALLS["packed"]["input_ids"], "use_cache": False}
    packed["position_ids"] = CALLS["packed"]["position_ids"].expand_as(packed["input_ids"])
    differ = set()
    for family in (*re.findall(r"[\w-]+(?=,|$| and)", named), "llama", "gpt2", "mixtral"):
        model: Any = build_other(family, is_decoder=True).eval()
        alone = row_by_row(model, packed)
        if float((model(**packed).logits.flatten(0, 1) - alone).abs().max()) > 1e-6:
            differ.add(family)
        found = furlong.chunked(model, OPTIONS)(**packed).logits.flatten(0, 1)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)  # some norms are float32
    assert differ == {
        "afmoe", "bert", "bert-generation", "biogpt", "electra", "ernie", "gpt_oss", "roc_bert",
    }  # fmt: skip
