"""Losses that are a sum over tokens, in one phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from naive_losses import COLUMNS, FUNCTION, answers, whole_columns
from torch import Tensor

import furlong
from furlong.errors import ConfigError, DataError
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
SEQUENCES = answers()
NUM_LABELS = sum(int((s["labels"][1:] != -100).sum()) for s in SEQUENCES)
Of = Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]


def clipped(own: dict[str, Tensor], extras: dict[str, Tensor]) -> Tensor:
    ratio = (own["log_prob"] - extras["old"]).exp()
    return -torch.minimum(ratio * 1.3, ratio.clamp(0.8, 1.2) * 1.3)


LOSSES: dict[str, Of] = {
    "smoothing": lambda own, _: (
        -0.9 * own["log_prob"] - 0.1 * (own["mean_logit"] - own["log_sum_exp"])
    ),
    "z-loss": lambda own, _: -own["log_prob"] + 1e-3 * own["log_sum_exp"] ** 2,
    "entropy bonus": lambda own, _: -own["log_prob"] - 0.01 * own["entropy"],
    "distillation": lambda own, _: own["kl"],
    "clipped ratio": clipped,
}
OPTIONS = [
    furlong.ChunkOptions(size=8, keep="kv", num_retained=0),
    furlong.ChunkOptions(size=5, keep="attention", offload="cpu", num_retained=2),
    furlong.ChunkOptions(size=16, order="layer-first", stage_layers=2, keep="input"),
    furlong.ChunkOptions(size=64, keep="all"),
    furlong.ChunkOptions(size=8, keep="input", recompute_layers=1),
]


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def subject(request: pytest.FixtureRequest) -> tuple[Any, furlong.Engine]:
    model = widen_norms(build(request.param))
    return model, furlong.Engine(model)


def of_logits(loss: Of) -> furlong.values.TokenFunction:
    """The loss as a function of logits."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        own = dict(zip(COLUMNS, FUNCTION(logits, labels, extras).unbind(1), strict=True))
        return loss(own, dict(extras))

    return of_tile


def whole_sum(model: Any, loss: Of, *, weighted: bool = False) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for own, sequence in zip(whole_columns(model, SEQUENCES), SEQUENCES, strict=True):
        mask = sequence["labels"] != -100
        mask[0] = False
        weights = sequence.get("token_weights", torch.ones(len(mask))) if weighted else 1.0
        total = total + (loss(own, sequence) * weights)[mask].sum()
    return total


@pytest.mark.parametrize(("name", "options"), zip(LOSSES, OPTIONS, strict=True))
def test_sums_over_tokens_have_the_models_own_gradients(
    subject: Any, name: str, options: furlong.ChunkOptions
) -> None:
    model, engine = subject
    expected = whole_sum(model, LOSSES[name]) / NUM_LABELS
    expected.backward()
    truth = take_grads(model)
    result = engine.forward_backward(SEQUENCES, options, token_loss=of_logits(LOSSES[name]))
    assert result.loss == pytest.approx(expected.item(), rel=BOUND)
    assert result.num_valid_tokens == NUM_LABELS
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    evaluated = engine.forward_backward(
        SEQUENCES, options, backward=False, token_loss=of_logits(LOSSES[name])
    )
    assert evaluated.loss == pytest.approx(expected.item(), rel=BOUND)
    each = torch.cat(evaluated.token_losses)
    assert float(each.sum()) / NUM_LABELS == pytest.approx(expected.item(), rel=BOUND)


@pytest.mark.parametrize("token_loss", [None, of_logits(LOSSES["z-loss"])])
def test_weights_of_tokens(subject: Any, token_loss: Any) -> None:
    """Also 0 and negative ones; calls add up by their divisor."""
    model, engine = subject
    generator = torch.Generator().manual_seed(3)
    for sequence in SEQUENCES:
        weights = torch.randn(len(sequence["labels"]), generator=generator)
        sequence["token_weights"] = torch.where(weights > 1, 0.0, weights)
    try:
        if token_loss is None:
            total = torch.zeros((), dtype=torch.float64)
            for sequence in SEQUENCES:
                ids, labels = sequence["input_ids"], sequence["labels"]
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                each = torch.nn.functional.cross_entropy(
                    logits, labels[1:], reduction="none", ignore_index=-100
                )
                total = total + (each * sequence["token_weights"][1:]).sum()
        else:
            total = whole_sum(model, LOSSES["z-loss"], weighted=True)
        (total / 17).backward()
        truth = take_grads(model)
        losses = [
            engine.forward_backward(part, OPTIONS[0], 17, token_loss=token_loss).loss
            for part in (SEQUENCES[:1], SEQUENCES[1:])
        ]
        assert sum(losses) == pytest.approx(total.item() / 17, rel=BOUND)
        assert worst_relative_error(take_grads(model), truth) <= BOUND
    finally:
        for sequence in SEQUENCES:
            del sequence["token_weights"]


def test_chunks_without_a_label_touch_no_head(subject: Any) -> None:
    """A long prompt: its chunks relay gradients alone."""
    model, engine = subject
    rows: list[int] = []
    loss = furlong.values.log_prob()

    def counting(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        rows.append(len(labels))
        return loss(logits, labels, extras)

    engine.forward_backward(SEQUENCES[:1], OPTIONS[0], token_loss=counting)
    model.zero_grad()
    assert sum(rows) == int((SEQUENCES[0]["labels"] != -100).sum())


def test_the_arena_of_a_failed_loss_is_empty(subject: Any) -> None:
    model, engine = subject

    def fail(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        raise ArithmeticError("in the loss")

    with pytest.raises(ArithmeticError, match="in the loss"):
        engine.forward_backward(SEQUENCES, OPTIONS[0], token_loss=fail)
    model.zero_grad()
    assert engine._session.state.opened.arena.taken_bytes == 0


def test_a_loss_of_another_shape_is_refused(subject: Any) -> None:
    _, engine = subject
    with pytest.raises(ConfigError, match=r"token_loss returned \(10, 2\) for 10 tokens"):
        engine.forward_backward(
            SEQUENCES[1:2], furlong.ChunkOptions(size=64),
            token_loss=lambda logits, labels, extras: logits[:, :2],
        )  # fmt: skip
    with pytest.raises(ConfigError, match="token_loss returned"):
        engine.forward_backward(
            SEQUENCES, OPTIONS[0], token_loss=lambda logits, labels, extras: logits.mean()
        )


def test_extras_without_a_loss_of_ones_own_are_refused(subject: Any) -> None:
    _, engine = subject
    with pytest.raises(DataError, match="teacher_ids"):
        engine.forward_backward(SEQUENCES, OPTIONS[0])
