"""Values of tokens: functions of the logits that `Engine.token_values` takes, and a way to join.

Each is called with the logits (t, V) of a tile of tokens, in float32 or wider, their labels (t,),
and what the sequences carry beside (`extras`, each (t, ...)); it returns (t,) or (t, k). A loss
may be any function of what it returns. `forward_backward(token_loss=...)` takes the same functions,
where the loss is their sum.

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
    """The log-probability of each label, of logits divided by `temperature`."""
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return -cross_entropy(_scaled(logits, temperature), labels, reduction="none")

    return of_tile


def entropy(temperature: float = 1.0) -> TokenFunction:
    """The entropy of each token's distribution, in nats."""
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        log_probs = _scaled(logits, temperature).log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    return of_tile


def log_sum_exp() -> TokenFunction:
    """The logarithm of the sum of each token's exponentiated logits; a z-loss is its square."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return logits.logsumexp(-1)

    return of_tile


def mean_logit() -> TokenFunction:
    """The mean logit of each token. With `log_sum_exp` it makes label smoothing: the mean of all
    log-probabilities is the one less the other."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        return logits.mean(-1)

    return of_tile


def top_k_kl(
    ids: str = "teacher_ids", log_probs: str = "teacher_log_probs", temperature: float = 1.0
) -> TokenFunction:
    """The divergence KL(teacher || model) of each token over the teacher's `k` best ids.

    `ids`, `log_probs`: names of the extras, (T, k) int64 and (T, k). What the teacher's k ids lack
    of probability 1 is one more outcome, whose log-probability in the model is that of all other
    ids. Of logits divided by `temperature`, which the teacher's must have been too.
    """
    _require_temperature(temperature)

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        scaled, best = _scaled(logits, temperature), _extra(extras, ids).long()
        lowest = math.log(torch.finfo(logits.dtype).tiny)  # 0 times a log of 0 would be no number
        known = _extra(extras, log_probs).to(logits.dtype).clamp(min=lowest)
        # the rest is a sum over all other ids: 1 less the known would be rounding alone
        others = scaled.scatter(-1, best, torch.finfo(logits.dtype).min)
        total = scaled.logsumexp(-1, keepdim=True)
        rest = (others.logsumexp(-1, keepdim=True) - total).clamp(min=lowest)
        given = torch.cat([scaled.gather(-1, best) - total, rest], dim=-1)
        return kl_div(given, _with_rest(known), reduction="none", log_target=True).sum(-1)

    return of_tile


def stack(*functions: TokenFunction) -> TokenFunction:
    """The values of several functions side by side, (t, k), in one pass through the head."""

    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        found = [function(logits, labels, extras) for function in functions]
        return torch.cat([x[:, None] if x.ndim == 1 else x for x in found], dim=1)

    return of_tile


def require_function(function: object, name: str) -> None:
    """Raise ConfigError for an argument `name` that is no function of logits, labels and extras,
    or one of this module that was not called."""
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
    """Log-probabilities (t, k) and, behind them, that of everything else, (t, k + 1)."""
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
