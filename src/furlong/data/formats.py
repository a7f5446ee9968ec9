"""The shapes of a record, by the fields that it has: one row for each.

`auto` takes the first shape in the table's order whose fields the first record of a source has, but
for preference, which the loss asks for; then it holds for the whole source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.config.schema import Format
from furlong.data.chat import Turns, messages_of, tools_of
from furlong.data.pairs import check_pair, read_pair
from furlong.data.records import BLANK, Notes, SourceRecord
from furlong.data.rendering import rendering
from furlong.data.sources import printable
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Item, Rendered, tokenized
from furlong.errors import DataError

_INT32 = np.iinfo(np.int32)
_INTO_PROMPT = {"system": "into prompt", "history": "into prompt"}

Read = Callable[[SourceRecord], tuple[Rendered | Turns | Encoded, ...] | str]
"""Reads what becomes the sequences of a record, or why it is left out. Raises DataError."""


def read_tokens(record: SourceRecord) -> tuple[Encoded]:
    """Token ids as they are; without labels every token is one."""
    ids = _integers(record, "input_ids", lowest=0)
    labels = ids
    if record.fields.get("labels") is not None:
        labels = _integers(record, "labels", lowest=IGNORE_INDEX)
        if len(labels) != len(ids) or ((labels < 0) & (labels != IGNORE_INDEX)).any():
            raise record.refusal(
                f"{len(ids)} input_ids with {len(labels)} labels from {labels.min(initial=0)}",
                f"a label for every token, unshifted: a token id, or {IGNORE_INDEX} for none",
            )
    _check_beside_tokens(record, len(ids))
    return (Encoded(ids, labels),)


def read_chat(record: SourceRecord) -> tuple[Turns] | str:
    """A conversation, of which the assistant's answers are learnt."""
    turns = messages_of(record, "messages")
    return (Turns(record.origin, turns, tools_of(record)),) if turns else BLANK


def read_completion(record: SourceRecord) -> tuple[Rendered] | str:
    """A prompt and a completion, which is learnt."""
    prompt, completion = text_of(record, "prompt"), text_of(record, "completion")
    text = prompt + completion
    return (Rendered(text, ((len(prompt), len(text)),)),) if text.strip() else BLANK


def read_text(record: SourceRecord) -> tuple[Rendered] | str:
    """A text, all of which is learnt."""
    text = text_of(record, "text")
    return (Rendered(text),) if text.strip() else BLANK


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of records."""

    needed: tuple[str, ...]
    """Fields that each record has."""
    read: Read
    optional: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Fields that other programs train on, which would be lost here, and where they belong."""
    has_answers: bool = False
    """Whether a label of a record may say that its answer is not learnt."""


FORMATS: dict[Format, Shape] = {
    "tokens": Shape(("input_ids",), read_tokens, optional=("labels",)),
    "chat": Shape(
        ("messages",),
        read_chat,
        optional=("tools",),
        lost={"system": "as the first message, of role system", "history": "as messages"},
        has_answers=True,
    ),
    "completion": Shape(
        ("prompt", "completion"), read_completion, lost=_INTO_PROMPT, has_answers=True
    ),
    "text": Shape(("text",), read_text),  # a text file is one record
    # two answers to one prompt, for train.loss: dpo
    "preference": Shape(
        ("chosen", "rejected"), read_pair, optional=("prompt", "tools"), lost=_INTO_PROMPT
    ),
}
FIELDS = frozenset(
    (
        *chain(*(shape.needed + shape.optional for shape in FORMATS.values())),
        # of other programs, which decide whether a record can be read without them
        *("system", "history", "label", "attention_mask", "position_ids"),
    )
)
"""The fields that are read."""


