"""The loss of a trainer: a sum over tokens, which chunks compute one tile of logits at a time, or
any function of the model's outputs, which goes by the decoder's door and holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from furlong.errors import ConfigError
from furlong.ops.loss import IGNORE_INDEX, wide
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import require_two_phases
from furlong.values import (
    Extras,
    TokenFunction,
    log_prob,
    log_sum_exp,
    mean_logit,
    require_function,
)

_SFT = "trl.trainer.sft_trainer"
_KNOWN = ("transformers.trainer", _SFT)
"""Modules whose `compute_loss` is understood."""


@dataclass(frozen=True)
class TokenLoss:
    """A `compute_loss_func` that is a sum over tokens.

    `furlong.integrations.Trainer` computes it without the logits of a whole batch; other trainers
    of transformers call it as they call any. `function`: as in `furlong.values`, a loss (t,) of
    logits (t, V) in float32 or wider and labels (t,), without extras.
    """

    function: TokenFunction

    def __post_init__(self) -> None:
        require_function(self.function, "TokenLoss")

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The sum over labels (B, T), by their number where `num_items_in_batch` is None."""
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        mask = targets != IGNORE_INDEX
        losses = self.function(wide(logits[mask]), targets[mask], {})
        return losses.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


def token_loss(trainer: Any) -> TokenFunction | None:
    """The loss of a trainer that is a sum over tokens; None for the cross-entropy of the labels."""
    if isinstance(trainer.compute_loss_func, TokenLoss):
        return trainer.compute_loss_func.function
    if getattr(trainer.args, "loss_type", "nll") == "dft":
        return _dft
    factor = trainer.args.label_smoothing_factor
    return _smoothed(factor) if factor else None


def is_any_function(trainer: Any) -> bool:
    """Whether the loss is made of the outputs of the model, by a `compute_loss_func` or by a
    `compute_loss` of a trainer's own."""
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    is_own = "compute_loss" in vars(trainer) or owner.__module__ not in _KNOWN
    function = trainer.compute_loss_func
    return is_own or not (function is None or isinstance(function, TokenLoss))


def refuse_loss(trainer: Any, options: ChunkOptions, *, divides: bool) -> None:
    """Raise ConfigError for a loss that several processes do not have, and for options that it
    does not have. `divides`: processes share the weights."""
    by_door = is_any_function(trainer)
    if by_door:
        require_two_phases(options)
    if by_door and trainer.args.world_size > 1:
        raise ConfigError(
            given="a compute_loss_func or compute_loss of the trainer's own on "
            f"{trainer.args.world_size} processes",
            required="one process, or a loss that is a sum over tokens",
            source=f"the arguments of {type(trainer).__name__}, or its class",
            change="pass compute_loss_func=furlong.integrations.TokenLoss(function), or give "
            "furlong.chunked(model) to the trainer without furlong, on any number of processes",
        )
    if divides and token_loss(trainer):
        raise ConfigError(
            given="FSDP of accelerate with a loss that is not the cross-entropy of the labels",
            required="the cross-entropy of the labels, where processes share the weights",
            source=f"the arguments of {type(trainer).__name__}",
            change="leave FSDP out, so that each process has the whole model",
        )


def _smoothed(factor: float) -> TokenFunction:
    """The cross-entropy of labels that share `factor` of their probability among all ids."""
    label, mean, total = log_prob(), mean_logit(), log_sum_exp()

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        others = mean(logits, labels, extras) - total(logits, labels, extras)
        return -(1 - factor) * label(logits, labels, extras) - factor * others

    return of_tile


def _dft(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
    """The cross-entropy weighted by the label's own probability (arXiv 2508.05629)."""
    own = log_prob()(logits, labels, extras)
    return -own * own.exp().detach()
