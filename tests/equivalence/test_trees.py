"""Sequences that branch: loss and gradients of every answer with a prompt of its own."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.batches import batch
from helpers.covering import Design, Row
from helpers.forked import FOUR, NESTED, ONE, PAIR, Forked, forks_of
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import nn

import furlong
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import plan_on_device
from furlong.testing import reference_loss, take_grads, worst_relative_error

OTHERS = batch([11, 50], seed=5)
"""Packed beside trees, one of them cut."""


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    mistral = build("mistral", sliding_window=12)
    return {"llama": widen_norms(build("llama")), "mistral": widen_norms(mistral)}


def plan_of(trees: list[Forked], **dials: Any) -> ChunkPlan:
    lens = [sum(tree.lens) for tree in trees] + [len(s["input_ids"]) for s in OTHERS]
    options = furlong.ChunkOptions(**dials)
    return plan_on_device(lens, options, num_layers=3, forks=forks_of(*trees))


def error(model: nn.Module, trees: list[Forked], **dials: Any) -> tuple[float, float]:
    """Of the loss and of the gradients."""
    truth = reference_loss(model, [s for tree in trees for s in tree.alone()] + OTHERS)
    gradients = take_grads(model)
    engine = furlong.Engine(model)
    found = engine.run(plan_of(trees, **dials), [*(tree.joined() for tree in trees), *OTHERS])
    assert engine._session.state.opened.arena.taken_bytes == 0
    loss = abs(found.loss - truth) / abs(truth)
    return loss, worst_relative_error(take_grads(model), gradients)


TREES = {"one": [ONE], "pair": [PAIR], "four": [FOUR], "nested": [NESTED], "two": [NESTED, FOUR]}
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
FEW = DESIGN.array(2)


def check(models: dict[str, nn.Module], row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("trees", "family", "segment_tokens")
    if segment_tokens := row["segment_tokens"]:
        monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: segment_tokens)
    dials = {dial: value for dial, value in row.items() if dial not in own}
    assert max(error(models[row["family"]], TREES[row["trees"]], **dials)) <= 1e-12


@pytest.mark.parametrize("row", FEW, ids=str)
def test_every_pair_of_dials_is_exact(models, row, monkeypatch) -> None:
    check(models, row, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("row", DESIGN.array(3, FEW), ids=str)
def test_every_triple_of_dials_is_exact(models, row, monkeypatch) -> None:
    check(models, row, monkeypatch)
