"""Batches of a data collator, read as sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from furlong.errors import DataError
from furlong.ops.loss import IGNORE_INDEX
from furlong.runtime.inputs import ShiftedSequence, count_valid_tokens
from furlong.runtime.tokens.rows import IMPLIED, BatchRow, is_carried_on, rows_of_batch

_READ = {"input_ids", "labels", "attention_mask", "position_ids"}


def unpad(
    batch: dict[str, Any], *, model_type: str = "", has_cache: bool = False
) -> list[ShiftedSequence]:
    """The sequences of a collator's batch, without padding, each with what its tokens predict.

    batch: input_ids, labels (B, T) int64; attention_mask and position_ids as in `rows_of_batch`,
        and `has_cache` too. `model_type`: that of the model which is trained on it.
    Raises DataError for a batch that asks for anything else, and for labels that padding predicts.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    known = _READ | (IMPLIED if positions is not None else set())
    unknown = sorted(key for key in batch.keys() - known if batch[key] is not None)
    input_ids, labels = batch.get("input_ids"), batch.get("labels")
    is_shaped = (
        isinstance(input_ids, Tensor)
        and isinstance(labels, Tensor)
        and input_ids.ndim == 2
        and input_ids.shape == labels.shape
        and input_ids.dtype == labels.dtype == torch.int64
    )
    if unknown or not is_shaped:
        found = ", ".join(unknown or sorted(batch))
        raise _unreadable(f"a batch with {found}", "input_ids and labels of shape (B, T), int64")
    assert isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    rows = rows_of_batch(input_ids, mask, positions, has_cache=has_cache)
    if is_carried_on(mask, model_type):
        raise _unreadable(
            f"a batch of {model_type} with padding in front, which its own recurrent layers carry "
            "on in their states", "padding behind", "pad behind",
        )  # fmt: skip
    predicted = torch.full(labels.shape, IGNORE_INDEX, device="cpu")  # by each token: the next
    predicted[:, :-1] = labels[:, 1:]
    if mask is not None:
        _refuse_labels_of_padding(predicted, rows)
    return [
        ShiftedSequence(
            input_ids[row.index, row.start : row.stop],
            predicted[row.index, row.start : row.stop],
            row.first_position,
        )
        for row in rows
    ]


def _refuse_labels_of_padding(predicted: Tensor, rows: list[BatchRow]) -> None:
    """Raise DataError if anything outside of the rows predicts a label, of `predicted` (B, T)."""
    outside = predicted.clone()
    for row in rows:
        outside[row.index, row.start : row.stop] = IGNORE_INDEX
    num_lost = int((outside != IGNORE_INDEX).sum())
    if num_lost:
        raise _unreadable(
            f"{num_lost} labels of what tokens of padding predict",
            "a loss of real tokens alone: padding does not go through the chunks",
            "give padding, and the first token of a row that is padded in front, the label -100",
        )


def num_labels(sequence: ShiftedSequence) -> int:
    """Labels that tokens of a sequence predict."""
    return count_valid_tokens([sequence])


def without_repeats(batch: dict[str, Any], num_samples: int, num_own: int) -> dict[str, Any]:
    """A batch of `num_samples` samples, of which those behind the first `num_own` have no labels.

    A sample is a row, or a sequence where a collator has joined them to one row. Where samples
    cannot be told apart, in one row of packed ones, all keep their labels.
    """
    labels = batch.get("labels")
    if labels is None:
        return batch  # `unpad` refuses it
    if len(labels) == num_samples:
        sample = torch.arange(num_samples, device=labels.device)[:, None]
    elif len(labels) == 1 and batch.get("position_ids") is not None:
        sample = (batch["position_ids"] == 0).cumsum(-1) - 1
        if int(sample[0, -1]) != num_samples - 1:
            return batch
    else:
        return batch
    return {**batch, "labels": labels.masked_fill(sample >= num_own, IGNORE_INDEX)}


def _unreadable(
    given: str,
    required: str,
    change: str = "use a collator of causal language modelling, such as TRL's",
) -> DataError:
    return DataError(given=given, required=required, source="the data collator", change=change)
