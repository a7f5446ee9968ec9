"""Which cells of a padded or packed batch are a sequence, read as transformers reads them.

B rows of a batch, T columns
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from furlong.errors import DataError

# What collators add for kernels that we do not call: all of it follows from position_ids.
IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_CARRIES_PADDING = {"recurrent_gemma"}
"""Model types whose recurrent layers in transformers go over padding, though a mask names it."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The columns [start, stop) of row `index`: one sequence."""

    index: int
    start: int
    stop: int
    first_position: int


def rows_of_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    has_cache: bool,
) -> list[BatchRow]:
    """The sequences of a batch of token ids (B, T), in order.

    `attention_mask` (B, T): ones, with zeros in front of them or behind. `position_ids` (B, T) or
    (1, T): default the column, padding counted. With neither mask nor cache (`has_cache`: whether
    transformers would make one) a sequence begins wherever positions do not go on by 1, as
    transformers has it. Raises DataError for anything else.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        raise _unreadable(f"input_ids {_shown(input_ids)}", "token ids of shape (B, T)")
    positions = _positions(input_ids, position_ids)
    rows = []
    for index, (start, stop) in enumerate(_bounds(input_ids, attention_mask)):
        own = positions[index, start:stop]
        breaks = (own.diff() != 1).nonzero().flatten() + 1
        beside = "an attention_mask" if attention_mask is not None else "a cache" * has_cache
        if len(breaks) and beside:
            raise _unreadable(
                f"position_ids that jump within row {index}, beside {beside}",
                "positions that go on by 1: there transformers takes a row for one sequence",
                "leave the attention_mask out of packed rows, and pass use_cache=False",
            )
        ends = [start, *(breaks + start).tolist(), stop]
        rows += [BatchRow(index, a, b, int(positions[index, a])) for a, b in pairwise(ends)]
    if any(row.first_position < 0 for row in rows):
        raise _unreadable("position_ids below 0", "positions from 0 on")
    return rows


def is_carried_on(attention_mask: Tensor | None, model_type: str) -> bool:
    """Whether a model carries padding in front on in its states, so that no row is read alone."""
    if model_type not in _CARRIES_PADDING or attention_mask is None:
        return False
    return not bool(attention_mask[:, 0].all())


def _bounds(input_ids: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    """The first and the last column but one of each row's tokens."""
    num_rows, num_columns = input_ids.shape
    if mask is None:
        return [(0, num_columns)] * num_rows
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        raise _unreadable(
            f"attention_mask {_shown(mask)}",
            f"shape {tuple(input_ids.shape)}: ones of tokens, zeros of padding",
            "leave it out where nothing is padded: attention is causal, and position_ids tell the"
            " sequences of a packed row",
        )
    bounds = []
    for index, row in enumerate(mask.detach().cpu()):
        inside = row.nonzero().flatten()
        is_odd = not len(inside) or int(inside[-1] - inside[0]) >= len(inside)
        if is_odd or bool((row[inside] != 1).any()):
            what = "holes" if len(inside) else "no token"
            raise _unreadable(
                f"an attention_mask with {what} in row {index}",
                "one run of ones per row, zeros before or behind it",
            )
        bounds.append((int(inside[0]), int(inside[-1]) + 1))
    return bounds


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Positions (B, T) on the CPU."""
    num_rows, num_columns = input_ids.shape
    if position_ids is None:
        return torch.arange(num_columns, device="cpu").expand(num_rows, -1)
    shapes = ((num_rows, num_columns), (1, num_columns))
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in shapes:
        raise _unreadable(
            f"position_ids {_shown(position_ids)}", f"shape {shapes[0]}, or one row for all",
            "pass a position for each token, or leave them out",
        )  # fmt: skip
    return position_ids.detach().cpu().expand(num_rows, -1)


def _shown(x: object) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"


def _unreadable(given: str, required: str, change: str = "pad or pack as TRL does") -> DataError:
    return DataError(
        given=given, required=required, change=change,
        source="a data collator, or the call of a model that furlong.chunked has changed",
    )  # fmt: skip
