"""What a chunk feeds to the model: token ids, positions and labels, cut as the plan says.

Labels are shifted before cutting: the label of a chunk's last token is the first token of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.errors import DataError
from furlong.ops.loss import IGNORE_INDEX
from furlong.plan.values import Chunk


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from each slice's own start
    labels: Tensor  # (T,) int64, shifted
    slices: tuple[slice, ...]
    """Rows of each slice of the chunk."""


@dataclass(frozen=True, slots=True)
class ShiftedSequence:
    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64, label t is what token t predicts


def shift_labels(sequences: Sequence[Mapping[str, Tensor]]) -> list[ShiftedSequence]:
    """Check sequences of unshifted labels and shift them by one token.

    Raises DataError for a sequence that is empty or not made of two equally long int64 vectors.
    """
    shifted = []
    for index, sequence in enumerate(sequences):
        input_ids, labels = sequence.get("input_ids"), sequence.get("labels")
        if (
            not _is_token_vector(input_ids)
            or not _is_token_vector(labels)
            or (
                input_ids.shape != labels.shape or len(input_ids) == 0  # type: ignore[union-attr, arg-type]
            )
        ):
            raise DataError(
                given=f"sequence {index} with input_ids {_describe(input_ids)}, "
                f"labels {_describe(labels)}",
                required="input_ids and labels as int64 tensors of one shape (T,), T at least 1",
                source="the sequences passed to forward_backward",
                change="pass one dict per sequence, unpadded, without a batch axis",
            )  # fmt: skip
        last = torch.full((1,), IGNORE_INDEX)
        shifted.append(ShiftedSequence(input_ids, torch.cat([labels[1:].cpu(), last])))  # type: ignore[arg-type, index]
    return shifted


def count_valid_tokens(sequences: Sequence[ShiftedSequence]) -> int:
    """Tokens that have a label, over all sequences."""
    return sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in sequences)


def chunk_inputs(
    chunk: Chunk, sequences: Sequence[ShiftedSequence], device: torch.device
) -> ChunkInputs:
    ids, positions, labels, rows = [], [], [], []
    row = 0
    for piece in chunk.slices:
        tokens = slice(piece.start, piece.stop)
        ids.append(sequences[piece.seq_id].input_ids[tokens])
        labels.append(sequences[piece.seq_id].labels[tokens])
        positions.append(torch.arange(piece.start, piece.stop))
        rows.append(slice(row, row + piece.num_tokens))
        row += piece.num_tokens
    return ChunkInputs(
        torch.cat(ids).to(device), torch.cat(positions).to(device), torch.cat(labels).to(device),
        tuple(rows),
    )  # fmt: skip


def _is_token_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 1


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
