"""Sequences that branch: loss and gradients of every answer with a prompt of its own."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.forked import FOUR, NESTED, ONE, PAIR, Forked, forks_of
from helpers.gradients import batch, reference_loss, take_grads, worst_relative_error
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import nn

import furlong
from furlong.plan.plan import ChunkPlan
from furlong.planners.orders import plan_on_device

OTHERS = batch([11, 50], seed=5)
"""Packed beside trees, one of them cut."""


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return widen_norms(build("llama"))


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
    assert engine._followed.kept.opened.arena.taken_bytes == 0
    loss = abs(found.loss - truth) / abs(truth)
    return loss, worst_relative_error(take_grads(model), gradients)


@pytest.mark.parametrize("size", [16, 25, 128])
@pytest.mark.parametrize("keep", ["kv", "attention", "input"])
@pytest.mark.parametrize("tree", [ONE, PAIR, FOUR, NESTED], ids=["one", "pair", "four", "nested"])
def test_a_shared_prompt_is_exact(llama: nn.Module, tree: Forked, keep: str, size: int) -> None:
    assert max(error(llama, [tree], keep=keep, size=size, num_retained=0)) <= 1e-12


@pytest.mark.parametrize(
    "dials",
    [
        {"num_retained": 2}, {"keep": "all"}, {"tier": "host"}, {"tier": "host", "keep": "input"},
        {"order": "layer-first", "keep": "input"}, {"order": "layer-first", "tier": "host"},
        {"hybrid": False},
    ],
    ids=str,
)  # fmt: skip
def test_every_dial_is_exact(llama: nn.Module, dials: dict[str, Any]) -> None:
    assert max(error(llama, [NESTED, FOUR], **{"size": 25, "keep": "kv", **dials})) <= 1e-12


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("size", [7, 16])
def test_windows_reach_back_along_the_path(size: int, tier: str) -> None:
    model = widen_norms(build("mistral", sliding_window=12))
    for keep in ("kv", "input"):
        assert max(error(model, [NESTED, PAIR], size=size, keep=keep, tier=tier)) <= 1e-12


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_segments_that_branches_share(
    family: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of few tokens hold the end of one branch and the start of the next."""
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 7)
    model = widen_norms(build(family))
    for keep in ("kv", "input"):
        assert max(error(model, [NESTED, FOUR], size=10, keep=keep, tier=tier)) <= 1e-12
