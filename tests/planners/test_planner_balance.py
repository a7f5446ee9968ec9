"""Sequences dealt to replicas: nothing lost, nobody idle, slowest replica near the best."""

from itertools import product

import pytest
from helpers.shapes import with_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.cost.shape import model_shape
from furlong.errors import ConfigError
from furlong.planners.chunks import by_cost, by_order, sequence_work


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 12))
def test_every_sequence_once_and_no_replica_idle(costs, dp_size):
    if dp_size > len(costs):
        with pytest.raises(ConfigError, match=f"set dp to at most {len(costs)}"):
            by_cost(costs, dp_size)
        return
    for replicas in (by_cost(costs, dp_size), by_order(len(costs), dp_size)):
        assert len(replicas) == dp_size
        assert all(replicas)
        assert sorted(i for own in replicas for i in own) == list(range(len(costs)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=7), st.integers(2, 3))
def test_slowest_replica_is_within_four_thirds_of_the_best(costs, dp_size):
    if dp_size > len(costs):
        return
    best = min(
        max(sum(c for c, d in zip(costs, dealt, strict=True) if d == r) for r in range(dp_size))
        for dealt in product(range(dp_size), repeat=len(costs))
    )
    slowest = max(sum(costs[i] for i in own) for own in by_cost(costs, dp_size))
    assert best <= slowest <= (4 / 3 - 1 / (3 * dp_size)) * best


def test_known_deals():
    assert by_order(5, 2) == [[0, 2, 4], [1, 3]]
    assert by_cost([2, 3, 5, 4], 2) == [[2, 0], [3, 1]]


def test_work_counts_attention():
    shape = model_shape("Qwen2.5-0.5B")
    lens = [32768, *[4096] * 8]
    matrices = 24 * shape.layers[0].matrices + shape.embedding_parameters
    scores = 2 * 24 * shape.q_size  # two products; of n^2 pairs a mask leaves half and the diagonal
    expected = [2 * matrices * n + scores * n * (n + 1) for n in lens]
    assert sequence_work(lens, shape) == expected
    # as many tokens in the long one as in all short ones, and more than twice the work
    assert by_cost(lens, 2) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert len(by_cost(sequence_work(lens, shape), 3)[0]) == 1
    work = sequence_work(lens, shape)
    assert work[0] > 2 * sum(work[1:])


def test_windows_bound_the_work():
    shape = model_shape("Qwen2.5-0.5B")
    windowed = with_windows(shape, (1024,) * 12 + (None,) * 12)
    unseen = sum(range(32768 - 1024 + 1))
    saved = sequence_work([32768], shape)[0] - sequence_work([32768], windowed)[0]
    assert saved == 12 * 4 * shape.q_size * unseen


@pytest.mark.parametrize("dp_size", [0, 3])
def test_refuses_more_replicas_than_sequences(dp_size):
    with pytest.raises(ConfigError, match=f"dp {dp_size} for a global batch of 2 sequences"):
        by_order(2, dp_size)
