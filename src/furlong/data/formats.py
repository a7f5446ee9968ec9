"""The five shapes of a record, by the fields that it has.

tokens       input_ids [+ labels]      taken as they are
chat         messages [+ tools]        loss on what the assistant says
completion   prompt + completion       loss on the completion
text         text, or a text file      loss on every token
preference   chosen + rejected         two answers to one prompt (`pairs`), for train.loss: dpo

`auto` takes the first shape in this order whose fields the first record of a source has, but for
preference, which the loss asks for; then it holds for the whole source.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from furlong.data.records import FIELDS, MAX_TEXT_BYTES, SourceRecord, too_large
from furlong.data.sources import CARD_NAMES, SourceFile, printable
from furlong.errors import DataError
from furlong.units import format_bytes

Format = Literal["tokens", "chat", "completion", "text", "preference"]

NEEDED_FIELDS: dict[Format, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}
OPTIONAL_FIELDS: dict[Format, tuple[str, ...]] = {
    "tokens": ("labels",), "chat": ("tools",), "completion": (), "text": (),
    "preference": ("prompt", "tools"),
}  # fmt: skip

IGNORE_INDEX = -100
"""The label of a token that adds no loss."""

MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Fields of a message by which other trainers choose what is learnt."""

_MAYBE_RECORDS = frozenset((".json", ".csv", ".tsv"))
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_INT32 = np.iinfo(np.int32)
# Fields beside those of a shape that other programs train on: here they would be lost.
_LOST: dict[Format, dict[str, str]] = {
    "chat": {"system": "as the first message, of role system", "history": "as messages"},
    "completion": {"system": "into prompt", "history": "into prompt"},
    "preference": {"system": "into prompt", "history": "into prompt"},
    "tokens": {},
    "text": {},
}
_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "video_url", "file")
_TOKEN_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


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
    known = [format for format in NEEDED_FIELDS if format != "preference"]
    for format in known:
        if all(record.fields.get(field) is not None for field in NEEDED_FIELDS[format]):
            return format
    raise _lacks(record, *known)


def unused_fields(fields: Mapping[str, Any], format: Format) -> list[str]:
    """The fields of a record that its shape does not look at."""
    used = NEEDED_FIELDS[format] + OPTIONAL_FIELDS[format]
    return sorted(str(field) for field in fields if field not in used)


def check_fields(record: SourceRecord, format: Format) -> None:
    """Raises DataError if a record lacks a field that its shape needs."""
    if not all(field in record.fields for field in NEEDED_FIELDS[format]):
        raise _lacks(record, format)
    for field, where in _LOST[format].items():
        if (value := record.fields.get(field)) and not _is_said(record, value):
            raise DataError(
                given=f"{field} beside {NEEDED_FIELDS[format][0]}, which would be lost",
                required=f"all that the model reads in {' and '.join(NEEDED_FIELDS[format])}",
                source=record.origin,
                change=f"write {field} {where}, and remove the field",
            )
    label = record.fields.get("label")
    if format in ("completion", "chat") and str(label).lower() in ("false", "0", "0.0"):
        raise DataError(
            given=f"label: {str(label).lower()}, which says of answers that they are not learnt",
            required="answers that are learnt: those of two kinds are pairs",
            source=record.origin,
            change="remove the record, or write prompt, chosen and rejected for train.loss: dpo;"
            " a label that says something else needs another name",
        )


def text_of(record: SourceRecord, field: str = "text") -> str:
    """A field that must be a text. Raises DataError."""
    text = record.fields[field]
    if not isinstance(text, str):
        hint = "; conversations go into messages" if isinstance(text, list) else ""
        raise DataError(
            given=f"{field} that is {_kind(text)}",
            required=f"a string in the field {field}",
            source=record.origin,
            change=f"write {field} as a string{hint}",
        )
    check_size(record, field, text)
    return text


def messages_of(
    record: SourceRecord, template: str, field: str = "messages"
) -> list[dict[str, Any]]:
    """The turns of the conversation in `field`, without fields that have no value.

    A role must be one of the usual ones or one that `template` names. Raises DataError.
    """
    messages = record.fields[field]
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise _bad_turn(record, f"{field} that are {_kind(messages)}", field)
    turns = []
    for number, given in enumerate(messages, start=1):
        turn = {name: value for name, value in given.items() if value is not None}
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str):
            if "role" in given and role is None:
                raise _bad_turn(record, f"message {number} whose role is null", field)
            what = f"message {number} with {', '.join(turn) or 'no field'}"
            raise _bad_turn(record, what, field, is_sharegpt={"from", "value"} <= turn.keys())
        if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise DataError(
                given=f"message {number} of role {role!r}",
                required=f"one of {', '.join(sorted(_ROLES))}, or a role of the chat template",
                source=record.origin,
                change="rename the role; what the model is to learn is said by the assistant",
            )
        if not isinstance(content, str | list) and ("content" in turn or "tool_calls" not in turn):
            kind = _kind(content) if "content" in given else "missing"
            raise _bad_turn(record, f"message {number} whose content is {kind}", field)
        if isinstance(content, list):
            turn["content"] = _text_of_parts(record, content, f"message {number} of {field}")
        _check_marks(record, turn, f"message {number} of {field}")
        turns.append(turn)
    check_size(record, field, *(str(turn.get("content", "")) for turn in turns))
    return turns


def may_be_learnt(turn: Mapping[str, Any]) -> bool:
    """Whether no mark of a message says that it is not learnt."""
    return all(turn.get(mark, True) for mark in MARKS)


