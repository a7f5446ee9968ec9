"""The order of the batches, weights of sources, and positions that can be gone back to."""

from __future__ import annotations

import math
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from furlong.data.loader import (
    Epochs,
    LoaderState,
    Mixture,
    count_steps,
    describe_batches,
    each_alone,
    in_order,
    iterate_batches,
    with_lookahead,
)
from furlong.data.tokenize import Sequence
from furlong.errors import ConfigError
from furlong.plan.lengths import StepSize

SEQUENCES = [
    Sequence(i, f"file:{i}", np.full(i + 1, i, np.int32), np.full(i + 1, i, np.int32))
    for i in range(10)
]
EACH = each_alone(10)
LENS = np.arange(1, 11)
PLAIN = Mixture((10,), (1.0,))
WEIGHTED = Mixture((6, 3, 1), (0.5, 2.0, 1.5))


FOUR = StepSize(4)


def epochs(seed: int, size: StepSize = FOUR, mixture: Mixture = PLAIN, lens: Any = LENS) -> Epochs:
    return Epochs(mixture, size, seed, lens)


def ids(
    seed: int,
    num_batches: int,
    state: LoaderState | None = None,
    mixture: Mixture = PLAIN,
    size: StepSize = FOUR,
) -> list[list[int]]:
    order = epochs(seed, size, mixture)
    batches = iterate_batches(SEQUENCES, EACH, order, state=state or LoaderState())
    return [[s.seq_id for s in batch.sequences] for batch in islice(batches, num_batches)]


def test_every_epoch_holds_every_sequence_once_in_its_own_order() -> None:
    batches = ids(0, 6)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_seed_fixes_the_order() -> None:
    assert ids(7, 5) == ids(7, 5)
    assert ids(7, 5) != ids(8, 5)
    # Written down: a new version must not change what a checkpoint goes on with.
    assert ids(0, 1) == [[4, 6, 2, 7]]
    assert WEIGHTED.order(0, 0).tolist() == WEIGHTED_ORDER


WEIGHTED_ORDER = [7, 6, 7, 0, 2, 6, 8, 9, 9, 8, 4]


@pytest.mark.parametrize(
    ("mixture", "size"),
    [(PLAIN, StepSize(4)), (WEIGHTED, StepSize(4)), (WEIGHTED, StepSize(tokens=12))],
    ids=["plain", "weighted", "tokens"],
)
def test_any_position_goes_on_as_if_nothing_had_happened(mixture: Mixture, size: StepSize) -> None:
    whole = ids(3, 8, None, mixture, size)
    batches = iterate_batches(SEQUENCES, EACH, epochs(3, size, mixture))
    for number, batch in enumerate(islice(batches, 7), start=1):
        state = batch.next_state
        assert ids(3, 8 - number, state, mixture, size) == whole[number:]


def test_going_on_reads_nothing_of_what_lies_before() -> None:
    class Counted(list[Sequence]):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            self.read += 1
            return super().__getitem__(index)

    sequences = Counted(SEQUENCES)
    state = LoaderState(epoch=1000, batch=1)
    next(iterate_batches(sequences, EACH, epochs(0), state=state))
    assert sequences.read == 4


def test_epochs_are_passes_whatever_is_skipped() -> None:
    """As many steps as there are batches with a label in so many passes over the data."""
    labels = np.array([False, False, True, False, False, False, False, True, False, False])
    for num_epochs, per_step in ((1, 1), (3, 2), (2.5, 3), (4, 10)):
        order = [PLAIN.order(5, epoch) for epoch in range(4)]
        batches = [ids[i : i + per_step] for ids in order for i in range(0, 10, per_step)]
        passed = batches[: math.ceil(num_epochs * math.ceil(10 / per_step))]
        expected = sum(bool(labels[batch].any()) for batch in passed)
        assert count_steps(num_epochs, epochs(5, StepSize(per_step)), labels) == expected
    assert count_steps(3, epochs(0, StepSize(1)), labels) == 6
    assert count_steps(2.5, epochs(0), labels | True) == 8


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_a_batch_in_tokens_is_closed_when_the_next_sequence_would_go_over(
    lens: list[int], tokens: int
) -> None:
    stops = StepSize(tokens=tokens).stops(lens)
    batches = [lens[i:j] for i, j in pairwise([0, *stops])]
    assert list(chain(*batches)) == lens
    for batch, following in zip(batches, [*batches[1:], [tokens]], strict=True):
        assert batch and (sum(batch) <= tokens or len(batch) == 1)
        assert sum(batch) + following[0] > tokens
    order = epochs(1, StepSize(tokens=tokens), Mixture((len(lens),), (1.0,)), np.array(lens))
    assert count_steps(2, order, np.ones(len(lens), bool)) == sum(
        len(order.batches(epoch)) for epoch in range(2)
    )


