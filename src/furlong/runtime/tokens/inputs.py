"""Sequences that carry more than ids and labels: tensors per token, of the caller's own names.

Entry t of each is about token t, as its label is. It is shifted with the labels, so that it meets
the hidden state that predicts token t.

    T tokens of a sequence, R rows of a chunk that have a label
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.errors import DataError
from furlong.ops.loss import labelled_rows
from furlong.plan.rows import ChunkRows
from furlong.runtime.cells.chunk_inputs import sent_to
from furlong.runtime.inputs import (
    ShiftedSequence,
    count_valid_tokens,
    no_data,
    refused_data,
    shift_labels,
)
from furlong.runtime.tokens.joined import Joined

_OWN = {"input_ids", "labels"}
# What tokenizers and collators make, and would be read by nobody.
_NO_EXTRAS = {"attention_mask", "position_ids", "token_type_ids"}


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Sequences with their extras, of a step on one process."""

    sequences: list[ShiftedSequence]
    extras: Sequence[Mapping[str, Tensor]]
    """By sequence and name: (T, ...), entry t about token t."""
    joined: Joined
    """The sequences as the plan has them."""

    @property
    def seq_lens(self) -> list[int]:
        return [len(sequence.input_ids) for sequence in self.sequences]

    def labelled(self, rows: ChunkRows) -> Iterator[tuple[int, Tensor]]:
        """By run of a chunk's tokens: its sequence, and the tokens (r,) whose labels it predicts,
        in the order of the chunk's labelled rows."""
        for index, run, _ in self.joined.runs(rows):
            labels = self.sequences[index].labels[run.start : run.stop]
            yield index, labelled_rows(labels) + run.start + 1

    def extras_of(self, rows: ChunkRows, device: torch.device) -> dict[str, Tensor]:
        """The extras (R, ...) of a chunk's labelled rows."""
        found = list(self.labelled(rows))
        names = self.extras[0].keys() if self.extras else ()
        return {
            name: sent_to(
                device, torch.cat([_at(self.extras[i][name], tokens) for i, tokens in found])
            )
            for name in names
        }


def token_inputs(sequences: object) -> TokenInputs:
    """Check sequences of ids, labels (default: the ids) and extras, and shift the labels.

    Raises DataError for what `shift_labels` refuses, for extras of other lengths, that require a
    gradient or that not all sequences have, and where no token has a label.
    """
    if not isinstance(sequences, Iterable) or isinstance(sequences, Mapping | Tensor | str):
        shift_labels(sequences)  # which raises
    given = list(sequences)  # type: ignore[call-overload]
    plain = [_plain(sequence) for sequence in given]
    shifted = shift_labels(plain)
    if not shifted:
        raise no_data("no sequences", "at least one sequence", "leave the call out")
    extras = [
        {n: x for n, x in sequence.items() if n not in _OWN}
        if isinstance(sequence, Mapping)
        else {}
        for sequence in given
    ]
    for index, (sequence, own) in enumerate(zip(shifted, extras, strict=True)):
        _require_extras(index, own, len(sequence.input_ids), extras[0])
    if not count_valid_tokens(shifted):
        raise no_data(
            "no token with a label, but for first ones, which nothing predicts",
            "at least one: an answer of at least one token behind its prompt",
            "leave such sequences out; -100 in labels means no label",
        )
    return TokenInputs(shifted, extras, Joined(shifted))


def bare_inputs(sequences: object) -> list[ShiftedSequence]:
    """Check sequences of ids, whose labels (default: the ids) nobody asks for; see
    `shift_labels`."""
    if isinstance(sequences, Iterable) and not isinstance(sequences, Mapping | Tensor | str):
        sequences = [_plain(s) if _OWN.issuperset(_keys(s)) else s for s in sequences]
    return shift_labels(sequences)


def _keys(sequence: object) -> Iterable[object]:
    return sequence.keys() if isinstance(sequence, Mapping) else ()


def _plain(sequence: object) -> object:
    if not isinstance(sequence, Mapping) or "input_ids" not in sequence:
        return sequence
    labels = sequence.get("labels")
    return {"input_ids": sequence["input_ids"],
            "labels": sequence["input_ids"] if labels is None else labels}  # fmt: skip


def _require_extras(
    index: int, extras: Mapping[str, object], num_tokens: int, first: Mapping[str, object]
) -> None:
    """`first`: the extras of sequence 0, which have been checked."""
    if extras.keys() != first.keys():
        odd = ", ".join(sorted(map(str, extras.keys() ^ first.keys())))
        raise refused_data(
            f"sequence {index}, which has not the same extras as sequence 0: {odd}",
            "the same names in all sequences of a call",
            "give each sequence every extra",
        )
    unread = ", ".join(sorted(_NO_EXTRAS & extras.keys()))
    if unread:
        raise refused_data(
            f"sequence {index} with {unread}",
            "input_ids, labels and extras of your own: padding, packing and positions are "
            "furlong's own",
            "leave padding tokens and these keys out",
        )
    for name, x in extras.items():
        if not isinstance(x, Tensor) or not x.ndim or len(x) != num_tokens:
            is_tensor = isinstance(x, Tensor)
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise refused_data(
                f"sequence {index} of {num_tokens} tokens with {name} {what}",
                f"a tensor of shape ({num_tokens}, ...): entry t is about token t",
                f"pad {name} with zeros where a token has none"
                if is_tensor
                else f"pass torch.tensor({name})",
            )
        own, others = x.shape[1:], first[name].shape[1:]  # type: ignore[attr-defined]
        if own != others:
            raise refused_data(
                f"sequence {index} with {name} {tuple(x.shape)}, where sequence 0 has"
                f" {tuple(others)} of each token",
                "the same shape (T, ...) behind T in all sequences of a call",
                f"pad {name} to one shape",
            )
        if x.requires_grad:
            raise DataError(
                given=f"sequence {index} with {name}, which requires a gradient",
                required="extras without one: the backward goes to the model's parameters alone",
                source="the sequences that were passed",
                change=f"pass {name}.detach(), and make what needs its gradient of the values",
            )


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    return x[sent_to(x.device, tokens)]


def of_runs(
    runs: Sequence[tuple[int, Tensor]], values: Sequence[Tensor | None], like: Tensor
) -> Tensor | None:
    """The entries of each run of a chunk, (R, ...), of values by sequence, (T, ...), zeros where
    there are none (None); None of none at all. `like` is an entry: of its dtype, device, shape."""
    if all(values[seq_id] is None for seq_id, _ in runs):
        return None
    parts = []
    for seq_id, tokens in runs:
        own = values[seq_id]
        parts.append(
            like.new_zeros((len(tokens), *like.shape[1:])) if own is None else _at(own, tokens)
        )
    return torch.cat(parts)
