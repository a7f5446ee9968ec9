"""The arguments of the engine, checked: sequences, whose labels are shifted here, and numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from furlong.errors import ConfigError, DataError
from furlong.ops.loss import IGNORE_INDEX, labelled_rows
from furlong.planners.options import ChunkOptions


@dataclass(frozen=True, slots=True)
class TreePart:
    """Consecutive tokens of one of the sequences that were joined to a tree."""

    sequence: int
    """The number of that sequence in its call."""
    token: int
    """The number of the first token in that sequence."""
    start: int
    """Where in the tree the tokens lie: [start, stop)."""
    stop: int
    label: int
    """Where among the tree's labels that of the first token is."""


@dataclass(frozen=True, slots=True)
class ShiftedSequence:
    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64, label t is what token t predicts; of a tree, those of its parts
    first_position: int = 0
    parts: tuple[TreePart, ...] = ()
    """The parts that a tree was joined of, or those of its own paths; none: no tree."""

    def within(self, start: int, stop: int) -> Iterator[tuple[TreePart, range]]:
        """The parts of a tree that have tokens in [start, stop), with the ones that lie there."""
        for part in self.parts:
            tokens = range(max(start, part.start), min(stop, part.stop))
            if tokens:
                yield part, tokens

    @property
    def last_position(self) -> int:
        """The position behind the last token; of a tree, that of its longest path."""
        ends = [part.token + part.stop - part.start for part in self.parts]
        return self.first_position + max(ends, default=len(self.input_ids))

    def labelled(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The rows (R,) among tokens [start, stop) that have a label, and their labels (R,). One
        that several tokens follow is there with each of them."""
        if not self.parts:
            rows = labelled_rows(labels := self.labels[start:stop])
            return rows, labels[rows]
        found = [torch.empty((2, 0), dtype=torch.int64, device="cpu")]
        for part, tokens in self.within(start, stop):
            first = part.label + tokens.start - part.start
            labels = self.labels[first : first + len(tokens)]
            rows = labelled_rows(labels)
            found.append(torch.stack([rows + tokens.start - start, labels[rows]]))
        rows, labels = torch.cat(found, 1)
        return rows, labels


def shift_labels(sequences: object) -> list[ShiftedSequence]:
    """Check sequences of unshifted labels and shift them by one token; shifted ones stay.

    Raises DataError for what is no list of sequences, and for a sequence that is empty, has other
    keys, or is not made of two equally long int64 vectors.
    """
    if not isinstance(sequences, Iterable) or isinstance(sequences, Mapping | Tensor | str):
        raise refused_data(f"sequences of type {type(sequences).__name__}", "a list of sequences")
    return [
        sequence if isinstance(sequence, ShiftedSequence) else _shift(sequence, index)
        for index, sequence in enumerate(sequences)
    ]


def _shift(sequence: object, index: int) -> ShiftedSequence:
    if not isinstance(sequence, Mapping):
        raise refused_data(
            f"sequence {index} of type {type(sequence).__name__}", "a dict of input_ids and labels"
        )
    if "input_ids" not in sequence:
        found = ", ".join(map(str, sequence)) or "nothing"
        raise refused_data(
            f"sequence {index} without input_ids, with {found}", "a dict of input_ids and labels"
        )
    unknown = sorted(str(key) for key in sequence.keys() - {"input_ids", "labels"})
    if unknown:
        raise refused_data(
            f"sequence {index} with {', '.join(unknown)}",
            "input_ids and labels alone: padding, packing and positions are furlong's own",
            "leave padding tokens and other keys out; give tokens without a loss the label -100",
        )
    input_ids, labels = sequence.get("input_ids"), sequence.get("labels")
    if (
        not _is_token_vector(input_ids)
        or not _is_token_vector(labels)
        or input_ids.shape != labels.shape
        or len(input_ids) == 0
    ):
        both = _is_token_vector(input_ids) and _is_token_vector(labels) and len(input_ids)
        raise refused_data(
            f"sequence {index} with input_ids {_describe(input_ids)}, labels {_describe(labels)}",
            "input_ids and labels as int64 tensors of one shape (T,), T at least 1",
            *(("give each token a label, -100 where it has none",) if both else ()),
        )
    for name, tensor in (("input_ids", input_ids), ("labels", labels)):
        if tensor.layout != torch.strided or tensor.is_meta:
            where = "on meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise refused_data(f"sequence {index} with {name} {where}", "dense tensors with values")
    last = torch.full((1,), IGNORE_INDEX, device="cpu")
    return ShiftedSequence(input_ids, torch.cat([labels[1:].cpu(), last]))


def whole_number(value: object, name: str) -> int:
    """A whole number above 0 as an int: also one of numpy, or a tensor of one integer.

    Raises ConfigError, with the argument's name, for anything else.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 2**63:
        short = isinstance(value, float | str) or (isinstance(value, int) and number < 2**63)
        shown = f"{value!r:.60}" if short else _describe(value)
        raise ConfigError(
            given=f"{name} {shown}",
            required="a whole number above 0 (None: the default)",
            source="the arguments of furlong.Engine or forward_backward",
            change=f"pass {name} as an int",
        )
    return number


def check_compute_dtype(dtype: object) -> None:
    """Raise ConfigError for what is no floating-point dtype of at least 16 bits."""
    wide = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
    if dtype is not None and not wide:
        raise ConfigError(
            given=f"compute_dtype {dtype!r:.60}",
            required="torch.bfloat16, torch.float16, torch.float32, torch.float64 or None",
            source="the arguments of furlong.Engine or forward_backward",
            change="pass compute_dtype=torch.bfloat16, or leave it out",
        )


def check_ranges(
    sequences: Sequence[ShiftedSequence],
    *,
    num_input_ids: int,
    vocab_size: int,
    longest_tokens: int | None,
) -> None:
    """Raise DataError for ids without an embedding, labels without a logit, too long sequences.

    num_input_ids: ids 0 to this less one have an embedding; vocab_size: the same of labels;
    longest_tokens: of a sequence, None without a bound.
    """
    for index, sequence in enumerate(sequences):
        num_tokens = len(sequence.input_ids)
        if not num_tokens:  # another rank has it
            continue
        last_position = sequence.last_position
        if longest_tokens is not None and last_position > longest_tokens:
            raise refused_data(
                f"sequence {index} of {last_position:,} tokens",
                f"at most {longest_tokens:,}, the smaller of max_seq_len and the model's positions",
                "pass a larger max_seq_len, cut the sequence, or extend the model's RoPE",
            )
        first, last = (int(bound) for bound in sequence.input_ids.aminmax())
        if first < 0 or last >= num_input_ids:
            raise refused_data(
                f"sequence {index} with token id {first if first < 0 else last}",
                f"ids from 0 to {num_input_ids - 1}, which have an embedding",
                "use the model's own tokenizer, or resize_token_embeddings",
            )
        labels = sequence.labels[sequence.labels != IGNORE_INDEX]
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= vocab_size):
            wrong = labels[(labels < 0) | (labels >= vocab_size)]
            raise refused_data(
                f"sequence {index} with label {int(wrong[0])}",
                f"labels from 0 to {vocab_size - 1}, or {IGNORE_INDEX} for none",
                "use the model's own tokenizer, or resize_token_embeddings",
            )


