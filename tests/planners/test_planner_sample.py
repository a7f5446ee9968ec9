"""SpaCO's draws: survival of chains, the table of weights, and what a small batch gives on average.

Numbers with k = 128 and t = 8 follow from the counting in the docstring of `planners.sample`.
"""

import itertools
import math
import random
import statistics

import pytest

from furlong.errors import ConfigError
from furlong.planners.sample import (
    Factors,
    Sampling,
    adaptive_probability,
    draw,
    expected_weight,
    fixed_factors,
    survival,
)

K, T = 128, 8


def test_survival_counts_subsets():
    for k, t, hops in itertools.product(range(1, 8), range(1, 8), range(4)):
        if not hops < t <= k:
            continue
        subsets = list(itertools.combinations(range(k), t))
        chain = set(range(k - hops - 1, k))
        kept = sum(chain <= set(subset) for subset in subsets)
        assert survival(k, t, hops) == pytest.approx(kept / len(subsets), rel=1e-12)
        closed = math.comb(k - hops - 1, t - hops - 1) / math.comb(k, t)
        assert survival(k, t, hops) == pytest.approx(closed, rel=1e-12)
    assert survival(5, 2, 2) == 0  # three chunks are never among two


def test_counts_of_paths():
    # length-2 chains over 6 nodes, and over the 4 that were drawn
    assert (math.comb(6, 3), math.comb(4, 3)) == (20, 4)
    assert 1 / survival(6, 4, 2) == pytest.approx(5)


@pytest.mark.parametrize(
    ("factors", "weights"),
    [
        (Factors(), (0.0625, 0.0034, 0.0002)),
        (fixed_factors("fixed printed", K, T), (0.0625, 0.0551, 0.0420, 0.0269)),
        (Factors(K / T, K / T), (1, 0.8819, 0.6719, 0.4300)),
        (fixed_factors("fixed", K, T), (1, 1, 0.8639, 0.6270)),
        (fixed_factors("capped", K, T), (1, 0.1102, 0.0105, 0.0008)),
        (fixed_factors("capped", K, T, cap=1), (1, 0.0551, 0.0026, 0.0001)),
    ],
)
def test_table_of_expected_weights(factors, weights):
    found = [expected_weight(K, T, hops, factors) for hops in range(len(weights))]
    assert found == pytest.approx(weights, abs=1e-4)


def test_published_budgets_are_all_capped_at_two():
    for t, sparsity in ((8, 1 / 16), (16, 1 / 8), (32, 1 / 4)):
        assert K == 16_384 // 128 and t / K == sparsity
        assert fixed_factors("fixed", K, t).relay_factor > 2
        assert fixed_factors("capped", K, t).relay_factor == 2


class Script(random.Random):
    """A random source that draws what it was told to."""

    def __init__(self, include=(), subset=()):
        super().__init__(0)
        self._include, self._subset = iter(include), subset

    def random(self):
        return 0.0 if next(self._include) else 1 - 1e-12

    def sample(self, population, count):
        assert len(self._subset) == count
        return list(self._subset)


CHUNKS = 6


def path_model(seed):
    """(loss, own, hop): a chain of chunks i_0 > .. > i_h adds loss[i_0] hop[i_0][i_1] .. own[i_h]
    to the gradient."""
    rng = random.Random(seed)
    loss, own = ([rng.uniform(0.5, 1.5) for _ in range(CHUNKS)] for _ in range(2))
    return loss, own, [[rng.uniform(0.5, 1.5) for _ in range(CHUNKS)] for _ in range(CHUNKS)]


def chains(hops):
    """All chains through `hops` earlier chunks, the one with the loss first."""
    return [tuple(reversed(c)) for c in itertools.combinations(range(CHUNKS), hops + 1)]


def sum_over_chains(model, hops, drawn):
    """Sum over the chains of so many hops that were drawn, with the factors of each Backward."""
    loss, own, hop = model
    total = 0.0
    for chain in chains(hops):
        if not drawn.keys() >= set(chain):
            continue
        value = drawn[chain[0]].loss_factor * loss[chain[0]] * own[chain[-1]]
        for later, earlier in itertools.pairwise(chain):
            value *= hop[later][earlier] * drawn[earlier].relay_factor
        total += value
    return total


def exact(model, hops):
    return sum_over_chains(model, hops, {i: Factors() for i in range(CHUNKS)})


