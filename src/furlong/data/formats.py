"""The shapes of a record, by the fields that it has: one row for each.

`auto` takes the first shape in the table's order whose fields the first record of a source has, but
for preference, which the loss asks for; then it holds for the whole source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from furlong.config.schema import Format
from furlong.data.chat import encode_chat
from furlong.data.pairs import encode_pairs
from furlong.data.records import BLANK, LeftOut, SourceRecord
from furlong.data.sources import CARD_NAMES, SourceFile, printable
from furlong.data.tokenize import Encoded, encode_completions, encode_texts, encode_tokens
from furlong.errors import DataError

_MAYBE_RECORDS = frozenset((".json", ".csv", ".tsv"))
_INTO_PROMPT = {"system": "into prompt", "history": "into prompt"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of records."""

    needed: tuple[str, ...]
    """Fields that each record has."""
    encode: Callable[[Iterable[SourceRecord], Any, LeftOut], Iterator[Encoded]]
    """Makes sequences of records with a tokenizer."""
    optional: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Fields that other programs train on, which would be lost here, and where they belong."""
    has_answers: bool = False
    """Whether a label of a record may say that its answer is not learnt."""


FORMATS: dict[Format, Shape] = {
    # taken as they are
    "tokens": Shape(("input_ids",), encode_tokens, optional=("labels",)),
    # loss on what the assistant says
    "chat": Shape(
        ("messages",),
        encode_chat,
        optional=("tools",),
        lost={"system": "as the first message, of role system", "history": "as messages"},
        has_answers=True,
    ),
    # loss on the completion
    "completion": Shape(
        ("prompt", "completion"), encode_completions, lost=_INTO_PROMPT, has_answers=True
    ),
    # loss on every token; a text file is one record
    "text": Shape(("text",), encode_texts),
    # two answers to one prompt, for train.loss: dpo
    "preference": Shape(
        ("chosen", "rejected"), encode_pairs, optional=("prompt", "tools"), lost=_INTO_PROMPT
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
    records: Iterable[SourceRecord], tokenizer: Any, format: Format, left_out: LeftOut
) -> Iterator[Encoded]:
    """The sequences of records; those without any token are counted. Raises UserError."""
    for sequence in FORMATS[format].encode(_checked(records, format), tokenizer, left_out):
        if len(sequence.input_ids):
            yield sequence
        else:
            left_out.counts[BLANK] += 1


def check_endings(files: Items[SourceFile], format: Format | Literal["auto"] = "auto") -> None:
    """Raises DataError for a source of files, but for what describes them, that may be texts or
    hold records."""
    or_text = ", or set data.format: text to read every such file as one text"
    described = [file for file in files if file.path.stem.lower() not in CARD_NAMES] or files
    if {file.path.suffix.lower() for file in described} <= _MAYBE_RECORDS:
        origin, ending = described[0].origin(0), described[0].path.suffix.lower()
        raise DataError(
            given=f"{origin}: a {ending} file, which may hold records or be a text itself",
            required="records as .jsonl (one JSON object in a line) or .parquet",
            source=origin,
            change="convert it" + or_text * (format != "preference"),
        )


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


def _checked(records: Iterable[SourceRecord], format: Format) -> Iterator[SourceRecord]:
    for record in records:
        check_fields(record, format)
        yield record


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


def _is_said(record: SourceRecord, text: Any) -> bool:
    """Whether a message of a record is this text."""
    turns = chain(*(
        found for name in ("messages", "prompt", "chosen")
        if isinstance(found := record.fields.get(name), list)
    ))  # fmt: skip
    return any(isinstance(turn, dict) and turn.get("content") == text for turn in turns)


def _lacks(record: SourceRecord, *formats: Format) -> DataError:
    """The refusal of a record without the fields of any of these shapes."""
    required = " or ".join(" + ".join(FORMATS[format].needed) for format in formats)
    known = [
        field if value is not None else f"{field} (null)"
        for field, value in record.fields.items()
        if field in FIELDS
    ]
    others = [printable(field) for field in record.fields if field not in FIELDS]
    change = "rename the fields, or set data.format to the shape that the records have"
    if formats == ("preference",):
        change = "rename the fields to prompt, chosen and rejected, or set train.loss to sft"
    elif {"chosen", "rejected"} <= record.fields.keys():
        change = "set train.loss to dpo, which learns from pairs of answers; or rename the fields"
    return record.refusal(
        f"a record with {', '.join((known + others)[:12]) or 'no field'}",
        f"the field{'s' if ' ' in required else ''} {required}",
        change,
    )
