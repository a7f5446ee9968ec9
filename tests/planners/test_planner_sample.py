"""SpaCO's draws: survival of chains, the table of weights, and what a small batch gives on average.

Numbers with k = 128 and n = 8 follow from the counting in the docstring of `sampling.rules`.
"""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import (
    EXACT,
    Factors,
    Sampling,
    draw,
    draw_chunks,
    expected_weight,
    fixed_factors,
    sampling_of,
    survival,
)

K, N = 128, 8


@given(st.integers(1, 9), st.data())
def test_survival_counts_subsets(k, data):
    n = data.draw(st.integers(1, k))
    hops = data.draw(st.integers(0, k - 1))
    chain = set(data.draw(st.permutations(range(k)))[: hops + 1])
    subsets = list(itertools.combinations(range(k), n))
    kept = sum(chain <= set(subset) for subset in subsets)
    assert survival(k, n, hops) == pytest.approx(kept / len(subsets), rel=1e-12)
    if hops < n:
        closed = math.comb(k - hops - 1, n - hops - 1) / math.comb(k, n)
        assert survival(k, n, hops) == pytest.approx(closed, rel=1e-12)


def test_counts_of_paths():
    # length-2 chains over 6 nodes, and over the 4 that were drawn
    assert (math.comb(6, 3), math.comb(4, 3)) == (20, 4)
    assert 1 / survival(6, 4, 2) == pytest.approx(5)


def fixed(rule, n=N, **more):
    return fixed_factors(Sampling(chunks=n, rule=rule, **more), K)


@pytest.mark.parametrize(
    ("factors", "weights"),
    [
        (Factors(), (0.0625, 0.0034, 0.0002)),
        (fixed("paper"), (0.0625, 0.0551, 0.0420, 0.0269)),
        (Factors(K / N, K / N), (1, 0.8819, 0.6719, 0.4300)),
        (fixed("fixed"), (1, 1, 0.8639, 0.6270)),
        (fixed("fixed", cap=2), (1, 0.1102, 0.0105, 0.0008)),
        (fixed("fixed", cap=1), (1, 0.0551, 0.0026, 0.0001)),
    ],
)
def test_table_of_expected_weights(factors, weights):
    found = [expected_weight(K, N, hops, factors) for hops in range(len(weights))]
    assert found == pytest.approx(weights, abs=1e-4)


def test_published_budgets_are_all_capped_at_two():
    for n, sparsity in ((8, 1 / 16), (16, 1 / 8), (32, 1 / 4)):
        assert K == 16_384 // 128 and n / K == sparsity
        assert fixed("fixed", n).relay_factor > 2
        assert fixed("fixed", n, cap=2).relay_factor == 2


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


def outcomes(sampling, has_labels):
    """(probability, drawn) of everything that `draw` can return for these chunks."""
    chances = sampling.probabilities(has_labels)
    for include in itertools.product((False, True), repeat=len(has_labels)):
        probability = math.prod(
            p if is_in else 1 - p for p, is_in in zip(chances, include, strict=True)
        )
        if probability:
            yield probability, draw(has_labels, sampling, Script(include=include))


NO_LABELS, SOME_LABELS = [False] * CHUNKS, [False, True, False, False, True, True]


@pytest.mark.parametrize("has_labels", [NO_LABELS, SOME_LABELS], ids=["none", "some"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(chunks=4),
        Sampling(rate=0.3),
        Sampling(rate=0.25, label_rate=0.5),
        Sampling(chunks=2, label_rate=0.9),
    ],
    ids=str,
)
def test_unbiased_is_exact_for_any_number_of_hops(sampling, has_labels):
    model = path_model(1)
    found = list(outcomes(sampling, has_labels))
    assert sum(probability for probability, _ in found) == pytest.approx(1, rel=1e-12)
    for hops in range(CHUNKS):
        mean = sum(p * sum_over_chains(model, hops, drawn) for p, drawn in found)
        assert mean == pytest.approx(exact(model, hops), rel=1e-12)


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("rule", ["fixed", "paper"])
@pytest.mark.parametrize("num_drawn", [2, 4])
def test_the_rules_of_a_fixed_number_are_biased_as_predicted(rule, num_drawn, cap):
    model, sampling = path_model(2), Sampling(chunks=num_drawn, rule=rule, cap=cap)
    subsets = list(itertools.combinations(range(CHUNKS), num_drawn))
    drawn = [draw(NO_LABELS, sampling, Script(subset=subset)) for subset in subsets]
    factors = fixed_factors(sampling, CHUNKS)
    for hops in range(CHUNKS):
        mean = statistics.fmean(sum_over_chains(model, hops, one) for one in drawn)
        predicted = expected_weight(CHUNKS, num_drawn, hops, factors)
        assert mean == pytest.approx(predicted * exact(model, hops), rel=1e-12, abs=1e-12)
    if rule == "fixed" and cap is None:
        exact_ones = [expected_weight(CHUNKS, num_drawn, hops, factors) for hops in (0, 1)]
        assert exact_ones == pytest.approx([1, 1], rel=1e-12)
        assert expected_weight(CHUNKS, num_drawn, 2, factors) < 0.9


