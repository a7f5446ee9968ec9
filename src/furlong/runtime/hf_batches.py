"""Padded and packed batches of transformers, (B, T), read as the sequences that they hold."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from furlong.errors import DataError
from furlong.ops.loss import IGNORE_INDEX
from furlong.runtime.batch import ShiftedSequence, refused_data, shown

# Keys that collators add for varlen kernels; position_ids determine them.
IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_CARRIES_PADDING = {"recurrent_gemma"}
"""Model types whose recurrent layers ignore the attention mask, so padding enters their states."""


def read_padded(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None = None,
    *,
    has_cache: bool,
    model_type: str,
) -> tuple[list[ShiftedSequence], list[int]]:
    """Split a padded or packed batch into its sequences, in order.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), ones, with zeros before or after them.
        position_ids: (B, T) or (1, T), by default the column number, so padding counts. Without
            mask and cache a sequence begins wherever positions do not increase by 1, as in
            transformers.
        labels: (B, T), unshifted, if any.
        has_cache: Whether the model's forward in transformers would create a KV cache.
        model_type: `config.model_type` of the model that reads the batch.

    Returns:
        The sequences, and the flat index of each one's first token in (B * T).

    Raises:
        DataError: For other arguments, and for labels that padding tokens would predict.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        raise refused_data(
            f"input_ids {shown(input_ids)}", "token ids of shape (B, T)",
            "pass one sequence per row, or pack several (input_ids[None], and position_ids)",
        )  # fmt: skip
    positions = _positions(input_ids, position_ids)
    bounds = _bounds(input_ids, attention_mask)
    predicted = torch.full(input_ids.shape, IGNORE_INDEX, device="cpu")  # by each token: the next
    if labels is not None:
        predicted[:, :-1] = labels[:, 1:]
        if attention_mask is not None and (lost := labels_of_padding(labels, attention_mask)):
            raise padding_read(f"{lost} labels")
    sequences, cells = [], []
    for index, (start, stop) in enumerate(bounds):
        own = positions[index, start:stop]
        breaks = (own.diff() != 1).nonzero().flatten() + 1
        beside = "an attention_mask" if attention_mask is not None else "a cache" * has_cache
        if len(breaks) and beside:
            raise refused_data(
                f"position_ids that jump within row {index}, beside {beside}",
                "positions that go on by 1: there transformers takes a row for one sequence",
                "leave the attention_mask out of packed rows" * (attention_mask is not None)
                + ", and " * (attention_mask is not None and has_cache)
                + "pass use_cache=False" * has_cache,
            )
        for a, b in pairwise([start, *(breaks + start).tolist(), stop]):
            first = int(positions[index, a])
            sequences.append(ShiftedSequence(input_ids[index, a:b], predicted[index, a:b], first))
            cells.append(index * input_ids.shape[1] + a)
    if any(sequence.first_position < 0 for sequence in sequences):
        raise refused_data(
            "position_ids below 0", "positions from 0 on", "count each sequence's positions from 0"
        )
    is_padded = attention_mask is not None and not bool(attention_mask[:, 0].all())
    if model_type in _CARRIES_PADDING and is_padded:
        raise refused_data(
            f"a batch of {model_type} with padding in front: its own recurrent layers carry padding"
            " on in their states",
            "padding behind",
            "pad behind",
        )
    return sequences, cells


def labels_of_padding(labels: Tensor, attention_mask: Tensor) -> int:
    """Return how many of the unshifted labels (B, T) are predicted from padding tokens."""
    return int(((labels[:, 1:] != IGNORE_INDEX) & (attention_mask[:, :-1] == 0)).sum())


def padding_read(what: str) -> DataError:
    """Return the error for `what` (a loss, labels) computed from padding."""
    return refused_data(
        f"{what} of what tokens of padding predict",
        "a loss of real tokens alone: padding does not go through the chunks",
        "give padding, and the first token of a row that is padded in front, the label -100, or "
        'pad behind (tokenizer.padding_side = "right"); make a loss of your own of '
        "logits[attention_mask.bool()] alone",
    )


def _bounds(input_ids: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    """Return [start, stop) of each row's tokens, without padding."""
    num_rows, num_columns = input_ids.shape
    if mask is None:
        return [(0, num_columns)] * num_rows
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        raise refused_data(
            f"attention_mask {shown(mask)}",
            f"shape {tuple(input_ids.shape)}: ones of tokens, zeros of padding",
            "leave it out where nothing is padded: attention is causal, and position_ids tell the"
            " sequences of a packed row",
        )
    bounds = []
    for index, row in enumerate(mask.detach().cpu()):
        inside = row.nonzero().flatten()
        if not len(inside) or bool((row[inside[0] : inside[-1] + 1] != 1).any()):
            raise refused_data(
                f"an attention_mask with {'holes' if len(inside) else 'no token'} in row {index}",
                "one run of ones per row, zeros before or behind it",
                "pad at the ends of rows; packed rows: position_ids, without an attention_mask"
                if len(inside)
                else "leave the row out",
            )
        bounds.append((int(inside[0]), int(inside[-1]) + 1))
    return bounds


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return positions (B, T) on the CPU."""
    num_rows, num_columns = input_ids.shape
    if position_ids is None:
        return torch.arange(num_columns, device="cpu").expand(num_rows, -1)
    shapes = ((num_rows, num_columns), (1, num_columns))
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in shapes:
        raise refused_data(
            f"position_ids {shown(position_ids)}", f"shape {shapes[0]}, or one row for all",
            "pass a position for each token, or leave them out",
        )  # fmt: skip
    return position_ids.detach().cpu().expand(num_rows, -1)
