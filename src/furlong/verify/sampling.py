"""Bias and variance of sampled gradients, over every draw of a short sequence's chunks.

No draw is left to chance: the probability of each is known, so the mean is the expected gradient
but for rounding. The model is the user's in small; the rule and the share drawn are the run's.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from furlong.config.schema import RunConfig
from furlong.models.shrink import LONGEST_TOKENS
from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.decide import given_options
from furlong.planners.options import fixed_options
from furlong.planners.spaco import (
    Factors,
    Sampling,
    check_sampling,
    draw,
    expected_weight,
    fixed_factors,
    sample_backwards,
    sampling_in_words,
)
from furlong.report.text import align
from furlong.runtime.batch import batch_of, labelled_chunks, shift_labels
from furlong.testing import Batch, Gradients, take_grads, worst_error
from furlong.verify.checks import (
    ROUNDED,
    Bound,
    Finding,
    Subject,
    bound_of,
    sequences,
    true_gradients,
    watched_forward,
)

NUM_CHUNKS = 6
"""Chunks of the sequence whose draws are enumerated: 64 draws at most."""
SIZE = math.ceil(LONGEST_TOKENS / NUM_CHUNKS)
UNBIASED = 1e-10
"""Error of a mean of 64 gradients in float64 whose factors are no powers of two."""
_MAX_HOPS = 3
_FIRST_LABEL = {"at the end": (NUM_CHUNKS - 2) * SIZE + 1, "everywhere": 0}
"""Where labels begin: with a prompt they are those of the last two chunks alone."""


@dataclass(frozen=True, slots=True)
class OverDraws:
    """Sampled gradients of one sequence beside the exact one, over every draw.

    Distances are relative to the norm of the exact gradient.
    """

    num_draws: int
    share: float
    """Expected share of the chunks that is drawn."""
    bias: float
    """Distance of the mean gradient."""
    worst_bias: float
    """The same of the parameter for which it is largest."""
    worst_name: str
    cosine: float
    """Cosine of the angle between the mean gradient and the exact one."""
    error: float
    """Root of the mean square distance of one draw."""


def sampling_of_run(run: RunConfig) -> Sampling | None:
    """How a run draws its chunks; None if its gradients are exact.

    Raises ConfigError for what would draw all of them, whatever the data are.
    """
    dials, max_seq_len = given_options(run.chunks), run.data.max_seq_len
    sampling = fixed_options(max_seq_len, dials).sampling
    if sampling is not None:
        check_sampling(sampling, size=dials["size"], longest=max_seq_len)
    return sampling


def num_chunks_of_run(run: RunConfig) -> int:
    """Chunks of the longest sequence that a run accepts."""
    assert run.chunks.size != "auto"  # the schema asks for a number beside a sample
    return math.ceil(run.data.max_seq_len / run.chunks.size)


def bound_of_mean(subject: Subject) -> Bound:
    """1e-10, or 2e-6 where the model's own forward holds float32 values; 1e-9 for recurrent layers.

    Gradients of float32 values are rounded to it, so that one of a chunk times 3 is not quite three
    times as large. Those of recurrent layers cancel.
    """
    if subject.is_wide:
        return bound_of(subject)
    if not watched_forward(subject).has_float32:
        return Bound(UNBIASED, f"bound {UNBIASED:.0e}")
    reason = f"bound {ROUNDED:.0e}: transformers itself rounds to float32 in this family"
    return Bound(ROUNDED, reason)


def check_draws(subject: Subject, sampling: Sampling, num_chunks: int) -> Finding:
    """The mean of all sampled gradients against the exact one; how far a single one is from it.

    `num_chunks`: of the run's longest sequence, whose share drawn is kept. Only `unbiased` can fail
    by its bias: the other rules have one.
    """
    small = in_small(sampling, num_chunks)
    draws_labels = sampling.rule != "unbiased" or sampling.label_rate is not None
    measured = {
        labels: measure(subject, small, _with_labels_from(first))
        for labels, first in _FIRST_LABEL.items()
        if first > 0 or draws_labels  # else all chunks are drawn, and there is nothing to measure
    }
    labels, worst = max(measured.items(), key=lambda item: item[1].worst_bias)
    if sampling.rule == "unbiased":
        bound = bound_of_mean(subject)
        told = (
            f"mean of all draws off by {worst.worst_bias:.1e} ({worst.worst_name}, labels"
            f" {labels}); {bound.reason}"
        )
        passed = worst.worst_bias <= bound.error
    else:
        biases = " and ".join(f"{one.bias:.2g} (labels {name})" for name, one in measured.items())
        told = f"mean of all draws off by {biases}: rule {sampling.rule} is biased, see the table"
        passed = all(math.isfinite(one.worst_bias) for one in measured.values())
    return Finding("draws", told, passed, _table(small, measured) + _weights(sampling, num_chunks))


def in_small(sampling: Sampling, num_chunks: int) -> Sampling:
    """The same rule with a budget for `NUM_CHUNKS` chunks, as near as they allow to the share of a
    sequence of `num_chunks`; rules of a fixed number leave out one chunk at least."""
    if sampling.rule == "unbiased":
        return replace(sampling, rate=sampling.share(num_chunks), chunks=None)
    share = sampling.num_drawn(num_chunks) / num_chunks
    num_drawn = min(NUM_CHUNKS - 1, max(2, round(share * NUM_CHUNKS)))
    return replace(sampling, rate=None, chunks=num_drawn)


def measure(subject: Subject, sampling: Sampling, batch: Batch) -> OverDraws:
    """Every sampled gradient of a batch of one sequence, weighed by its probability."""
    _, truth = true_gradients(subject, batch)
    engine = subject.engine()
    options = replace(subject.options, size=SIZE, sample=None)
    whole = engine.plan([len(batch[0]["input_ids"])], options)
    chunks, labelled = whole.groups[0], labelled_chunks(whole, batch_of(shift_labels(batch)))
    exact = _flat(truth, truth)
    mean: Gradients = {}
    num_draws, share, square = 0, 0.0, 0.0
    for chance, drawn in all_draws(sampling, [chunk in labelled for chunk in chunks]):
        trained = {chunks[position]: factors for position, factors in drawn.items()}
        plan = sample_backwards(whole, trained, report_loss=sampling.report_loss)
        with subject.computing():
            engine.run(plan, batch)
        given = take_grads(subject.model)
        for name, gradient in given.items():
            mean[name] = mean.get(name, 0) + chance * gradient
        num_draws += 1
        share += chance * len(drawn) / len(chunks)
        square += chance * float((_flat(given, truth) - exact).square().sum())
    worst_bias, worst_name = worst_error(mean, truth)
    norm, drawn_mean = float(exact.norm()), _flat(mean, truth)
    return OverDraws(
        num_draws=num_draws,
        share=share,
        bias=float((drawn_mean - exact).norm()) / norm,
        worst_bias=worst_bias,
        worst_name=worst_name,
        cosine=float(drawn_mean @ exact) / (float(drawn_mean.norm()) * norm),
        error=math.sqrt(square) / norm,
    )


def all_draws(
    sampling: Sampling, has_labels: Sequence[bool]
) -> Iterator[tuple[float, dict[int, Factors]]]:
    """Everything that `draw` can return for these chunks, each with its probability."""
    positions = range(len(has_labels))
    if sampling.rule != "unbiased":
        subsets = list(itertools.combinations(positions, sampling.num_drawn(len(has_labels))))
        for subset in subsets:
            yield 1 / len(subsets), draw(has_labels, sampling, _Told(subset))
        return
    chances = sampling.probabilities(has_labels)
    for included in itertools.product((False, True), repeat=len(has_labels)):
        each = (p if is_in else 1 - p for p, is_in in zip(chances, included, strict=True))
        if chance := math.prod(each):
            drawn = [i for i in positions if included[i]]
            yield chance, draw(has_labels, sampling, _Told(drawn))


class _Told(random.Random):
    """A random source from which exactly the given positions are drawn."""

    def __init__(self, positions: Collection[int]) -> None:
        super().__init__(0)
        self._positions, self._asked = positions, itertools.count()

    def random(self) -> float:
        """The smallest number there is for a position that is drawn, else the largest."""
        return 0.0 if next(self._asked) in self._positions else math.nextafter(1.0, 0.0)

    def sample(self, population: Any, k: int, *, counts: Iterable[int] | None = None) -> list[Any]:
        assert k == len(self._positions) and counts is None
        return [population[position] for position in self._positions]


def _with_labels_from(first: int) -> Batch:
    input_ids = sequences()[0]["input_ids"]
    labels = input_ids.clone()
    labels[:first] = IGNORE_INDEX
    return [{"input_ids": input_ids, "labels": labels}]


def _flat(gradients: Gradients, like: Gradients) -> Tensor:
    """One vector; what is not there (an expert that no token chose) is zero."""
    return torch.cat([gradients.get(n, torch.zeros_like(x)).flatten() for n, x in like.items()])


def _table(small: Sampling, measured: dict[str, OverDraws]) -> tuple[str, ...]:
    heads = "labels", "draws", "share drawn", "bias of the mean", "cosine of the mean", "error"
    rows = [
        (
            labels, f"{one.num_draws}", f"{one.share:.3f}", f"{one.bias:.1e}",
            f"{one.cosine:.4f}", f"{one.error:.3g}",
        )
        for labels, one in measured.items()
    ]  # fmt: skip
    return (
        f"{sampling_in_words(small)}: every draw of a sequence of {NUM_CHUNKS} chunks, beside its"
        " exact gradient (norm 1)",
        *align([heads, *rows], left=heads[:1]),
        "error: distance of a single draw, root mean square",
    )


def _weights(sampling: Sampling, num_chunks: int) -> tuple[str, ...]:
    """Average share that remains of a contribution to the gradient, by how many earlier chunks it
    goes through; in small, and in the longest sequence of the run."""
    if sampling.rule == "unbiased":
        return ("expected weight of a gradient through any number of earlier chunks: 1",)
    rows = [("drawn", *(f"{hops}" for hops in range(_MAX_HOPS + 1)))]
    for budget, total in ((in_small(sampling, num_chunks), NUM_CHUNKS), (sampling, num_chunks)):
        num_drawn, factors = budget.num_drawn(total), fixed_factors(budget, total)
        weights = (
            f"{abs(expected_weight(total, num_drawn, hops, factors)):.3f}" if hops < total else "-"
            for hops in range(_MAX_HOPS + 1)
        )
        rows.append((f"{num_drawn} of {total}", *weights))
    return (
        "expected weight (1: unbiased) of a gradient through so many earlier chunks, here and at"
        " data.max_seq_len",
        *align(rows, left=["drawn"]),
    )
