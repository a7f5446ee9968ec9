"""Losses of one phase whose sequences begin alike: computed once, and as exact as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import hybrids
from helpers.batches import batch
from helpers.forked import FOUR, NESTED, Forked
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import Tensor
from torch.nn.functional import cross_entropy

import furlong
from furlong.errors import DataError
from furlong.testing import num_labels, reference_loss, take_grads, worst_relative_error

BOUND = 1e-12
OPTIONS = [
    furlong.ChunkOptions(size=16, keep="kv", num_retained=0),
    furlong.ChunkOptions(size=20, keep="attention", offload="cpu", num_retained=2),
    furlong.ChunkOptions(size=16, order="layer-first", stage_layers=2, keep="input"),
    furlong.ChunkOptions(size=16, keep="all"),
    furlong.ChunkOptions(size=20, keep="input", recompute_layers=1),
]


@pytest.fixture(scope="module")
def subject() -> tuple[Any, furlong.Engine]:
    model = widen_norms(build("llama"))
    return model, furlong.Engine(model)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda own: f"{own.keep}-{own.order}")
@pytest.mark.parametrize("tree", [FOUR, NESTED], ids=["four", "nested"])
@pytest.mark.few(3)
def test_the_cross_entropy_is_exact(
    subject: Any, tree: Forked, options: furlong.ChunkOptions
) -> None:
    model, engine = subject
    sequences = [batch([30], seed=8)[0], *tree.answers()]
    expected = reference_loss(model, sequences)
    truth = take_grads(model)
    result = engine.forward_backward(sequences, options, share_prompts=True)
    assert result.loss == pytest.approx(expected, rel=BOUND)
    assert result.num_valid_tokens == num_labels(sequences)
    assert sorted(result.plan.seq_lens) == sorted([30, sum(tree.lens)])
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    shared = engine.forward_backward(sequences, options, backward=False, share_prompts=True)
    alone = engine.forward_backward(sequences, options, backward=False)
    for one, other in zip(shared.token_losses, alone.token_losses, strict=True):
        torch.testing.assert_close(one, other, rtol=BOUND, atol=BOUND)


def test_extras_and_weights_stay_with_their_sequence(subject: Any) -> None:
    """A clipped ratio, whose advantages are the sequences' own; the prompt's last token predicts
    the first one of each."""
    model, engine = subject
    sequences: list[dict[str, Tensor]] = []
    for number, answer in enumerate(FOUR.answers()):
        one = torch.ones(len(answer["labels"]), dtype=torch.float64)
        extras = {"advantage": one * (number - 1.3), "token_weights": one * (0.5 + number)}
        sequences.append({**answer, **extras})
    log_prob = furlong.values.log_prob()

    def loss(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        return -(log_prob(logits, labels, extras) + 4).exp() * extras["advantage"]

    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        logits = model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0, :-1]
        own = -cross_entropy(logits, sequence["labels"][1:], reduction="none", ignore_index=-100)
        each = -(own + 4).exp() * sequence["advantage"][1:] * sequence["token_weights"][1:]
        total = total + each[sequence["labels"][1:] != -100].sum()
    (total / 50).backward()
    truth = take_grads(model)
    result = engine.forward_backward(sequences, OPTIONS[0], 50, token_loss=loss, share_prompts=True)
    assert result.loss_sum == pytest.approx(total.item(), rel=BOUND)
    assert len(result.plan.seq_lens) == 1
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def test_a_tree_may_have_more_tokens_than_the_model_positions() -> None:
    model = build("gpt2", n_positions=max(len(s["input_ids"]) for s in FOUR.answers()))
    engine = furlong.Engine(model)
    expected = reference_loss(model, FOUR.answers())
    found = engine.forward_backward(FOUR.answers(), OPTIONS[0], share_prompts=True)
    assert found.loss == pytest.approx(expected, rel=BOUND)
    with pytest.raises(DataError, match=f"{model.config.n_positions + 1} tokens"):
        longer = batch([model.config.n_positions + 1])
        engine.forward_backward([*longer, *longer], OPTIONS[0], share_prompts=True)


def test_what_draws_or_carries_states_shares_nothing(subject: Any) -> None:
    _, engine = subject
    lens = [len(s["input_ids"]) for s in FOUR.answers()]
    sampling = furlong.ChunkOptions(size=16, keep="kv", sample={"chunks": 3})
    result = engine.forward_backward(FOUR.answers(), sampling, share_prompts=True)
    assert list(result.plan.seq_lens) == lens
    engine.model.model.zero_grad()
    hybrid = furlong.Engine(hybrids.build("jamba"))
    result = hybrid.forward_backward(FOUR.answers(), OPTIONS[0], share_prompts=True)
    assert list(result.plan.seq_lens) == lens
