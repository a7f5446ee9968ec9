"""Inputs of a process's rows, and which chunks have a label: one anywhere in them is enough."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_families import build
from papers.chunkflow_plan import plan_chunkflow
from torch import Tensor

from furlong.cost.memory import TOKEN_BYTES
from furlong.errors import UnsupportedModelError
from furlong.models.decoder import HFDecoder
from furlong.ops.loss import IGNORE_INDEX
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import rows_of
from furlong.planners.options import ChunkOptions
from furlong.runtime.batch import (
    batch_of,
    chunk_inputs,
    chunk_targets,
    labelled_chunks,
    shift_labels,
)


@pytest.mark.parametrize("token", [1, 7, 8, 9, 15, 16, 22])
def test_a_chunk_with_one_label_has_labels(token):
    """The label of a token is what the token before it predicts."""
    labels = torch.full((23,), IGNORE_INDEX)
    labels[token] = 5
    sequence = {"input_ids": torch.arange(23), "labels": labels}
    plan = plan_chunkflow([23], ChunkOptions(size=8, hybrid=False), stages=(1,))
    (chunk,) = labelled_chunks(plan, batch_of(shift_labels([sequence])))
    (piece,) = plan.chunks[chunk].slices
    assert piece.start <= token - 1 < piece.stop


def test_any_sequence_of_a_packed_chunk_is_enough():
    rows = [torch.arange(5), torch.arange(4)]
    bare = {"input_ids": rows[0], "labels": torch.full((5,), IGNORE_INDEX)}
    full = {"input_ids": rows[1], "labels": rows[1]}
    plan = plan_chunkflow([5, 4], ChunkOptions(size=16), stages=(1,))
    assert labelled_chunks(plan, batch_of(shift_labels([bare, full]))) == {0}
    assert labelled_chunks(plan, batch_of(shift_labels([bare, bare]))) == set()


CHUNK = Chunk((Slice(0, 2, 9, Place(0, 2)), Slice(1, 0, 4, Place(1, 1))))
CPU = torch.device("cpu")


def test_a_process_has_its_rows_with_their_own_positions_and_labels():
    ids = [torch.arange(10, 20), torch.arange(30, 34)]
    batch = batch_of(shift_labels([{"input_ids": i, "labels": i.clone()} for i in ids]))
    rows = [rows_of(CHUNK, i, sp_size=2, q_heads=2, kv_heads=2) for i in (0, 1)]
    both = [chunk_inputs(own, batch, CPU) for own in rows]
    assert both[0].input_ids.tolist() == [12, 13, 14]
    assert both[0].position_ids.tolist() == [2, 3, 4]
    assert both[1].input_ids.tolist() == [15, 16, 17, 18, 30, 31, 32, 33]
    assert both[1].position_ids.tolist() == [5, 6, 7, 8, 0, 1, 2, 3]
    first, second = (chunk_targets(own, batch, CPU) for own in rows)
    assert first.labels.tolist() == [13, 14, 15], "the last one's label lies on the other process"
    assert second.labelled_rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    waiting = [x for f in fields(both[1]) if isinstance(x := getattr(both[1], f.name), Tensor)]
    assert sum(x.nbytes for x in waiting) == 8 * TOKEN_BYTES, "what is there between two passes"


def test_a_process_without_a_token_has_one_without_a_label():
    batch = batch_of(
        shift_labels([{"input_ids": torch.arange(5, 9), "labels": torch.arange(5, 9)}])
    )
    chunk = Chunk((Slice(0, 0, 4, Place(0, 1)),))
    rows = rows_of(chunk, 1, sp_size=2, q_heads=2, kv_heads=2)
    inputs, targets = chunk_inputs(rows, batch, CPU), chunk_targets(rows, batch, CPU)
    assert inputs.input_ids.shape == inputs.position_ids.shape == (1,)
    assert not len(targets.labels) and not len(targets.labelled_rows)


def test_layers_with_other_numbers_of_heads_are_refused_in_a_pool():
    assert HFDecoder(build("llama")).heads == (4, 2)
    model = HFDecoder(build("llama"))
    model.config = SimpleNamespace(num_attention_heads=[4, 2, 4])  # a family of the hub's code
    with pytest.raises(UnsupportedModelError, match="has not one number of heads"):
        _ = model.heads


def test_the_last_token_of_a_sequence_predicts_nothing():
    ids = torch.arange(3)
    (shifted,) = shift_labels([{"input_ids": ids, "labels": ids}])
    assert shifted.labels.tolist() == [1, 2, -100]
