"""Samples that leave nothing out are refused by name; others pass."""

import pytest

from furlong.errors import ConfigError
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import (
    Factors,
    Sampling,
    check_sampling,
    draw_chunks,
    num_drawn,
    sample_backwards,
    sampling_in_words,
)


@pytest.mark.parametrize(
    ("sampling", "more", "source", "given"),
    [
        (Sampling(rate=0.5), {"longest": 64}, "chunks.size and chunks.sample", "of 64 tokens"),
        (Sampling(chunks=4), {}, "chunks.sample.chunks", "chunks = 4, and 4 chunks"),
        (Sampling(chunks=9, rule="fixed"), {}, "chunks.sample.chunks", "and 4 chunks"),
        (Sampling(chunks=4, label_rate=0.1), {}, "chunks.sample.chunks", "and 4 chunks"),
        (Sampling(rate=1), {}, "chunks.sample.rate", "rate = 1"),
        (Sampling(rate=1, label_rate=0.5), {}, "chunks.sample.rate", "rate = 1"),
        (Sampling(rate=1, rule="paper"), {}, "chunks.sample.rate", "rate = 1"),
        (Sampling(rate=0.9, rule="fixed"), {}, "chunks.sample.rate", "draws 4 of the 4"),
        (Sampling(rate=0.1, rule="paper"), {"longest": 65}, "chunks.sample.rate", "2 of the 2"),
        (Sampling(rate=0.1), {"has_unlabelled": False}, "chunks.sample.label_rate", "every chunk"),
        (
            Sampling(rate=0.1, label_rate=1),
            {"has_unlabelled": False},
            "chunks.sample.label_rate",
            "plain text",
        ),
    ],
)
def test_a_sample_that_draws_everything_is_refused(sampling, more, source, given):
    with pytest.raises(ConfigError) as caught:
        check_sampling(sampling, **({"size": 64, "longest": 200} | more))
    assert caught.value.source == source
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


def test_default_rates_are_for_data_with_unlabelled_chunks():
    check_sampling(Sampling(rate=0.25), size=64, longest=200, has_unlabelled=True)


def test_what_is_refused_would_have_drawn_everything():
    plan = plan_on_device([200, 70, 20], ChunkOptions(size=64), num_layers=1)
    everything = set(range(len(plan.chunks)))
    for sampling in (Sampling(rate=0.9, rule="fixed"), Sampling(chunks=4), Sampling(rate=1)):
        assert draw_chunks(plan, sampling).keys() == everything
    assert draw_chunks(plan, Sampling(rate=1e-6), everything).keys() == everything
    few = [draw_chunks(plan, Sampling(chunks=3, rule="fixed", seed=seed)) for seed in range(9)]
    assert all(drawn.keys() < everything for drawn in few)


def test_a_chunk_that_runs_for_zeros_was_not_drawn():
    plan = plan_on_device([200], ChunkOptions(size=64), num_layers=2)
    assert num_drawn(plan) == 4
    assert num_drawn(sample_backwards(plan, {0: Factors(2, 2), 3: Factors(2, 2)})) == 2
    nothing = sample_backwards(plan, {})
    assert (len(nothing.trained), num_drawn(nothing)) == (1, 0)


def test_stages_count_once():
    options = ChunkOptions(size=64, order="layer-first", stage_layers=1)
    plan = plan_on_device([200], options, num_layers=3)
    assert num_drawn(sample_backwards(plan, {1: Factors(2, 2)})) == 1


def test_words():
    assert sampling_in_words(Sampling(rate=0.25)) == "rate 0.25, rule unbiased"
    capped = Sampling(chunks=8, rule="fixed", cap=2.0, report_loss=True)
    assert sampling_in_words(capped) == "chunks 8, rule fixed, cap 2.0, report_loss"
