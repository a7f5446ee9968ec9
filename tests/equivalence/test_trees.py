"""Sequences that branch: loss and gradients of every answer with a prompt of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.batches import batch
from helpers.covering import Design, Row
from helpers.forked import FOUR, NESTED, ONE, PAIR, forks_of
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import nn

import furlong
from furlong.planners.orders import plan_on_device
from furlong.testing import reference_loss, take_grads, worst_relative_error

OTHERS = batch([11, 50], seed=5)
"""Packed beside trees, one of them cut."""


TREES = {"one": [ONE], "pair": [PAIR], "four": [FOUR], "nested": [NESTED], "two": [NESTED, FOUR]}


@functools.lru_cache(maxsize=10)
def subject(trees: str, family: str) -> tuple[nn.Module, float, dict[str, torch.Tensor]]:
    """A model, its loss and its gradients where each answer has a prompt of its own."""
    model = build(family, **({"sliding_window": 12} if family == "mistral" else {}))
    widen_norms(model)
    loss = reference_loss(model, [s for tree in TREES[trees] for s in tree.alone()] + OTHERS)
    return model, loss, take_grads(model)


DESIGN = Design(
    {
        "trees": tuple(TREES),
        "family": ("llama", "mistral"),  # windows reach back along the path
        "size": (25, 7, 16, 128),
        "keep": ("kv", "input", "attention", "all"),
        "num_retained": (0, 2),
        "hybrid": (True, False),
        "order": ("chunk-first", "layer-first"),
        "offload": ("none", "cpu", "disk"),
        "segment_tokens": (0, 7),  # of few: the end of one branch and the start of the next
    },
    {"num_retained": lambda c: c["keep"] != "all"},
    steering=["keep"],
)
FEW = DESIGN.array(2, num_orders=40)


def check(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    dials = dict(row)
    trees, family, segment_tokens = (dials.pop(n) for n in ("trees", "family", "segment_tokens"))
    if segment_tokens:
        monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: segment_tokens)
    model, loss, truth = subject(trees, family)
    own = TREES[trees]
    lens = [sum(tree.lens) for tree in own] + [len(s["input_ids"]) for s in OTHERS]
    options = furlong.ChunkOptions(**dials)
    plan = plan_on_device(lens, options, num_layers=3, forks=forks_of(*own))
    engine = furlong.Engine(model)
    found = engine.run(plan, [*(tree.joined() for tree in own), *OTHERS])
    assert engine._session.state.opened.arena.taken_bytes == 0
    assert abs(found.loss - loss) <= 1e-12 * abs(loss)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


@pytest.mark.parametrize("row", sorted(FEW, key=str), ids=str)
@pytest.mark.few(6)
def test_every_pair_of_dials_is_exact(row, monkeypatch) -> None:
    check(row, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("row", sorted(DESIGN.array(3, FEW), key=str), ids=str)
def test_every_triple_of_dials_is_exact(row, monkeypatch) -> None:
    check(row, monkeypatch)
