"""Which chunks have a label: one anywhere in them is enough."""

import pytest
import torch
from papers.chunkflow_plan import plan_chunkflow

from furlong.ops.loss import IGNORE_INDEX
from furlong.planners.options import ChunkOptions
from furlong.runtime.chunk_inputs import labelled_chunks
from furlong.runtime.inputs import shift_labels


@pytest.mark.parametrize("token", [1, 7, 8, 9, 15, 16, 22])
def test_a_chunk_with_one_label_has_labels(token):
    """The label of a token is what the token before it predicts."""
    labels = torch.full((23,), IGNORE_INDEX)
    labels[token] = 5
    sequence = {"input_ids": torch.arange(23), "labels": labels}
    plan = plan_chunkflow([23], ChunkOptions(size=8, hybrid=False), stages=(1,))
    (chunk,) = labelled_chunks(plan, shift_labels([sequence]))
    (piece,) = plan.chunks[chunk].slices
    assert piece.start <= token - 1 < piece.stop


def test_any_sequence_of_a_packed_chunk_is_enough():
    rows = [torch.arange(5), torch.arange(4)]
    bare = {"input_ids": rows[0], "labels": torch.full((5,), IGNORE_INDEX)}
    full = {"input_ids": rows[1], "labels": rows[1]}
    plan = plan_chunkflow([5, 4], ChunkOptions(size=16), stages=(1,))
    assert labelled_chunks(plan, shift_labels([bare, full])) == {0}
    assert labelled_chunks(plan, shift_labels([bare, bare])) == set()