def outcomes(sampling):
    """(probability, drawn) of everything that `draw` can return for CHUNKS chunks."""
    budget = sampling.budget(CHUNKS)
    for include in itertools.product((False, True), repeat=CHUNKS):
        probability, count = 1.0, 0
        for step, included in enumerate(include):
            position = CHUNKS - 1 - step
            p = budget / CHUNKS
            if sampling.rule == "adaptive":
                p = adaptive_probability(CHUNKS, budget, position, count, sampling.lowest)
            probability *= p if included else 1 - p
            count += included
        if not probability:
            continue
        order = include if sampling.rule == "adaptive" else reversed(include)
        yield probability, draw(CHUNKS, sampling, Script(include=order))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(num_drawn=4),
        Sampling(probability=0.3),
        Sampling(num_drawn=4, rule="adaptive"),
        Sampling(num_drawn=2, rule="adaptive", lowest=0.25),
        Sampling(probability=0.4, rule="adaptive", lowest=1.0),
    ],
)
def test_bernoulli_and_adaptive_are_exact_for_any_number_of_hops(sampling):
    model = path_model(1)
    found = list(outcomes(sampling))
    assert sum(probability for probability, _ in found) == pytest.approx(1, rel=1e-12)
    for hops in range(CHUNKS):
        mean = sum(p * sum_over_chains(model, hops, drawn) for p, drawn in found)
        assert mean == pytest.approx(exact(model, hops), rel=1e-12)


@pytest.mark.parametrize("rule", ["fixed", "fixed printed", "capped"])
@pytest.mark.parametrize("num_drawn", [2, 4])
def test_the_rules_of_a_fixed_number_are_biased_as_predicted(rule, num_drawn):
    model, sampling = path_model(2), Sampling(num_drawn=num_drawn, rule=rule, cap=1.2)
    subsets = list(itertools.combinations(range(CHUNKS), num_drawn))
    drawn = [draw(CHUNKS, sampling, Script(subset=subset)) for subset in subsets]
    factors = fixed_factors(rule, CHUNKS, num_drawn, cap=1.2)
    for hops in range(CHUNKS):
        mean = statistics.fmean(sum_over_chains(model, hops, one) for one in drawn)
        predicted = expected_weight(CHUNKS, num_drawn, hops, factors)
        assert mean == pytest.approx(predicted * exact(model, hops), rel=1e-12, abs=1e-12)
    if rule == "fixed":
        exact_ones = [expected_weight(CHUNKS, num_drawn, hops, factors) for hops in (0, 1)]
        assert exact_ones == pytest.approx([1, 1], rel=1e-12)
        assert expected_weight(CHUNKS, num_drawn, 2, factors) < 0.9


def test_conditioning_on_something_drawn_would_be_biased():
    model = path_model(3)
    found = [(p, d) for p, d in outcomes(Sampling(probability=0.3)) if d]
    share = sum(p for p, _ in found)
    mean = sum(p * sum_over_chains(model, 0, d) for p, d in found) / share
    assert mean == pytest.approx(exact(model, 0) / share) and share < 0.9


def test_budgets():
    rng = random.Random(0)
    counts = {
        rule: [len(draw(K, Sampling(num_drawn=T, rule=rule), rng)) for _ in range(2000)]
        for rule in ("bernoulli", "fixed", "adaptive")
    }
    assert set(counts["fixed"]) == {T}
    q = T / K
    assert statistics.fmean(counts["bernoulli"]) == pytest.approx(T, abs=0.3)
    assert statistics.stdev(counts["bernoulli"]) == pytest.approx(
        math.sqrt(K * q * (1 - q)), rel=0.1
    )
    assert statistics.fmean(counts["adaptive"]) == pytest.approx(T, rel=0.2)
    assert statistics.stdev(counts["adaptive"]) < statistics.stdev(counts["bernoulli"]) / 2


@pytest.mark.parametrize("rule", ["bernoulli", "fixed", "fixed printed", "capped", "adaptive"])
def test_a_budget_of_everything_is_exact(rule):
    for k in (1, 5, T):
        drawn = draw(k, Sampling(num_drawn=T, rule=rule), random.Random(0))
        assert drawn == {i: Factors() for i in range(k)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_drawn": 1, "probability": 0.5},
        {"num_drawn": 0},
        {"probability": 0.0},
        {"probability": 1.5},
        {"num_drawn": 2, "rule": "some"},
        {"num_drawn": 2, "packed": True},
        {"num_drawn": 2, "lowest": 0.0},
        {"num_drawn": 2, "cap": 0.0},
    ],
)
def test_unusable_sampling_is_refused(fields):
    with pytest.raises(ConfigError, match="sampling"):
        Sampling(**fields)