def test_weights_are_draws_per_epoch() -> None:
    assert WEIGHTED.draws == (3, 6, 2)  # 0.5 * 6, 2.0 * 3, and 1.5 * 1 rounded up
    assert Mixture((1000, 3, 0), (0.3333, 0.01, 5.0)).draws == (333, 1, 0)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 4)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
def test_sequences_of_a_source_are_drawn_equally_often(
    sources: list[tuple[int, float]], num_epochs: int, seed: int
) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixture = Mixture(sizes, weights)
    drawn = np.zeros(sum(sizes), np.int64)
    for epoch in range(num_epochs):
        np.add.at(drawn, mixture.order(seed, epoch), 1)
    for part, draws in zip(np.split(drawn, np.cumsum(sizes)[:-1]), mixture.draws, strict=True):
        assert part.sum() == draws * num_epochs
        assert part.max() - part.min() <= 1


def test_equal_weights_are_no_weights() -> None:
    assert ids(3, 6, mixture=Mixture((4, 6), (1.0, 1.0))) == ids(3, 6)


def test_passes_over_a_part_have_orders_of_their_own() -> None:
    halves = Mixture((100,), (0.5,))
    chosen = [frozenset(halves.order(0, epoch).tolist()) for epoch in range(6)]
    assert all(chosen[i] | chosen[i + 1] == set(range(100)) for i in (0, 2, 4))
    assert len(set(chosen)) == 6
    assert chosen[0] != frozenset(halves.order(1, 0).tolist())


def test_a_batch_counts_its_labels_and_makes_tensors() -> None:
    (batch, *_) = in_order(SEQUENCES, EACH[:2], StepSize(4))
    assert (batch.num_tokens, batch.num_valid_tokens) == (3, 1)
    tensors = batch.tensors()
    assert [t["input_ids"].tolist() for t in tensors] == [[0], [1, 1]]
    assert tensors[0]["labels"].dtype == torch.int64


def test_in_order_is_one_pass() -> None:
    for size, expected in (
        (StepSize(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (StepSize(tokens=10), [[0, 1, 2, 3], [4], [5], [6], [7], [8], [9]]),
    ):
        batches = in_order(SEQUENCES, EACH, size)
        assert [[s.seq_id for s in b.sequences] for b in batches] == expected


@pytest.mark.parametrize(
    ("num_draws", "per_step", "told"),
    [
        (12, 8, "12 sequences per epoch in 2 batches of 8, the last one of 4"),
        (12, 6, "12 sequences per epoch in 2 batches of 6"),
        (12, 12, "12 sequences per epoch in 1 batch of 12"),
        (10_000, 32, "10,000 sequences per epoch in 313 batches of 32, the last one of 16"),
    ],
)
def test_the_sizes_of_batches_are_said(num_draws: int, per_step: int, told: str) -> None:
    order = epochs(0, StepSize(per_step), Mixture((num_draws,), (1.0,)), np.ones(num_draws, int))
    assert describe_batches(order) == told
    sizes = {len(batch) for batch in order.batches(0)}
    assert sizes == {per_step, num_draws % per_step or per_step}


def test_batches_in_tokens_are_said() -> None:
    told = describe_batches(epochs(0, StepSize(tokens=9)))
    assert told.startswith("10 sequences per epoch in ")
    assert told.endswith("batches of at most 9 tokens (the first epoch); 1 longer, each by itself")


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"= 1,000[\s\S]*at most 12, the training sequences"):
        describe_batches(epochs(0, StepSize(1000), Mixture((12,), (1.0,))))


def test_a_part_of_a_batch_reads_nothing_else() -> None:
    unread: Any = None
    sequences = [SEQUENCES[2], Sequence(3, "x", np.zeros(4, np.int32), unread, counted=3)]
    (batch,) = in_order(sequences, EACH[:2], StepSize(2))
    assert batch.seq_lens == (3, 4) and batch.num_valid_tokens == 2 + 3
    part = batch.part([0])
    assert part.keys() == {0} and part[0]["input_ids"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_batches_are_told_before_the_one_in_front_is_handed_out(num_batches: int) -> None:
    batches = list(in_order(SEQUENCES, EACH[: 2 * num_batches], StepSize(2)))
    told: list[Any] = []
    seen = 0
    for batch in with_lookahead(iter(batches), told.append):
        assert batch is batches[seen]
        seen += 1
        assert told == batches[: seen + 1]
    assert seen == num_batches
