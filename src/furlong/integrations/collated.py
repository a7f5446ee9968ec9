"""Batches of a data collator, read as sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from furlong.errors import DataError
from furlong.ops.loss import IGNORE_INDEX

_READ = {"input_ids", "labels", "attention_mask", "position_ids"}
# What collators add for kernels that we do not call: all of it follows from position_ids.
_IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}

Sequences = list[dict[str, Tensor]]


def unpad(batch: dict[str, Any]) -> Sequences:
    """The sequences of a collator's batch, without padding.

    batch: input_ids, labels (B, T) int64; attention_mask (B, T) with padding on either side, 0; or
        position_ids (B, T), which start at 0 with every sequence of a packed row.
    Returns one {"input_ids": (T,), "labels": (T,)} per sequence. Raises DataError for a batch that
    asks for anything else.
    """
    unknown = sorted(key for key in batch.keys() - _READ - _IMPLIED if batch[key] is not None)
    if unknown or "labels" not in batch or batch["input_ids"].ndim != 2:
        found = ", ".join(unknown or sorted(batch))
        raise _unreadable(f"a batch with {found}", "input_ids and labels of shape (B, T)")
    rows = []
    for index in range(len(batch["input_ids"])):
        row = {key: batch[key][index] for key in _READ if batch.get(key) is not None}
        mask = row.pop("attention_mask", None)
        if mask is not None:
            row = _inside(row, mask)
        rows += _split_packed(row)
    return rows


def _inside(row: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """A row without its padding."""
    inside = mask.nonzero().flatten()
    length = len(inside)
    if (
        mask.ndim != 1
        or not length
        or int(mask.max()) != 1
        or int(inside[-1] - inside[0]) >= length
    ):
        raise _unreadable(
            f"an attention_mask of shape {tuple(mask.shape)} per row that is more than padding",
            "one run of ones per row, zeros before or after it",
        )
    return {key: value[inside[0] : inside[-1] + 1] for key, value in row.items()}


def _split_packed(row: dict[str, Tensor]) -> Sequences:
    """The sequences of an unpadded row."""
    if "position_ids" not in row:
        return [row]
    positions = row.pop("position_ids").cpu()
    starts = positions == 0
    rows = torch.arange(len(positions), device="cpu")
    last_start = torch.where(starts, rows, 0).cummax(0).values
    if not torch.equal(positions, rows - last_start):
        shown = ", ".join(map(str, positions.flatten()[:8].tolist()))
        raise _unreadable(f"position_ids {shown}, ...", "0, 1, 2, ... in every sequence")
    end = torch.tensor([len(positions)], device="cpu")
    lens = torch.cat([starts.nonzero().flatten(), end]).diff()
    parts = {key: value.split(lens.tolist()) for key, value in row.items()}
    return [
        {"input_ids": ids, "labels": labels}
        for ids, labels in zip(parts["input_ids"], parts["labels"], strict=True)
    ]


def num_labels(sequence: dict[str, Tensor]) -> int:
    """Labels of a sequence that have a context in it."""
    return int((sequence["labels"][1:] != IGNORE_INDEX).sum())


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


def _unreadable(given: str, required: str) -> DataError:
    return DataError(
        given=given,
        required=required,
        source="the data collator",
        change="use a collator of causal language modelling, such as TRL's",
    )