def _text_of_parts(record: SourceRecord, parts: Items[Any], message: str) -> str:
    """The text of a content of parts. Raises DataError for parts that are no text."""
    texts = []
    for number, part in enumerate(parts, start=1):
        media = [key for key in _MEDIA if isinstance(part, dict) and part.get(key)]
        is_text = isinstance(part, dict) and part.get("type") in ("text", None) and not media
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            kind = _kind(part)
            if isinstance(part, dict) and not is_text:
                is_other = part.get("type") not in ("text", None)
                kind = f"of type {part['type']}" if is_other else f"with {media[0]}"
            raise DataError(
                given=f"{message}, part {number}: {kind}",
                required='content as a string, or parts such as {"type": "text", "text": "..."}',
                source=record.origin,
                change="remove the record, or the part: images and sound are not trained on",
            )
        texts.append(text)
    return "".join(texts)


def _check_marks(record: SourceRecord, turn: Mapping[str, Any], message: str) -> None:
    """Raises DataError for a mark that asks for more than learning an answer or not."""
    for mark in MARKS:
        value = turn.get(mark, True)
        others = mark != "weight" and value and mark in turn and turn["role"] != "assistant"
        if others or value not in (0, 1):
            raise DataError(
                given=f"{message}, of role {turn['role']}: {mark} = {value!r}",
                required="0 or 1 (false or true), and true for what the assistant says alone",
                source=record.origin,
                change=f"remove {mark}, or mend it; an answer with 0 or false is not learnt",
            )


def _is_said(record: SourceRecord, text: Any) -> bool:
    """Whether a message of a record is this text."""
    turns = chain(*(
        found for name in ("messages", "prompt", "chosen")
        if isinstance(found := record.fields.get(name), list)
    ))  # fmt: skip
    return any(isinstance(turn, dict) and turn.get("content") == text for turn in turns)


def tokens_of(record: SourceRecord) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`input_ids` and `labels`, both (T,); without labels every token is one. Raises DataError."""
    ids = _integers(record, "input_ids", lowest=0)
    _check_beside_tokens(record, len(ids))
    if record.fields.get("labels") is None:
        return ids, ids
    labels = _integers(record, "labels", lowest=IGNORE_INDEX)
    negative = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    if len(labels) != len(ids) or len(negative):
        raise DataError(
            given=f"label {negative[0]}"
            if len(negative)
            else f"{len(ids)} input_ids with {len(labels)} labels",
            required=f"a label for every token, unshifted: a token id, or {IGNORE_INDEX} for none",
            source=record.origin,
            change="mend or remove the record",
        )
    return ids, labels


def _check_beside_tokens(record: SourceRecord, num_tokens: int) -> None:
    """Raises DataError where other fields say that not all tokens are one sequence, or learnt."""
    mask, positions = (record.fields.get(name) for name in ("attention_mask", "position_ids"))
    masks = [name for name in _TOKEN_MASKS if name in record.fields]
    given, change = None, ""
    if mask is not None and mask != [1] * num_tokens:
        given = "an attention_mask that is not 1 for every token"
        change = "remove the padding from the lists: sequences are not padded here"
    elif positions is not None and positions != list(range(num_tokens)):
        given = f"position_ids that are not 0 to {num_tokens - 1}"
        change = "write packed sequences as records of their own: furlong packs them itself"
    elif masks and record.fields.get("labels") is None:
        given = f"{masks[0]} beside input_ids, without labels"
        change = f"write labels: the token where {masks[0]} is 1, {IGNORE_INDEX} elsewhere"
    if given is not None:
        raise DataError(
            given=given,
            required="input_ids of one sequence, and labels if not every token is learnt",
            source=record.origin,
            change=change,
        )


def check_size(record: SourceRecord, field: str, *texts: str) -> None:
    """Raises DataError for texts that are too large together."""
    # Counting bytes takes a copy; a character has at most four.
    if 4 * sum(map(len, texts)) > MAX_TEXT_BYTES:
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > MAX_TEXT_BYTES:
            raise too_large(record.origin, f"{field} of {format_bytes(num_bytes)}")


def _integers(record: SourceRecord, field: str, lowest: int) -> npt.NDArray[np.int32]:
    values = record.fields[field]
    array = np.asarray(values) if _is_flat(values) else np.zeros(0, np.float64)
    if len(array) == 0 and values == []:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu" or array.min() < lowest or array.max() > _INT32.max:
        raise DataError(
            given=f"{field} that are {_kind(values)}"
            + (f" from {array.min()} to {array.max()}" if array.dtype.kind in "iu" else ""),
            required=f"a list of whole numbers, token ids from {lowest}",
            source=record.origin,
            change="mend or remove the record",
        )
    return array.astype(np.int32)


def _is_flat(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case list():
            kinds = {type(item).__name__ for item in value}
            return f"a list of {' and '.join(sorted(kinds)) or 'nothing'}"
    return f"of type {type(value).__name__}"


def _lacks(record: SourceRecord, *formats: Format) -> DataError:
    """The refusal of a record without the fields of any of these shapes."""
    required = " or ".join(" + ".join(NEEDED_FIELDS[format]) for format in formats)
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
    return DataError(
        given=f"a record with {', '.join((known + others)[:12]) or 'no field'}",
        required=f"the field{'s' if ' ' in required else ''} {required}",
        source=record.origin,
        change=change,
    )


def _bad_turn(
    record: SourceRecord, given: str, field: str, *, is_sharegpt: bool = False
) -> DataError:
    return DataError(
        given=given,
        required=f'{field}: [{{"role": "user", "content": "..."}}, ...]',
        source=record.origin,
        change="rename from to role and value to content, human to user and gpt to assistant"
        if is_sharegpt
        else "mend or remove the record",
    )
