"""SpaCO: draws of chunks and their factors, plans with a backward of the drawn ones only, and the
refusal of samples that leave nothing out.

Numbers with k = 128 and n = 8 follow from the counting in the docstring of `planners.spaco`.
"""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from helpers.expected_weight import expected_weight
from helpers.toy_model import gradient, obey
from papers.chunkflow_plan import plan_chunkflow
from papers.seco import plan_seco, plan_spaco
from papers.unit_costs import UnitCosts

from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.passes import kv_frees, passes
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Recompute, Slice
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import (
    EXACT,
    Factors,
    Sampling,
    check_sampling,
    draw,
    draw_chunks,
    fixed_factors,
    num_drawn,
    sample_backwards,
    sampled,
    sampling_of,
)
from furlong.simulate.clock import time_actions

K, N = 128, 8


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


def test_budgets():
    has_labels = [True, *[False] * (K - 1)]
    assert Sampling(rate=0.05).probabilities(has_labels)[:2] == [1, 0.05]
    assert Sampling(rate=0.05, label_rate=0.5).probabilities(has_labels)[:2] == [0.5, 0.05]
    assert sum(Sampling(chunks=N).probabilities([False] * K)) == pytest.approx(N)
    for rule in ("fixed", "paper"):
        drawn = draw([False] * K, Sampling(chunks=N, rule=rule), random.Random(0))
        assert len(drawn) == N
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
        ({"chunks": True}, "at least 1"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"rate": "a"}, "above 0"),
        ({"rate": 0.5, "rule": "bernoulli"}, "unbiased, fixed, paper"),
        ({"rate": 0.5, "label_rate": 2}, "label_rate"),
        ({"rate": 0.5, "cap": 2}, "biased"),
        ({"chunks": 2, "rule": "paper", "cap": math.inf}, "at least 1"),
        ({"chunks": 2, "rule": "fixed", "label_rate": 0.5}, "as likely"),
        ({"chunks": 1, "rule": "fixed"}, "at least 2"),
        ({"rate": 0.5, "report_loss": 1}, "true or false"),
        ({"rate": 0.5, "seed": 1.5}, "seed"),
        ({"rates": 0.5}, "rates"),
        (0.5, "a mapping"),
    ],
)
def test_unusable_sampling_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named) as refused:
        sampling_of(fields)
    assert "chunks.sample" in str(refused.value)


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


@pytest.mark.parametrize(
    ("sampling", "more", "source", "given"),
    [
        (Sampling(rate=0.5), {"longest": 64}, "size and chunks.sample", "of 64 tokens"),
        (Sampling(chunks=4), {}, "sample.chunks", "chunks = 4, which draws all of the 4 chunks"),
        (Sampling(rate=1), {}, "sample.rate", "rate = 1"),
        (Sampling(rate=0.9, rule="fixed"), {}, "sample.rate", "all of the 4"),
        (Sampling(rate=0.1, rule="paper"), {"longest": 65}, "sample.rate", "all of the 2"),
        (Sampling(rate=0.1), {"has_unlabelled": False}, "sample.label_rate", "every chunk"),
        (Sampling(rate=0.1, label_rate=1), {"has_unlabelled": False}, "sample.label_rate",
         "plain text"),
    ],
)  # fmt: skip
def test_a_sample_that_draws_everything_is_refused(sampling, more, source, given):
    with pytest.raises(ConfigError) as caught:
        check_sampling(sampling, **({"size": 64, "longest": 200} | more))
    assert caught.value.source == f"chunks.{source}"
    assert given in caught.value.given
    assert "remove chunks.sample" in caught.value.change


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(rate=0.25, label_rate=0.5),
        Sampling(chunks=3, label_rate=0.5),
        Sampling(chunks=3, rule="fixed"),
        Sampling(rate=0.5, rule="paper", cap=2),
    ],
)
def test_a_sample_that_leaves_chunks_out_is_not(sampling):
    check_sampling(sampling, size=64, longest=200, has_unlabelled=False)
    check_sampling(replace(sampling, label_rate=None), size=64, longest=200)


def test_what_is_refused_would_have_drawn_everything():
    plan = plan_on_device([200, 70, 20], ChunkOptions(size=64), num_layers=1)
    everything = set(range(len(plan.chunks)))
    for sampling in (Sampling(rate=0.9, rule="fixed"), Sampling(chunks=4), Sampling(rate=1)):
        assert draw_chunks(plan, sampling).keys() == everything
    assert draw_chunks(plan, Sampling(rate=1e-6), everything).keys() == everything
    few = [draw_chunks(plan, Sampling(chunks=3, rule="fixed", seed=seed)) for seed in range(9)]
    assert all(drawn.keys() < everything for drawn in few)


def step(plan):
    return time_actions(plan, UnitCosts(plan)).duration_s


def texts(plan, rank=0):
    return [format_action(action) for action in plan.actions[rank]]


def test_spaco_costs_one_plus_three_t_over_k_forwards():
    sizes = {"num_layers": 2, "chunk_size": 128}
    sampling = Sampling(chunks=8, rule="fixed", report_loss=True)
    plan, seco = plan_spaco([16_384], sampling, **sizes), plan_seco([16_384], **sizes)
    options = ChunkOptions(size=128)
    inference = plan_chunkflow([16_384], options, stages=(2,), backward=False)
    assert step(plan) / step(inference) == pytest.approx(1 + 3 * 8 / 128)
    assert step(plan) / step(seco) == pytest.approx(0.297, abs=1e-3)


