"""Inputs of a chunk on one process: token ids, positions and labels, cut as the plan says.

Labels are shifted before cutting: the label of a chunk's last token is the first token of the next.
Where a sequence branches, a token has as many labels as there are tokens that follow it. A process
without a token has one row of no sequence, without a label.

    T rows of the process
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.plan.rows import ChunkRows
from furlong.runtime.inputs import ShiftedSequence, count_valid_tokens


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from each slice's own place in its sequence
    labels: Tensor  # (R,) int64, shifted
    labelled_rows: Tensor  # (R,) int64, the row of each label
    rows: ChunkRows


def labelled_chunks(plan: ChunkPlan, sequences: Sequence[ShiftedSequence]) -> set[int]:
    """The chunks that have a label."""
    return {
        index
        for index, chunk in enumerate(plan.chunks)
        if any(len(sequences[s.seq_id].labelled(s.start, s.stop)[0]) for s in chunk.slices)
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
        self._plan, self._sequences, self._device = plan, sequences, device
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
            slices, trees = self._plan.chunks[chunk].slices, self._plan.trees
            branches = {
                (s.seq_id, s.start): self._plan.position(s) for s in slices if s.seq_id in trees
            }
            rows = self._rows_of(self._plan.chunks[chunk])
            self._built[chunk] = chunk_inputs(rows, self._sequences, self._device, branches)
        return self._built[chunk]

    def end(self, index: int) -> None:
        """Forget the chunk whose last action is number `index`."""
        self._built.pop(self._ends.get(index, -1), None)


def chunk_inputs(
    rows: ChunkRows,
    sequences: Sequence[ShiftedSequence],
    device: torch.device,
    branches: Mapping[tuple[int, int], int] | None = None,
) -> ChunkInputs:
    """The inputs of a process's rows of one chunk, on their way to the device. `branches`: by
    sequence and first token, the position of runs for which it is another than that token."""
    ids, positions, labels, labelled = [], [], [], []
    for (seq_id, start, stop), row in rows.runs():
        sequence = sequences[seq_id]
        ids.append(sequence.input_ids[start:stop])
        own_rows, own_labels = sequence.labelled(start, stop)
        labelled.append(own_rows + row)
        labels.append(own_labels)
        first = sequence.first_position + (branches or {}).get((seq_id, start), start)
        positions.append(torch.arange(first, first + stop - start, device="cpu"))
    if not rows.tokens:
        ids = positions = [torch.zeros(1, dtype=torch.int64, device="cpu")]
        labels = labelled = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    sent = [sent_to(device, torch.cat(x)) for x in (ids, positions, labels, labelled)]
    return ChunkInputs(sent[0], sent[1], sent[2], sent[3], rows)


def sent_to(device: torch.device, x: Tensor) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
