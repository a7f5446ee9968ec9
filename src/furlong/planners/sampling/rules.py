"""The rules by which chunks of a plan get a backward, and its factors (SpaCO, Li et al., 2025).

Forwards stay exact, so only the set of surviving paths is random. A contribution to the gradient
that reaches its parameters through h earlier chunks needs h + 1 drawn chunks, the one with the loss
among them. A Backward multiplies its own loss by a and the dK,dV that later chunks sent by c, which
gives that contribution the weight a c^h; it is unbiased if a c^h times its survival is 1.

    unbiased   chunk i by itself with any probability p_i above 0, a = c = 1/p_i: exact for every h.
               Proof by induction from the last chunk down: E[1{drawn} / p_i * gradient of i, given
               the chunks behind] is that gradient
    fixed      exactly n of k chunks, a = k/n, c = (k-1)/(n-1): exact for h <= 1, low beyond
    paper      exactly n of k chunks, a = 1, c = k/n, as in Algorithm 2 of the paper: n/k of what
               a = c = k/n would give, which is itself low for h >= 1. An optimizer that divides by
               the size of gradients (Adam) does not see a common factor, so the paper's runs learn

No constant a and c are exact for h = 0, 1, 2 when exactly n chunks are drawn: inclusions are not
independent, while the paper's (k/n)^p takes them to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from furlong.errors import ConfigError
from furlong.plan.values import ChunkPlan

Rule = Literal["unbiased", "fixed", "paper"]
_LEAST_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one Backward."""

    loss_factor: float = 1.0
    """Multiplies the chunk's own loss."""
    relay_factor: float = 1.0
    """Multiplies the dK,dV of later chunks."""


EXACT = Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A rule and a budget by which chunks of every cut sequence are drawn. Give one of `rate` and
    `chunks`.

    Chunks that hold whole sequences only are always drawn: no context makes their backward dear,
    and no memory is saved. A sequence of no more chunks than the budget is computed exactly.
    """

    rate: float | None = None
    """Share of a sequence's chunks, above 0 and at most 1."""
    chunks: int | None = None
    """Chunks of a sequence; under `unbiased` their expected number."""
    rule: Rule = "unbiased"
    label_rate: float | None = None
    """`unbiased` only: probability of chunks that have labels; None: 1, they are all drawn."""
    cap: float | None = None
    """`fixed` and `paper` only: highest relay factor (the paper's experiments: 2). It trades
    gradients through other chunks, of which it keeps less, for variance."""
    report_loss: bool = False
    """Whether chunks that are not drawn compute their loss, at the price of the rest of their
    forward. Without it the loss of a step is estimated from the drawn ones."""
    seed: int | None = None
    """Decides, with its place in the batch, a sequence's draw; another one every step. None: drawn
    from torch's generator."""

    def __post_init__(self) -> None:
        rate, chunks, rule, is_free = self.rate, self.chunks, self.rule, self.rule == "unbiased"
        is_rate = f"a number above 0, of at least {_LEAST_RATE}, and at most 1"
        for is_wrong, given, required, *change in (
            ((rate is None) == (chunks is None),
             f"rate = {rate}, chunks = {chunks}", "one of rate and chunks"),
            (not (rate is None or _is_number(rate, _LEAST_RATE, 1)), f"rate = {rate!r}", is_rate),
            (not (chunks is None or _is_whole(chunks, 1)),
             f"chunks = {chunks!r}", "a whole number of at least 1"),
            (rule not in get_args(Rule), f"rule = {rule!r}", f"one of {', '.join(get_args(Rule))}"),
            (not (self.label_rate is None or _is_number(self.label_rate, _LEAST_RATE, 1)),
             f"label_rate = {self.label_rate!r}", is_rate),
            (is_free and self.cap is not None, f"cap = {self.cap!r} with rule unbiased",
             "no cap: a smaller relay factor would make the estimate biased",
             "remove cap, or set rule to fixed"),
            (not is_free and self.label_rate is not None,
             f"label_rate = {self.label_rate!r} with rule {rule}",
             "no label_rate: all chunks of a sequence are as likely",
             "remove label_rate, or set rule to unbiased"),
            (not is_free and chunks == 1, f"chunks = 1 with rule {rule}",
             "at least 2: the gradient of a single chunk has no other to go through",
             "draw more chunks, or set rule to unbiased"),
            (not (self.cap is None or _is_number(self.cap, 1)), f"cap = {self.cap!r}",
             "a number of at least 1", "raise cap, or leave it out"),
            (not isinstance(self.report_loss, bool),
             f"report_loss = {self.report_loss!r}", "true or false"),
            (not (self.seed is None or _is_whole(self.seed)),
             f"seed = {self.seed!r}", "a whole number, or none"),
        ):  # fmt: skip
            if is_wrong:
                raise _unusable(given, required, *change)

    def share(self, num_chunks: int) -> float:
        """The budget of a sequence of so many chunks, as a share of them."""
        if self.chunks is not None:
            return min(1.0, self.chunks / num_chunks)
        assert self.rate is not None
        return self.rate

    def probabilities(self, has_labels: Sequence[bool]) -> list[float]:
        """Probabilities of drawing the chunks of a sequence, by whether each has labels, under
        `unbiased`."""
        rate = self.share(len(has_labels))
        labelled = 1.0 if self.label_rate is None else self.label_rate
        return [1.0 if rate == 1 else labelled if has else rate for has in has_labels]

    def num_drawn(self, num_chunks: int) -> int:
        """Number of chunks of a sequence that `fixed` and `paper` draw: at least two where it has
        them, for a single one has nobody to send gradients to."""
        if self.chunks is not None:
            return min(self.chunks, num_chunks)
        return min(num_chunks, max(2, round(self.share(num_chunks) * num_chunks)))


