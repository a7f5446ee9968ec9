"""Inputs of a chunk on one process: token ids, positions and labels, cut as the plan says.

Labels are shifted before cutting: the label of a chunk's last token is the first token of the next.
A process without a token has one row of no sequence, without a label.

    T rows of the process
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.ops.loss import IGNORE_INDEX, labelled_rows
from furlong.plan.rows import ChunkRows
from furlong.plan.values import Backward, Chunk, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.runtime.inputs import ShiftedSequence, count_valid_tokens


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from each slice's own place in its sequence
    labels: Tensor  # (T,) int64, shifted
    labelled_rows: Tensor  # (R,) int64, the rows that have a label
    rows: ChunkRows


def labelled_chunks(plan: ChunkPlan, sequences: Sequence[ShiftedSequence]) -> set[int]:
    """The chunks that have a label."""
    has = [(sequence.labels != IGNORE_INDEX).numpy() for sequence in sequences]
    return {
        index
        for index, chunk in enumerate(plan.chunks)
        if any(has[piece.seq_id][piece.start : piece.stop].any() for piece in chunk.slices)
    }


class BatchInputs:
    """The inputs of a rank's chunks: each is built once, and forgotten after its last action."""

    def __init__(
        self,
        plan: ChunkPlan,
        rank: int,
        sequences: Sequence[ShiftedSequence],
        device: torch.device,
        rows_of: Callable[[Chunk], ChunkRows],
    ) -> None:
        """`rows_of`: which rows of a chunk this process has."""
        self._chunks, self._sequences, self._device = plan.chunks, sequences, device
        self._rows_of = rows_of
        self.num_valid_tokens = count_valid_tokens(sequences)
        self._built: dict[int, ChunkInputs] = {}
        last = {
            action.chunk: index
            for index, action in enumerate(plan.actions[rank])
            if isinstance(action, (Forward, Recompute, RebuildKV, Backward))
        }
        self._ends = {index: chunk for chunk, index in last.items()}

    def of(self, chunk: int) -> ChunkInputs:
        if chunk not in self._built:
            rows = self._rows_of(self._chunks[chunk])
            self._built[chunk] = chunk_inputs(rows, self._sequences, self._device)
        return self._built[chunk]

    def end(self, index: int) -> None:
        """Forget the chunk whose last action is number `index`."""
        self._built.pop(self._ends.get(index, -1), None)


def chunk_inputs(
    rows: ChunkRows, sequences: Sequence[ShiftedSequence], device: torch.device
) -> ChunkInputs:
    """The inputs of a process's rows of one chunk, on their way to the device."""
    ids, positions, labels = [], [], []
    for seq_id, start, stop in rows.tokens:
        ids.append(sequences[seq_id].input_ids[start:stop])
        labels.append(sequences[seq_id].labels[start:stop])
        first = sequences[seq_id].first_position
        positions.append(torch.arange(first + start, first + stop, device="cpu"))
    if not rows.tokens:
        ids = positions = [torch.zeros(1, dtype=torch.int64, device="cpu")]
        labels = [torch.full((1,), IGNORE_INDEX, device="cpu")]
    joined = torch.cat(labels)
    vectors = (torch.cat(ids), torch.cat(positions), joined, labelled_rows(joined))
    sent = [_sent(x, device) for x in vectors]
    return ChunkInputs(sent[0], sent[1], sent[2], sent[3], rows)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