def test_draws_follow_the_seed_and_the_sequence_alone():
    def plan(seed, seq_lens=(900, 640)):
        sampling = Sampling(chunks=3, seed=seed)
        return plan_spaco(seq_lens, sampling, num_layers=2, chunk_size=16)

    assert plan(1) == plan(1)
    assert plan(1).actions != plan(2).actions
    alone = draw_chunks(plan_seco([900], num_layers=2, chunk_size=16), Sampling(chunks=3))
    both = draw_chunks(plan_seco([900, 640], num_layers=2, chunk_size=16), Sampling(chunks=3))
    assert {c: f for c, f in both.items() if c < 57} == alone  # 57 chunks of sequence 0 come first


def trained(plan):
    return [a for actions in plan.actions for a in actions if isinstance(a, Backward)]


def test_chunks_with_labels_are_drawn_by_the_rule_for_them():
    plan = plan_seco([64], num_layers=1, chunk_size=8)
    found = sampled(plan, Sampling(rate=0.01, seed=3), labelled={2, 5})
    assert [(a.chunk, a.loss_factor) for a in trained(found)] == [(5, 1), (2, 1)]


def freed_at(plan):
    return {cell[0]: at for at, cells in enumerate(kv_frees(plan, 0)) for cell in cells}


def test_what_no_drawn_chunk_reads_is_not_computed_unless_its_loss_is_reported():
    plan = plan_seco([6], num_layers=1, chunk_size=1)
    found = sample_backwards(plan, {1: EXACT, 3: Factors(2, 2)})
    assert texts(found) == [
        *("F0.0 kv", "F1.0 kv", "F2.0 kv", "F3.0 kv", "R3.0", "B3.0 a2 c2", "R1.0", "B1.0"),
        "reduce 0",
    ]
    # chunk 2 is read by chunk 3 alone, chunk 3 by nobody
    assert freed_at(found) == {2: 5, 0: 7, 1: 7}
    assert [what.computes for what in passes(found, 0)[:4]] == [
        "to last kv", "to last kv", "to last kv", "nothing",
    ]  # fmt: skip
    whole = passes(sample_backwards(plan, {3: Factors(2, 2)}, report_loss=True), 0)
    assert [what.computes for what in whole[:6]] == [
        "values", "values", "values", "to last kv", "values", "values",
    ]  # fmt: skip


def test_graphs_of_the_last_drawn_chunks_are_retained():
    for order in ("chunk-first", "layer-first"):
        options = ChunkOptions(size=2, num_retained=2, keep="attention", order=order)
        whole = plan_on_device([16], options, num_layers=2)
        found = sample_backwards(whole, dict.fromkeys((0, 2, 5), Factors(2, 2)))
        last = len(whole.stages) - 1
        kept = {
            a.chunk: a.keep for a in found.actions[0] if isinstance(a, Forward) and a.stage == last
        }
        assert [c for c, keep in kept.items() if keep == "all"] == [2, 5], order
        again = {a.chunk for a in found.actions[0] if isinstance(a, Recompute) and a.stage == last}
        assert again == {0} and kept.keys() == set(range(6))
        assert obey(found) == pytest.approx(gradient(found), rel=1e-12)


def test_where_nothing_is_drawn_the_smallest_chunk_carries_a_gradient_of_zeros():
    plan = sample_backwards(plan_seco([9, 2], num_layers=1, chunk_size=4), {})
    assert [format_action(a) for a in trained(plan)] == ["B2.0 a0 c0"]
    assert plan.sampled and obey(plan) == gradient(plan) == [0]
    assert load_plan(save_plan(plan)) == plan
    assert (len(plan.trained), num_drawn(plan)) == (1, 0)


def test_every_data_parallel_rank_and_every_stage_has_something_to_reduce():
    chunks = [Chunk((Slice(i, 0, 4),)) for i in range(4)]
    actions = tuple(
        tuple(a for c in own for a in (Forward(c, 0, "all"), Backward(c, 0)))
        for own in ((0, 1), (2, 3))
    )
    plan = ChunkPlan((4,) * 4, tuple(chunks), (1,), actions)
    check(plan)
    sampled = sample_backwards(plan, {1: Factors(4, 1)})
    assert [(a.chunk, a.loss_factor) for a in trained(sampled)] == [(1, 4), (2, 0)]
    pipeline = plan_chunkflow([9, 3], ChunkOptions(size=2), stages=(1, 1, 1))
    assert [len(trained(sample_backwards(pipeline, {}))), len(pipeline.stages)] == [3, 3]


def test_a_draw_of_everything_is_the_whole_plan():
    for keep, stages in (("kv", (2,)), ("input", (2, 1)), ("attention", (1, 1, 1))):
        options = ChunkOptions(size=3, keep=keep, num_retained=2)
        whole = plan_chunkflow([23, 9, 2, 2], options, stages=stages)
        plan = sample_backwards(whole, dict.fromkeys(range(len(whole.chunks)), EXACT))
        assert plan.actions == whole.actions
        assert not plan.report_loss  # nobody's loss is missing
