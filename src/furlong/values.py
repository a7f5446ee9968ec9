"""Token functions of the logits for `Engine.token_values`, and `stack` to combine them.

A token function is called with logits (t, V) of a tile (tokens whose logits are computed at once),
in float32 or wider, their labels (t,), and the sequences' extra tensors (t, ...) by name; it
returns (t,) or (t, k). Any loss may be computed from its values. `forward_backward(token_loss=...)`
accepts the same functions; its loss is the sum of their values.

    t tokens of a tile, V vocabulary, k values per token
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from furlong.errors import ConfigError, in_short

Extras = Mapping[str, Tensor]
TokenFunction = Callable[[Tensor, Tensor, Extras], Tensor]


def log_prob(temperature: float = 1.0) -> TokenFunction:
    """Return a token function that computes each label's log-probability, with logits divided by
    `temperature`."""
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return -cross_entropy(_scaled(logits, temperature), labels, reduction="none")

    return of_tile


def entropy(temperature: float = 1.0) -> TokenFunction:
    """Return a token function that computes the entropy of each token's distribution in nats, with
    logits divided by `temperature`."""
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        log_probs = _scaled(logits, temperature).log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    return of_tile


def log_sum_exp() -> TokenFunction:
    """Return a token function that computes the logits' log-sum-exp; a z-loss is its square."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return logits.logsumexp(-1)

    return of_tile


def mean_logit() -> TokenFunction:
    """Return a token function that computes the mean logit. For label smoothing: mean_logit -
    log_sum_exp is the mean of all log-probabilities."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return logits.mean(-1)

    return of_tile


def top_k_kl(
    ids: str = "teacher_ids", log_probs: str = "teacher_log_probs", temperature: float = 1.0
) -> TokenFunction:
    """Return a token function for KL(teacher || model) over k + 1 outcomes: the teacher's top k
    ids, and one outcome for all other ids together.

    The probability of this last outcome is 1 minus the sum of the k probabilities, in the teacher
    and in the model.

    Args:
        ids: Name of the extra with the teacher's ids, (T, k) int64.
        log_probs: Name of the extra with the teacher's log-probabilities, (T, k).
        temperature: Divides the logits; the teacher's must have been divided by it, too.
    """
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        scaled, best = _scaled(logits, temperature), _extra(extras, ids).long()
        lowest = math.log(torch.finfo(logits.dtype).tiny)  # no 0 * log 0 = NaN
        known = _extra(extras, log_probs).to(logits.dtype).clamp(min=lowest)
        # the rest as a sum over all other ids: 1 - sum(known) would be mostly rounding
        others = scaled.scatter(-1, best, torch.finfo(logits.dtype).min)
        total = scaled.logsumexp(-1, keepdim=True)
        rest = (others.logsumexp(-1, keepdim=True) - total).clamp(min=lowest)
        given = torch.cat([scaled.gather(-1, best) - total, rest], dim=-1)
        return kl_div(given, _with_rest(known), reduction="none", log_target=True).sum(-1)

    return of_tile


def stack(*functions: TokenFunction) -> TokenFunction:
    """Return a token function that concatenates the values of several functions to (t, k), in one
    pass through the head."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        found = [function(logits, labels, extras) for function in functions]
        return torch.cat([x[:, None] if x.ndim == 1 else x for x in found], dim=1)

    return of_tile


def require_function(function: object, name: str) -> None:
    """Raise ConfigError if the argument `name` is not callable, or is a function of this module
    that returns a token function, such as `log_prob` without parentheses."""
    uncalled = function in (log_prob, entropy, log_sum_exp, mean_logit, top_k_kl, stack)
    if uncalled or not callable(function):
        name_of = getattr(function, "__name__", "")
        shown = f"furlong.values.{name_of}" if uncalled else repr(function)
        raise ConfigError(
            given=f"{name} {in_short(shown, 60)}",
            required="a function of logits (t, V), labels (t,) and extras (t, ...)",
            source="the arguments of furlong.Engine's methods",
            change=f"call it: {shown}()" if uncalled else "pass furlong.values.log_prob()",
        )


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return log-probabilities (t, k + 1): the given ones (t, k), then one for all other ids
    together."""
    tiny = torch.finfo(log_probs.dtype).tiny
    rest = (1 - log_probs.double().exp().sum(-1, keepdim=True)).clamp(min=tiny).log()
    return torch.cat([log_probs, rest.to(log_probs.dtype)], dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _extra(extras: Extras, name: str) -> Tensor:
    if name not in extras:
        found = ", ".join(sorted(extras)) or "none"
        raise ConfigError(
            given=f"sequences with these extras: {found}",
            required=f"{name}, which furlong.values.top_k_kl reads",
            source="the sequences passed to token_values or forward_backward",
            change=f'add "{name}" of shape (T, k) to each sequence',
        )
    return extras[name]


def _require_temperature(temperature: float) -> None:
    if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
        raise ConfigError(
            given=f"temperature {in_short(repr(temperature), 60)}", required="a number above 0",
            source="the arguments of a function of furlong.values",
            change="pass the temperature that the tokens were sampled with, or leave it out",
        )  # fmt: skip
