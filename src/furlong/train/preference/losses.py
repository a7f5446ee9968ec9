"""Losses of a pair of answers, of the log-ratios of the model to its reference.

A reward is beta times the log-ratio of an answer, as in DPO (Rafailov et al., 2023, equation 5).
Everything is a scalar in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Figures of a pair, named as TRL names them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a pair: sums over its tokens."""

    log_prob: Tensor
    """Log-probability of all its tokens, with a graph."""
    reference: float
    """Log-probability of all its tokens by the reference."""
    num_tokens: int

    @property
    def log_ratio(self) -> Tensor:
        return self.log_prob - self.reference


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A loss with its options, as `train.loss_type`, `train.beta` and `train.label_smoothing`.

    sigmoid: DPO; with smoothing the mean loss under so many pairs the wrong way round (conservative
    DPO). sigmoid_norm: the same of log-ratios per token. robust: unbiased under so many wrong pairs
    (Chowdhury et al., 2024, equation 12). ipo: a squared distance of log-ratios per token (Azar et
    al., 2023, equation 17; beta is its tau).
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(self, chosen: Answer, rejected: Answer) -> Tensor:
        ratios = [answer.log_ratio for answer in (chosen, rejected)]
        if self.loss_type in ("sigmoid_norm", "ipo"):
            ratios = [r / a.num_tokens for r, a in zip(ratios, (chosen, rejected), strict=True)]
        delta = ratios[0] - ratios[1]
        if self.loss_type == "ipo":
            return (delta - 1 / (2 * self.beta)) ** 2
        right, wrong = -logsigmoid(self.beta * delta), -logsigmoid(-self.beta * delta)
        share = self.label_smoothing
        if self.loss_type == "robust":
            return ((1 - share) * right - share * wrong) / (1 - 2 * share)
        return (1 - share) * right + share * wrong if share else right


def figures_of(loss: PairLoss, chosen: Answer, rejected: Answer) -> dict[str, float]:
    """The figures `METRICS` of a pair."""
    log_probs = [float(answer.log_prob.detach()) for answer in (chosen, rejected)]
    rewards = [
        loss.beta * (log_prob - answer.reference)
        for log_prob, answer in zip(log_probs, (chosen, rejected), strict=True)
    ]
    accuracy, margin = float(rewards[0] > rewards[1]), rewards[0] - rewards[1]
    return dict(zip(METRICS, (*rewards, accuracy, margin, *log_probs), strict=True))


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over pairs."""
    return {name: sum(own[name] for own in found) / len(found) for name in found[0]}