def encode(
    records: Iterable[SourceRecord], tokenizer: Any, format: Format, notes: Notes
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Records with their sequences, one or the two answers of a pair; `notes` counts the others.
    Raises UserError."""
    shape = FORMATS[format]

    def items(stack: ExitStack) -> Iterator[Item]:
        render = None
        for record in records:
            check_fields(record, format)
            found = shape.read(record)
            if isinstance(found, str):
                notes.add(found, record.file, record.line)
                continue
            own: list[Rendered | Encoded] = []
            for one in found:
                if isinstance(one, Turns):
                    # A template runs apart.
                    render = render or stack.enter_context(rendering(tokenizer))
                    own.append(text := render(one))
                    for what in text.unwritten:
                        told = f"conversations with {what} that the template does not write"
                        notes.add(told, record.file, record.line)
                else:
                    own.append(one)
            yield record, own

    with ExitStack() as stack:
        for record, found in tokenized(items(stack), tokenizer, notes):
            checked: list[Encoded] | str = found
            if len(found) == 2:
                checked = check_pair(found, of_texts=isinstance(record.fields["chosen"], str))
            elif not len(found[0].input_ids):
                checked = BLANK
            if isinstance(checked, str):
                notes.add(checked, record.file, record.line)
            else:
                yield record, checked


def decide_format(record: SourceRecord) -> Format:
    """The shape of a source whose first record this is. Raises DataError."""
    known = [format for format in FORMATS if format != "preference"]
    for format in known:
        if all(record.fields.get(field) is not None for field in FORMATS[format].needed):
            return format
    raise _lacks(record, *known)


def unused_fields(fields: Mapping[str, Any], format: Format) -> list[str]:
    """The fields of a record that its shape does not look at."""
    used = FORMATS[format].needed + FORMATS[format].optional
    return sorted(str(field) for field in fields if field not in used)


def check_fields(record: SourceRecord, format: Format) -> None:
    """Raises DataError if its shape cannot take a record whole."""
    shape = FORMATS[format]
    if not all(field in record.fields for field in shape.needed):
        raise _lacks(record, format)
    for name, where in shape.lost.items():
        if (value := record.fields.get(name)) and not _is_said(record, value):
            raise record.refusal(
                f"{name} beside {shape.needed[0]}, which would be lost",
                f"all that the model reads in {' and '.join(shape.needed)}",
                f"write {name} {where}, and remove the field",
            )
    label = record.fields.get("label")
    if shape.has_answers and str(label).lower() in ("false", "0", "0.0"):
        raise record.refusal(
            f"label: {str(label).lower()}, which says of answers that they are not learnt",
            "answers that are learnt: those of two kinds are pairs",
            "remove the record, or write prompt, chosen and rejected for train.loss: dpo;"
            " a label that says something else needs another name",
        )


def text_of(record: SourceRecord, field: str) -> str:
    """A field that must be a text. Raises DataError."""
    text = record.fields[field]
    if not isinstance(text, str):
        raise record.refusal(
            f"{field} of type {type(text).__name__}",
            f"a string in the field {field}",
            f"write {field} as a string; conversations go into messages",
        )
    return text


def _is_said(record: SourceRecord, text: Any) -> bool:
    """Whether a message of a record is this text."""
    fields = (record.fields.get(name) for name in ("messages", "prompt", "chosen"))
    turns = chain(*(turns for turns in fields if isinstance(turns, list)))
    return any(isinstance(turn, dict) and turn.get("content") == text for turn in turns)


def _lacks(record: SourceRecord, *formats: Format) -> DataError:
    """The refusal of a record without the fields of any of these shapes."""
    required = " or ".join(" + ".join(FORMATS[format].needed) for format in formats)
    null = {name: " (null)" for name, value in record.fields.items() if value is None}
    known = sorted(record.fields, key=lambda name: name not in FIELDS)
    names = [printable(name) + null.get(name, "") * (name in FIELDS) for name in known[:12]]
    change = "rename the fields, or set data.format to the shape that the records have"
    if formats == ("preference",):
        change = "rename the fields to prompt, chosen and rejected, or set train.loss to sft"
    elif {"chosen", "rejected"} <= record.fields.keys():
        change = "set train.loss to dpo, which learns from pairs of answers; or rename the fields"
    return record.refusal(
        f"a record with {', '.join(names) or 'no field'}", f"the fields {required}", change
    )


def _check_beside_tokens(record: SourceRecord, num_tokens: int) -> None:
    """Raises DataError where other fields say that not all tokens are one sequence, or learnt."""
    mask, positions = (record.fields.get(name) for name in ("attention_mask", "position_ids"))
    given = ""
    if mask is not None and mask != [1] * num_tokens:
        given = "an attention_mask that is not 1 for every token"
    elif positions is not None and positions != list(range(num_tokens)):
        given = f"position_ids that are not 0 to {num_tokens - 1}"
    elif record.fields.get("labels") is None:
        masks = ("completion_mask", "assistant_masks", "loss_mask")
        found = next((name for name in masks if name in record.fields), None)
        given = f"{found} beside input_ids, without labels" if found else ""
    if given:
        raise record.refusal(
            given,
            "input_ids of one sequence, and labels if not every token is learnt",
            "remove padding, write packed sequences as records of their own, and write labels:"
            f" {IGNORE_INDEX} where a token is not learnt",
        )


def _integers(record: SourceRecord, field: str, lowest: int) -> npt.NDArray[np.int32]:
    values = record.fields[field]
    if values == []:
        return np.zeros(0, np.int32)
    if isinstance(values, list) and all(type(value) is int for value in values):
        array = np.asarray(values)
        if array.dtype.kind == "i" and array.min() >= lowest and array.max() <= _INT32.max:
            return array.astype(np.int32)
        given = f"{field} from {min(values)} to {max(values)}"
    else:
        kinds = {type(value).__name__ for value in values} if isinstance(values, list) else ()
        given = f"{field} of type {type(values).__name__} {' and '.join(sorted(kinds))}".strip()
    raise record.refusal(given, f"a list of whole numbers, token ids from {lowest}")