def sampling_of(value: object) -> Sampling | None:
    """The Sampling that a value or a mapping of its fields means. Raises ConfigError for others."""
    if value is None or isinstance(value, Sampling):
        return value
    if not isinstance(value, Mapping):
        raise _unusable(f"sample = {value!r:.80}", "a furlong.Sampling, a mapping, or none")
    names = list(Sampling.__dataclass_fields__)
    if unknown := [str(name) for name in value if name not in names]:
        raise _unusable(f"sample with {', '.join(unknown)}", f"among {', '.join(names)}")
    return Sampling(**dict[str, Any](value))


def draw(has_labels: Sequence[bool], sampling: Sampling, rng: random.Random) -> dict[int, Factors]:
    """Positions and factors of the drawn chunks of one sequence; `has_labels`: which of its chunks
    have labels."""
    num_chunks = len(has_labels)
    if sampling.rule == "unbiased":
        chances = sampling.probabilities(has_labels)
        return {i: Factors(1 / p, 1 / p) for i, p in enumerate(chances) if rng.random() < p}
    num_drawn = sampling.num_drawn(num_chunks)
    factors = fixed_factors(sampling, num_chunks)
    return dict.fromkeys(sorted(rng.sample(range(num_chunks), num_drawn)), factors)


def fixed_factors(sampling: Sampling, num_chunks: int) -> Factors:
    """The a and c of the rules that draw exactly n of k chunks."""
    num_drawn = sampling.num_drawn(num_chunks)
    if num_drawn == num_chunks:
        return EXACT
    scale = num_chunks / num_drawn
    cap = math.inf if sampling.cap is None else sampling.cap
    match sampling.rule:
        case "fixed":
            return Factors(scale, min(cap, (num_chunks - 1) / (num_drawn - 1)))
        case "paper":
            return Factors(1.0, min(cap, scale))
    raise ValueError(f"{sampling.rule} has no constant factors")


def survival(num_chunks: int, num_drawn: int, hops: int) -> float:
    """Probability that a contribution through `hops` earlier chunks survives a uniform draw of
    exactly `num_drawn`: prod over r = 0..hops of (n - r) / (k - r)."""
    if hops >= num_drawn:
        return 0.0
    return math.prod((num_drawn - r) / (num_chunks - r) for r in range(hops + 1))


def expected_weight(num_chunks: int, num_drawn: int, hops: int, factors: Factors) -> float:
    """The weight a c^h of a contribution times its survival: 1 where the draw is unbiased for that
    many hops."""
    weight = factors.loss_factor * factors.relay_factor**hops
    return weight * survival(num_chunks, num_drawn, hops)


def draw_chunks(
    plan: ChunkPlan, sampling: Sampling, labelled: Collection[int] = ()
) -> dict[int, Factors]:
    """The drawn chunks of a plan; those of one sequence are drawn together.

    `labelled`: chunks that have labels. Where they are not known, no estimate is biased, but chunks
    with labels are drawn at the rate of the others. Where sp ranks have local pieces a chunk may be
    in two sequences; it is drawn with the first.
    """
    drawn: dict[int, Factors] = {}
    for seq_id, group in sorted(plan.groups.items()):
        own = [chunk for chunk in group if plan.links[chunk][0][0] == seq_id]
        rng = random.Random(f"{sampling.seed} {seq_id}")
        has_labels = [chunk in labelled for chunk in own]
        for position, factors in draw(has_labels, sampling, rng).items():
            drawn[own[position]] = factors
    whole = (chunk for chunk, links in enumerate(plan.links) if not links)
    return drawn | dict.fromkeys(whole, EXACT)


def _is_whole(value: object, lowest: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _is_number(value: object, lowest: float, highest: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest and value < math.inf  # type: ignore[operator]


def _unusable(
    given: str,
    required: str,
    change: str = "correct it, or leave sampling out: then the gradient is exact",
) -> ConfigError:
    return ConfigError(given=given, required=required, source="chunks.sample", change=change)
