"""Losses of post-training on per-token columns, and those columns by the model's own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from helpers.batches import batch
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from torch import Tensor
from torch.nn.functional import logsigmoid

import furlong
from furlong.testing import TokenSequences

COLUMNS = ("log_prob", "entropy", "log_sum_exp", "mean_logit", "kl")
Columns = list[dict[str, Tensor]]
"""By sequence: a value (T,) for each name; entry t is about token t."""

TEMPERATURE = 0.7
FUNCTION = furlong.values.stack(
    furlong.values.log_prob(TEMPERATURE), furlong.values.entropy(), furlong.values.log_sum_exp(),
    furlong.values.mean_logit(), furlong.values.top_k_kl(),
)  # fmt: skip


@functools.cache
def shared(family: str = "llama") -> tuple[Any, furlong.Engine]:
    """One model of a family for all tests, and its engine."""
    tied = {"tie_word_embeddings": True} if family.endswith(" tied") else {}
    model = widen_norms(build(family.removesuffix(" tied"), **tied))
    return model, furlong.Engine(model)


def answers() -> TokenSequences:
    """Two answers to each of two prompts, with what a teacher and an older policy said of them."""
    sequences = batch([37, 30, 9, 6], masked=[range(20), range(20), range(4), range(4)])
    generator = torch.Generator().manual_seed(1)
    for sequence in sequences:
        num_tokens = len(sequence["input_ids"])
        scores = torch.randn(num_tokens, 96, generator=generator, dtype=torch.float64)
        best = scores.log_softmax(-1).topk(5)
        sequence["teacher_ids"], sequence["teacher_log_probs"] = best.indices, best.values
        sequence["old"] = -4.5 + torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    return sequences


def whole_values(model: Any, sequences: TokenSequences) -> list[Tensor]:
    """Log-probabilities by the model's own forward, one sequence at a time."""
    found = []
    for sequence in sequences:
        ids, labels = sequence["input_ids"], sequence["labels"]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        own = torch.where(labels[1:] != -100, own, torch.zeros_like(own))
        found.append(torch.cat([own.new_zeros(1), own]))
    return found


def whole_columns(model: Any, sequences: TokenSequences) -> Columns:
    """The columns from the whole logits of the model's own forward."""
    return [_whole(model, sequence) for sequence in sequences]


def given_columns(values: list[Tensor]) -> Columns:
    """The columns that furlong has computed by `FUNCTION`."""
    return [dict(zip(COLUMNS, own.unbind(1), strict=True)) for own in values]


def _whole(model: Any, sequence: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = sequence["input_ids"]
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    probs = logits.softmax(-1)
    warm = (logits / TEMPERATURE).softmax(-1)
    rows = torch.arange(len(ids) - 1)
    known = sequence["teacher_log_probs"][1:].exp()
    own = probs.gather(1, sequence["teacher_ids"][1:])
    found = {
        "log_prob": warm[rows, ids[1:]].log(),
        "entropy": -(probs * probs.log()).sum(-1),
        "log_sum_exp": logits.exp().sum(-1).log(),
        "mean_logit": logits.sum(-1) / logits.shape[-1],
        "kl": (known * (known / own).log()).sum(-1)
        + (1 - known.sum(-1)) * ((1 - known.sum(-1)) / (1 - own.sum(-1))).log(),
    }
    mask = sequence["labels"][1:] != -100
    return {
        name: torch.cat([x.new_zeros(1), torch.where(mask, x, torch.zeros_like(x))])
        for name, x in found.items()
    }


def _sums(columns: Columns, sequences: TokenSequences) -> list[Tensor]:
    """The log-ratio of each answer to the older policy."""
    return [
        (own["log_prob"] - torch.where(s["labels"] != -100, s["old"], 0.0))[1:].sum()
        for own, s in zip(columns, sequences, strict=True)
    ]


def dpo(columns: Columns, sequences: TokenSequences) -> Tensor:
    a, b, c, d = _sums(columns, sequences)
    return -(logsigmoid(0.1 * (a - b)) + logsigmoid(0.1 * (c - d))) / 2


def kto(columns: Columns, sequences: TokenSequences) -> Tensor:
    ratios = _sums(columns, sequences)
    reference = torch.stack(ratios).mean().detach().clamp(min=0)
    wanted = [1 - torch.sigmoid(0.1 * (r - reference)) for r in ratios[::2]]
    unwanted = [1 - torch.sigmoid(0.1 * (reference - r)) for r in ratios[1::2]]
    return torch.stack([*wanted, *unwanted]).mean()


def grpo(columns: Columns, sequences: TokenSequences) -> Tensor:
    """Clipped ratios and the k3 estimate of the divergence, a mean over tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for own, sequence, advantage in zip(columns, sequences, (1.3, -0.7, 0.4, -1.1), strict=True):
        mask = sequence["labels"] != -100
        mask[0] = False
        log_ratio = (own["log_prob"] - sequence["old"])[mask]
        ratio = log_ratio.exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total - (clipped - 0.04 * ((-log_ratio).exp() + log_ratio - 1)).sum()
        count += int(mask.sum())
    return total / count


def every_column(columns: Columns, sequences: TokenSequences) -> Tensor:
    """Sums that `test_token_loss` takes in one phase."""
    return sum(  # type: ignore[return-value]
        (own["entropy"] - 0.1 * own["mean_logit"] + 1e-3 * own["log_sum_exp"] ** 2).sum()
        + own["kl"].mean()
        for own in columns
    )


LOSSES: dict[str, Callable[[Columns, TokenSequences], Tensor]] = {
    "dpo": dpo, "kto": kto, "grpo": grpo, "every column": every_column,
}  # fmt: skip