def require_seq_lens(seq_lens: object) -> list[int]:
    """Lengths of sequences as ints. Raises ConfigError for what is none, or not a whole number."""
    if not isinstance(seq_lens, Iterable) or isinstance(seq_lens, Mapping | str):
        raise ConfigError(
            given=f"seq_lens of type {type(seq_lens).__name__}",
            required="a list with the number of tokens of each sequence",
            source="the arguments of Engine.plan",
            change="pass [len(ids) for ids in ...]",
        )
    lens = [whole_number(seq_len, "seq_lens") for seq_len in seq_lens]
    if not lens:
        raise no_data("no sequences", "at least one sequence")
    return lens


def count_valid_tokens(sequences: Sequence[ShiftedSequence]) -> int:
    """Tokens that have a label, over all sequences."""
    return sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in sequences)


def _is_token_vector(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 1


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def refused_data(
    given: str,
    required: str,
    change: str = "pass one dict per sequence, unpadded, without a batch axis",
) -> DataError:
    source = "the sequences that were passed"
    return DataError(given=given, required=required, source=source, change=change)


def no_data(
    given: str,
    required: str,
    change: str = "leave batches without labels out, or pass num_valid_tokens",
) -> DataError:
    """A call without anything to train on."""
    return refused_data(given, required, change)


def require_options(options: object) -> None:
    """Raise ConfigError for what is no `ChunkOptions`."""
    if not isinstance(options, ChunkOptions):
        raise ConfigError(
            given=f"options of type {type(options).__name__}",
            required="furlong.ChunkOptions",
            source="the options that were passed",
            change="pass furlong.ChunkOptions(size=..., keep=...)",
        )
