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
    sample_backwards,
)
from furlong.runtime.batch import batch_of, labelled_chunks, shift_labels
from furlong.testing import Batch, Gradients, take_grads, worst_error
from furlong.verify.checks import Finding, Float64, Subject, sequences

NUM_CHUNKS = 6
"""Chunks of the sequence whose draws are enumerated: 64 draws at most."""
SIZE = math.ceil(LONGEST_TOKENS / NUM_CHUNKS)
UNBIASED = 1e-10
"""Error of a mean of 64 gradients in float64 whose factors are no powers of two."""
_FIRST_LABEL = {"at the end": (NUM_CHUNKS - 2) * SIZE + 1, "everywhere": 0}
"""Where labels begin: with a prompt they are those of the last two chunks alone."""


@dataclass(frozen=True, slots=True)
class OverDraws:
    """Sampled gradients of one sequence beside the exact one, over every draw.

    Distances are relative to the norm of the exact gradient.
    """

    num_draws: int
    bias: float
    """Distance of the mean gradient."""
    worst_bias: float
    """The same of the parameter for which it is largest."""
    worst_name: str
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
        bound = max(UNBIASED, subject.bound)
        told = f"{worst.worst_bias:.1e} ({worst.worst_name}, labels {labels}); bound {bound:.0e}"
        passed = worst.worst_bias <= bound
    else:
        biases = (f"{one.bias:.2g} (labels {name})" for name, one in measured.items())
        told = f"{' and '.join(biases)}: rule {sampling.rule} is biased"
        passed = all(math.isfinite(one.worst_bias) for one in measured.values())
    error = max(one.error for one in measured.values())
    figure = f"one draw off by {error:.2g} (root mean square), the mean of all by {told}"
    return Finding("draws", figure, passed)


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
    _, truth = subject.whole(batch)
    engine = subject.engine()
    options = replace(subject.options, size=SIZE, sample=None)
    whole = engine.plan([len(batch[0]["input_ids"])], options)
    chunks, labelled = whole.groups[0], labelled_chunks(whole, batch_of(shift_labels(batch)))
    exact = _flat(truth, truth)
    mean: Gradients = {}
    num_draws, square = 0, 0.0
    for chance, drawn in all_draws(sampling, [chunk in labelled for chunk in chunks]):
        trained = {chunks[position]: factors for position, factors in drawn.items()}
        plan = sample_backwards(whole, trained, report_loss=sampling.report_loss)
        with Float64():
            engine.run(plan, batch)
        given = take_grads(subject.model)
        for name, gradient in given.items():
            mean[name] = mean.get(name, 0) + chance * gradient
        num_draws += 1
        square += chance * float((_flat(given, truth) - exact).square().sum())
    worst_bias, worst_name = worst_error(mean, truth)
    norm = float(exact.norm())
    return OverDraws(
        num_draws=num_draws,
        bias=float((_flat(mean, truth) - exact).norm()) / norm,
        worst_bias=worst_bias,
        worst_name=worst_name,
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