def test_conditioning_on_something_drawn_would_be_biased():
    model = path_model(3)
    found = [(p, d) for p, d in outcomes(Sampling(rate=0.3), NO_LABELS) if d]
    share = sum(p for p, _ in found)
    mean = sum(p * sum_over_chains(model, 0, d) for p, d in found) / share
    assert mean == pytest.approx(exact(model, 0) / share) and share < 0.9


def test_chunks_with_labels_are_always_drawn_unless_their_rate_says_less():
    has_labels = [i in (3, 60, 127) for i in range(K)]
    rng = random.Random(0)
    always = [draw(has_labels, Sampling(rate=0.05), rng) for _ in range(50)]
    assert all(drawn.keys() >= {3, 60, 127} for drawn in always)
    assert {drawn[60] for drawn in always} == {EXACT}
    less = [draw(has_labels, Sampling(rate=0.05, label_rate=0.5), rng) for _ in range(400)]
    found = [drawn[3] for drawn in less if 3 in drawn]
    assert set(found) == {Factors(2, 2)} and 150 < len(found) < 250


def test_budgets():
    rng, unlabelled = random.Random(0), [False] * K
    counts = {
        rule: [len(draw(unlabelled, Sampling(chunks=N, rule=rule), rng)) for _ in range(2000)]
        for rule in ("unbiased", "fixed", "paper")
    }
    assert set(counts["fixed"]) == set(counts["paper"]) == {N}
    p = N / K
    assert statistics.fmean(counts["unbiased"]) == pytest.approx(N, abs=0.3)
    assert statistics.stdev(counts["unbiased"]) == pytest.approx(
        math.sqrt(K * p * (1 - p)), rel=0.1
    )
    fixed_rate = Sampling(rate=0.25, rule="fixed")
    assert [fixed_rate.num_drawn(k) for k in (2, 4, 10, 64)] == [2, 2, 2, 16]


@pytest.mark.parametrize("rule", ["unbiased", "fixed", "paper"])
def test_a_sequence_of_no_more_chunks_than_the_budget_is_exact(rule):
    for k in (2, 5, N):
        drawn = draw([False] * k, Sampling(chunks=N, rule=rule), random.Random(0))
        assert drawn == dict.fromkeys(range(k), EXACT)
    rate = Sampling(rate=1.0, rule=rule)
    assert draw([False, True], rate, random.Random(0)) == {0: EXACT, 1: EXACT}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "one of rate and chunks"),
        ({"chunks": 1, "rate": 0.5}, "one of rate and chunks"),
        ({"chunks": 0}, "at least 1"),
        ({"chunks": 2.0}, "at least 1"),
        ({"chunks": True}, "at least 1"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": 1.5}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"rate": 1e-320}, "above 0"),
        ({"rate": "a"}, "above 0"),
        ({"rate": 0.5, "rule": "bernoulli"}, "unbiased, fixed, paper"),
        ({"rate": 0.5, "label_rate": 0}, "label_rate"),
        ({"rate": 0.5, "label_rate": 2}, "label_rate"),
        ({"rate": 0.5, "cap": 2}, "biased"),
        ({"chunks": 2, "rule": "fixed", "cap": 0.5}, "at least 1"),
        ({"chunks": 2, "rule": "paper", "cap": math.inf}, "at least 1"),
        ({"chunks": 2, "rule": "fixed", "label_rate": 0.5}, "as likely"),
        ({"chunks": 1, "rule": "fixed"}, "at least 2"),
        ({"rate": 0.5, "report_loss": 1}, "true or false"),
        ({"rate": 0.5, "seed": 1.5}, "seed"),
        ({"rates": 0.5}, "rates"),
    ],
)
def test_unusable_sampling_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named) as refused:
        sampling_of(fields)
    assert "chunks.sample" in str(refused.value)


@pytest.mark.parametrize("value", [0.5, "half", [1]])
def test_what_is_no_sampling_is_refused(value):
    with pytest.raises(ConfigError, match="a mapping"):
        sampling_of(value)


def test_sequences_are_drawn_apart_and_whole_ones_always():
    """Of two sequences of equal length neither repeats the other's draw, and what is not cut is in
    every step, also where nothing of the cut ones is."""
    plan = plan_chunkflow([64, 64, 3], ChunkOptions(size=4, hybrid=False), stages=(1,))
    (whole,) = set(range(len(plan.chunks))) - {c for own in plan.groups.values() for c in own}
    differ = 0
    for seed in range(20):
        drawn = draw_chunks(plan, Sampling(rate=0.5, seed=seed))
        first, second = (
            [group.index(c) for c in group if c in drawn] for group in plan.groups.values()
        )
        differ += first != second
        assert whole in drawn
        assert set(draw_chunks(plan, Sampling(rate=1e-6, seed=seed))) == {whole}
    assert differ == 20
