"""The sequences of one step, as far as a process has them, and the plan that they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from furlong.errors import ConfigError, DataError
from furlong.models.causal_lm import CausalLM
from furlong.plan.plan import Chunk, ChunkPlan, Forward
from furlong.plan.rows import ChunkRows
from furlong.runtime.cells.loss_head import FinalHead
from furlong.runtime.inputs import (
    ShiftedSequence,
    TreePart,
    count_valid_tokens,
    no_data,
    refused_data,
    shift_labels,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class PlannedSequences:
    """A plan with its sequences, by seq_id: those that are not here are empty."""

    plan: ChunkPlan
    sequences: Sequence[ShiftedSequence]
    num_labels: int | None
    """Tokens with a label in the whole batch, None where this process does not know them."""
    make_head: Callable[[CausalLM, ChunkPlan], FinalHead] | None = None
    """The head of another loss than the cross-entropy."""


def require_plan(plan: object) -> ChunkPlan:
    """Raise ConfigError for what is no ChunkPlan."""
    if not isinstance(plan, ChunkPlan):
        raise ConfigError(
            given=f"a plan of type {type(plan).__name__}",
            required="a ChunkPlan",
            source="the arguments of Engine.run",
            change="pass what Engine.plan returns",
        )
    return plan


def batch_of(
    plan: ChunkPlan,
    sequences: object,
    rank: int,
    find_rows: Callable[[], Callable[[Chunk], ChunkRows]],
) -> PlannedSequences:
    """The batch of sequences that a caller has passed for a plan; their labels are shifted.

    `sequences`: all, in order, or a mapping of seq_id to each whose tokens this process reads, one
    of those that obey the list of `rank`. `find_rows` returns which rows of a chunk it has. Raises
    DataError unless the sequences are of the lengths that the plan was made for.
    """
    if not isinstance(sequences, Mapping):
        shifted = along_paths(plan, shift_labels(sequences))
        _require_lens([len(s.input_ids) for s in shifted], plan.seq_lens)
        return PlannedSequences(plan, shifted, count_valid_tokens(shifted))
    own: dict[Any, ShiftedSequence] = dict(
        zip(sequences, shift_labels(sequences.values()), strict=True)
    )
    needed = read_sequences(plan, rank, find_rows())
    missing = [seq_id for seq_id in needed if seq_id not in own]
    others = [seq_id for seq_id in own if seq_id not in range(len(plan.seq_lens))]
    if missing or others:
        raise refused_data(
            f"no sequence {missing[0]}" if missing else f"a sequence {others[0]!r:.60}",
            f"at least those of list {rank} of the plan that this process reads: {_listed(needed)}",
            "pass a mapping of seq_id to sequence, or all sequences of the batch in a list",
        )
    ids = [seq_id for seq_id in range(len(plan.seq_lens)) if seq_id in own]
    _require_lens([len(own[i].input_ids) for i in ids], [plan.seq_lens[i] for i in ids])
    shifted = along_paths(plan, among(own, len(plan.seq_lens)))
    is_whole = len(ids) == len(plan.seq_lens)
    return PlannedSequences(plan, shifted, count_valid_tokens(shifted) if is_whole else None)


def along_paths(plan: ChunkPlan, sequences: Sequence[ShiftedSequence]) -> list[ShiftedSequence]:
    """The sequences of a plan; those that branch with the tokens that follow one another. The label
    of a branch's first token is what the token predicts that it goes on from."""
    found = list(sequences)
    for seq_id in plan.trees.keys() & range(len(found)):
        bounds = sorted(b for c in plan.groups[seq_id] for b in plan.bounds(seq_id, c))
        parts = [TreePart(seq_id, start, start, stop - 1, start) for start, stop, _ in bounds]
        parts += [
            TreePart(seq_id, start - 1, before - 1, before, start - 1)
            for start, _, before in bounds
            if before
        ]
        found[seq_id] = replace(found[seq_id], parts=tuple(parts))
    return found


def among(own: Mapping[Any, ShiftedSequence], num_sequences: int) -> list[ShiftedSequence]:
    """A batch by seq_id, of which only `own` sequences are here: the others are empty."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    absent = ShiftedSequence(none, none)
    return [own.get(seq_id, absent) for seq_id in range(num_sequences)]


def divisor_of(num_valid_tokens: int | None, own_valid_tokens: int | None) -> int:
    """The divisor of the summed loss, in tokens. Raises DataError where nothing has a label, or
    where nobody says how many have one."""
    if num_valid_tokens is not None:
        return whole_number(num_valid_tokens, "num_valid_tokens")
    if own_valid_tokens is None:
        raise DataError(
            given="a part of the batch's sequences, without num_valid_tokens",
            required="the labelled tokens of the whole batch, by which the loss is divided",
            source="the arguments of Engine.run",
            change="pass num_valid_tokens, or all sequences of the batch",
        )
    if not own_valid_tokens:
        raise no_data("no token with a label to divide the loss by", "at least one label")
    return own_valid_tokens


def read_sequences(plan: ChunkPlan, rank: int, rows_of: Callable[[Chunk], ChunkRows]) -> list[int]:
    """Sequences of which a process reads tokens or labels: at the first stage and at the last."""
    ends = {0, len(plan.stages) - 1}
    own = {a.chunk for a in plan.actions[rank] if isinstance(a, Forward) and a.stage in ends}
    return sorted({seq_id for chunk in own for seq_id, *_ in rows_of(plan.chunks[chunk]).tokens})


def _require_lens(lens: Sequence[int], required: Sequence[int]) -> None:
    if tuple(lens) != tuple(required):
        raise refused_data(
            f"sequences of {_listed(lens)} tokens",
            f"the plan's: {_listed(required)}",
            "pass the sequences for which the plan was made, in their order",
        )


def _listed(lens: Sequence[int]) -> str:
    shown = ", ".join(map(str, lens[:8]))
    return f"{shown}, ... ({len(lens)} of them)" if len(lens) > 8 else shown or "no"
