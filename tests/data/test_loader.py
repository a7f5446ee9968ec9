"""The order of the batches."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import torch

from furlong.data.loader import LoaderState, batches_per_epoch, in_order, iterate_batches
from furlong.data.tokenize import Sequence

SEQUENCES = [
    Sequence(i, f"file:{i}", np.full(i + 1, i, np.int32), np.full(i + 1, i, np.int32))
    for i in range(10)
]


def ids(seed: int, num_batches: int, state: LoaderState | None = None) -> list[list[int]]:
    batches = iterate_batches(
        SEQUENCES, sequences_per_step=4, seed=seed, state=state or LoaderState()
    )
    return [[s.seq_id for s in batch.sequences] for batch in islice(batches, num_batches)]


def test_every_epoch_holds_every_sequence_once_in_its_own_order() -> None:
    batches = ids(0, 6)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert batches_per_epoch(10, 4) == 3


def test_seed_fixes_the_order() -> None:
    assert ids(7, 5) == ids(7, 5)
    assert ids(7, 5) != ids(8, 5)


def test_any_position_goes_on_as_if_nothing_had_happened() -> None:
    whole = ids(3, 8)
    batches = iterate_batches(SEQUENCES, sequences_per_step=4, seed=3)
    for number, batch in enumerate(islice(batches, 7), start=1):
        assert ids(3, 8 - number, batch.next_state) == whole[number:]


def test_a_batch_counts_its_labels_and_makes_tensors() -> None:
    (batch, *_) = in_order(SEQUENCES[:2], 4)
    assert (batch.num_tokens, batch.num_valid_tokens) == (3, 1)
    tensors = batch.tensors(torch.device("cpu"))
    assert [t["input_ids"].tolist() for t in tensors] == [[0], [1, 1]]
    assert tensors[0]["labels"].dtype == torch.int64
