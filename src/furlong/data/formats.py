"""The formats of records: the table `FORMATS` has a row for each, with the fields that it needs.

`auto` means the first format in the table whose fields the first record of a source has. All
records of the source are then read in this format. `preference` and `unpaired` are chosen by the
loss alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from furlong.config.schema import FORMAT_OF_LOSS, DataConfig, Format, Source, refused_kwargs
from furlong.data.chat import ChatTemplate, Turns, only_last_answers
from furlong.data.fields import (
    MARKS,
    answers,
    columns,
    instruction_turns,
    may_be_trained,
    messages_of,
    optional_text,
    read_values,
    renamed,
    text_of,
    tools_of,
)
from furlong.data.pairs import EMPTY, check_pair, is_of_texts, read_pair, with_mismatches
from furlong.data.records import BLANK, Notes, SourceRecord, is_message
from furlong.data.sources import printable
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Item, NoTokenizer, Rendered, tokenized
from furlong.data.unread import SAID, Unread
from furlong.errors import DataError, in_short, in_yaml

_INT32 = np.iinfo(np.int32)
_INTO_PROMPT = {
    **dict.fromkeys(("system", "history", "input"), "into prompt"),
    "tools": "into the texts, or the texts as messages",
}

_ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request."
)

Read = Callable[[SourceRecord], tuple[Rendered | Turns | Encoded, ...] | str]
"""Returns what becomes the sequences of a record, or the reason why the record is left out. Raises
DataError."""


def read_tokens(record: SourceRecord) -> tuple[Encoded]:
    """Return the token ids of a record and its labels; without labels all tokens are trained on."""
    ids = _integers(record, "input_ids", lowest=0)
    labels = ids
    if record.fields.get("labels") is not None:
        labels = _integers(record, "labels", lowest=IGNORE_INDEX)
        if len(labels) != len(ids) or ((labels < 0) & (labels != IGNORE_INDEX)).any():
            raise record.refusal(
                f"{len(ids)} input_ids with {len(labels)} labels from {labels.min(initial=0)}",
                f"a label for every token, unshifted: a token id, or {IGNORE_INDEX} for none",
            )
    at = np.flatnonzero(labels[:-1] != IGNORE_INDEX)
    of_next, of_same = (np.count_nonzero(labels[at] == ids[at + by]) for by in (1, 0))
    if of_next > 0.9 * len(at) and of_same < 0.5 * len(at):
        raise record.refusal(
            "labels that are the ids of the tokens after their own",
            "unshifted labels: of each token that is learnt its own id",
            "shift them back: labels[1:] = labels[:-1], and labels[0] = -100",
        )
    return (Encoded(ids, labels),)


def read_chat(record: SourceRecord) -> tuple[Turns] | str:
    """Return a conversation whose answers are trained on, or the reason, in words, why the record
    is left out."""
    turns = messages_of(record, "messages")
    return (Turns(record.origin, turns, tools_of(record)),) if turns else BLANK


def read_instruction(record: SourceRecord) -> tuple[Turns]:
    """Return the history, instruction and output of a record as a conversation."""
    return (Turns(record.origin, instruction_turns(record, "output"), tools_of(record)),)


def instruction_text(record: SourceRecord) -> tuple[Rendered]:
    """Return instruction and output as a text with Alpaca's prompt; the output is trained on.

    Raises:
        DataError: the record has a history, which Alpaca's prompt does not hold.
    """
    if record.fields.get("history"):
        raise record.refusal(
            "a history, with a tokenizer that has no chat template",
            "a chat template for several instructions and outputs",
            "set data.chat_template, such as chatml",
        )
    own, output = optional_text(record, "input"), text_of(record, "output")
    system = optional_text(record, "system") or (_WITH_INPUT if own else _ALONE)
    prompt = f"{system}\n\n### Instruction:\n{text_of(record, 'instruction')}\n\n"
    prompt += f"### Input:\n{own}\n\n" if own else ""
    prompt += "### Response:\n"
    return (Rendered(prompt + output, ((len(prompt), len(prompt) + len(output)),)),)


def read_completion(record: SourceRecord) -> tuple[Rendered | Turns] | str:
    """Return prompt and completion as one text or conversation, in which the completion is trained
    on. If both are empty, return why the record is left out."""
    if isinstance(record.fields["prompt"], list):
        prompt = messages_of(record, "prompt")
        turns = prompt + messages_of(record, "completion")
        return (Turns(record.origin, turns, tools_of(record), len(prompt)),) if turns else BLANK
    prompt_text = text_of(record, "prompt")
    text = prompt_text + text_of(record, "completion")
    return (Rendered(text, ((len(prompt_text), len(text)),)),) if text.strip() else BLANK


def read_text(record: SourceRecord) -> tuple[Rendered] | str:
    """Return a text, all of which is trained on, or the reason, in words, why the record is left
    out."""
    text = text_of(record, "text")
    return (Rendered(text),) if text.strip() else BLANK


def read_unpaired(record: SourceRecord) -> tuple[Rendered | Turns | Encoded, ...] | str:
    """Return an answer that `label` calls desirable (1) or undesirable (0), with its prompt; or
    return why the record is left out.

    The answer is a completion, the output of an instruction, or all answers after the last user
    message of a conversation.
    """
    label = record.fields["label"]
    if label not in (0, 1):
        raise record.refusal(
            f"label: {in_short(label, 40)!r}",
            "true or 1 for an answer that is wanted, false or 0 for one that is not",
        )
    has = {name for name, value in record.fields.items() if value is not None}
    format = next((one for one in _OF_ANSWERS if has.issuperset(FORMATS[one].needed)), None)
    if format is None:
        raise _lacks(record, "unpaired")
    found = FORMATS[format].read(record)
    if isinstance(found, str):
        return found
    (one,) = found
    if isinstance(one, Turns):
        own = one if format == "completion" else only_last_answers(one)
        return (own,) if answers(own.turns[own.first :]) else EMPTY
    assert isinstance(one, Rendered)
    ((start, stop),) = one.ranges or ((0, 0),)
    return found if one.text[start:stop].strip() else EMPTY


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """A format of records: the fields that it reads, and the function that reads them."""

    needed: tuple[str, ...]
    """Fields that each record has."""
    read: Read
    optional: tuple[str, ...] = ()
    """Fields that are read if a record has them."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Fields that other trainers read and this format does not, and where to write their values."""


_AROUND = ("tools", "system", "chat_template_kwargs")
_INSTRUCTION = ("input", "history")
FORMATS: dict[Format, RecordFormat] = {
    "tokens": RecordFormat(("input_ids",), read_tokens, optional=("labels",)),
    "chat": RecordFormat(
        ("messages",), read_chat, _AROUND, lost={"history": "as messages"}
    ),
    "completion": RecordFormat(
        ("prompt", "completion"), read_completion, _AROUND, lost=_INTO_PROMPT
    ),
    "alpaca": RecordFormat(
        ("instruction", "output"), read_instruction, (*_INSTRUCTION, *_AROUND),
        lost={"tools": "into instruction"},
    ),
    "text": RecordFormat(("text",), read_text),  # a text file is one such record
    # two answers to one prompt, for train.loss: dpo
    "preference": RecordFormat(
        ("chosen", "rejected"), read_pair,
        ("prompt", "messages", "instruction", *_INSTRUCTION, *_AROUND), lost=_INTO_PROMPT,
    ),
    # an answer and whether it is desirable, for train.loss: kto
    "unpaired": RecordFormat(
        ("label",), read_unpaired,
        ("prompt", "completion", "messages", "instruction", "output", *_INSTRUCTION, *_AROUND),
        lost=_INTO_PROMPT,
    ),
}  # fmt: skip
_ASKED = ("instruction", "prompt", "query", "question", "problem", "input", "inputs", "source")
_FURTHER = ("input", "context", "passage")
_MAY_BE_NULL = frozenset(("text", "messages", "output", "completion"))
_PAIR = ("chosen", "rejected")
_OF_ANSWERS: tuple[Format, ...] = ("completion", "chat", "alpaca")
FIELDS = frozenset(["loss_mask"]).union(*(one.needed + one.optional for one in FORMATS.values()))
"""All fields that some format reads; `loss_mask` may stand beside messages."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings by which the records of a source become sequences."""

    format: Format | Literal["auto"] = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The data's names of fields by furlong's names, as in `data.fields`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on: Literal["assistant", "all", "last", "conversations"] = "assistant"
    eot_tokens: tuple[str, ...] = ()

    @property
    def is_trained_whole(self) -> bool:
        """Whether the whole text is trained on."""
        is_answer = self.train_on == "conversations" and self.format == "completion"
        return self.train_on in ("all", "conversations") and not is_answer

    @classmethod
    def of(cls, settings: DataConfig, source: Source, format: Format | None = None) -> Reading:
        """Return the settings for a source of a run; `format`: the format that the loss requires,
        if any."""
        return cls(
            format or source.format or settings.format,
            {**settings.fields, **(source.fields or {})}, settings.chat_template_kwargs,
            settings.train_on, settings.eot_tokens,
        )  # fmt: skip

    @property
    def columns(self) -> frozenset[str]:
        """All names that a record may use for the fields that are read."""
        return FIELDS | columns(self.fields)

    @property
    def key(self) -> dict[str, Any]:
        """The settings as plain values, to be part of a cache key: they determine tokens and
        labels."""
        return asdict(self)

    def decided(self, first: SourceRecord) -> Reading:
        """Return the settings with a definite format: the one that is set or, for `auto`, that of
        the first record.

        Raises:
            DataError: the record has the fields of no format.
        """
        if self.format != "auto":
            same: Format = "chat" if self.format == "sharegpt" else self.format
            return replace(self, format=same)
        return replace(self, format=decide_format(first, self.fields))

    def facts(self, first: SourceRecord) -> dict[str, Any]:
        """Return `{"format": ..., "fields": ...}`: the format, and the names of the fields that the
        format requires, as they are in the first record."""
        assert self.format != "auto"
        _, names = renamed(first, self.fields)
        needed = FORMATS[self.format].needed if first.line else ()
        return {"format": self.format, "fields": [names.get(name, name) for name in needed]}

    def turns(self, turns: Turns, record: SourceRecord) -> Turns:
        """Return the conversation with two settings added: `chat_template_kwargs` (of the run,
        overridden by those of the record), and which turns are trained on (`train_on`).

        Raises:
            DataError: the record's chat_template_kwargs are invalid, or a message is marked as not
                trained on although the whole text is trained on.
        """
        own = record.fields.get("chat_template_kwargs") or {}
        if not isinstance(own, dict) or refused_kwargs(own):
            raise record.refusal(
                f"chat_template_kwargs {in_short(own, 60)}",
                "an object with names that the chat template reads, and the rendering does not set",
            )
        turns = replace(turns, kwargs={**self.chat_template_kwargs, **own})
        if self.is_trained_whole and not all(map(may_be_trained, turns.turns)):
            raise record.refusal(
                f"a message that is marked as not learnt, with data.train_on: {self.train_on}",
                "no such mark where all of the text is learnt",
                f"remove the marks ({', '.join(MARKS)}), or set data.train_on to assistant",
            )
        if self.train_on == "last":
            return only_last_answers(turns)
        return replace(turns, is_trained_whole=self.is_trained_whole)


def encode(
    records: Iterable[SourceRecord], tokenizer: Any, reading: Reading, notes: Notes
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Yield records with their sequences: one, the two of a pair, or, for KTO, an answer and its
    mismatch (the prompt with another record's answer).

    Args:
        records: the records of a source.
        tokenizer: a tokenizer of transformers, or `NoTokenizer`.
        reading: how to read them, with a format that is not `auto`.
        notes: counts the records that are left out, by reason.

    Raises:
        UserError: a record cannot be read, rendered, masked or tokenized.
    """
    encoded = _encoded(records, tokenizer, reading, notes)
    return with_mismatches(encoded) if reading.format == "unpaired" else encoded


def read_whole(
    records: Iterable[SourceRecord], tokenizer: Any, reading: Reading, notes: Notes
) -> Iterator[tuple[SourceRecord, tuple[Rendered | Turns | Encoded, ...] | str]]:
    """Yield each record, with furlong's names of fields, and the texts, conversations or token ids
    in it.

    If a record is left out, the reason is yielded in their place.

    Args:
        records: the records of a source.
        tokenizer: decides whether instructions are written by a chat template.
        reading: how to read them, with a format that is not `auto`.
        notes: counts the fields that nothing reads.

    Raises:
        DataError: a record cannot be read, or a field that nothing reads would change what is
            trained on.
    """
    assert reading.format != "auto"
    shape = FORMATS[reading.format]
    read = shape.read
    if reading.format == "alpaca" and tokenizer.chat_template is None:
        read = instruction_text
    template = str(getattr(tokenizer, "chat_template", ""))
    known = shape.needed + shape.optional
    has_answers = reading.format in _OF_ANSWERS
    unread = Unread(notes, template, shape.needed, shape.lost, has_answers)
    for given in records:
        record, names = renamed(given, reading.fields)
        if not all(field in record.fields for field in shape.needed):
            raise _lacks(given, reading.format, names=names)
        record = read_values(record, reading.fields, known, template)
        fields = _Looked(record.fields)
        is_null = any(record.fields[name] is None for name in _MAY_BE_NULL & {*shape.needed})
        found = BLANK if is_null else read(replace(record, fields=fields))
        is_turns = not isinstance(found, str) and isinstance(found[0], Turns)
        looked = fields.looked | {"chat_template_kwargs"} if is_turns else fields.looked
        used = known if isinstance(found, str) else looked
        unread.take(record, used, found, names)
        yield record, found


class _Looked(dict[str, Any]):
    """A dict of a record's fields that remembers which names were looked up."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.looked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.looked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.looked.add(name)
        return super().get(name, default)


def _encoded(
    records: Iterable[SourceRecord], tokenizer: Any, reading: Reading, notes: Notes
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    template: ChatTemplate | None = None

    def items() -> Iterator[Item]:
        nonlocal template
        for record, found in read_whole(records, tokenizer, reading, notes):
            if isinstance(found, str):
                notes.add(found, record.file, record.line)
                continue
            own: list[Rendered | Encoded] = []
            for one in found:
                if not isinstance(one, Encoded) and isinstance(tokenizer, NoTokenizer):
                    raise tokenizer.refusal(record.origin)
                if isinstance(one, Turns):
                    template = template or ChatTemplate(tokenizer, reading.eot_tokens)
                    own.append(text := template.render(reading.turns(one, record)))
                    for what in text.notes:
                        notes.add(what, record.file, record.line)
                elif reading.is_trained_whole and isinstance(one, Rendered):
                    own.append(Rendered(one.text))
                else:
                    own.append(one)
            yield record, own

    for record, found in tokenized(items(), tokenizer, notes):
        checked: list[Encoded] | str = found
        if len(found) == 2:
            checked = check_pair(found, of_texts=is_of_texts(record))
        elif not len(found[0].input_ids):
            checked = BLANK
        elif reading.format == "unpaired":
            checked = [replace(found[0], desirable=bool(record.fields["label"]))]
        if isinstance(checked, str):
            notes.add(checked, record.file, record.line)
        else:
            yield record, checked


def decide_format(first: SourceRecord, fields: Mapping[str, Any]) -> Format:
    """Return the format of a source by its first record.

    Args:
        first: the record.
        fields: `data.fields` of the source.

    Raises:
        DataError: the record has the fields of no format.
    """
    record, names = renamed(first, fields)
    known = [format for format in FORMATS if format not in FORMAT_OF_LOSS.values()]
    for format in known:
        if all(record.fields.get(field) is not None for field in FORMATS[format].needed):
            return format
    raise _lacks(first, *known, names=names)


def _lacks(record: SourceRecord, *formats: Format, names: Mapping[str, str] = {}) -> DataError:
    """Return the error for a record that has the fields of none of these formats. `names`: the name
    in the data for each of furlong's names."""
    required = " or ".join(
        " + ".join(names.get(name, name) for name in FORMATS[format].needed) for format in formats
    )
    null = {name: " (null)" for name, value in record.fields.items() if value is None}
    known = sorted(record.fields, key=lambda name: name not in FIELDS)
    given = [printable(name) + null.get(name, "") * (name in FIELDS) for name in known[:12]]
    name = "name the data's fields in data.fields"
    change = f"{name}, such as {{text: chapter}}, or set data.format to the records' shape"
    absent = {own: theirs for own, theirs in names.items() if theirs not in record.fields}
    tables = [
        n for n, v in record.fields.items()
        if isinstance(v, list) and v and all(isinstance(x, Mapping) for x in v)
    ]  # fmt: skip
    pair = {own: next((n for n in record.fields if n.startswith(own)), "") for own in _PAIR}
    if absent:
        given.append(f"and data.fields: {in_yaml(absent)}")
        own, theirs = next(iter(absent.items()))
        near = get_close_matches(theirs, record.fields, n=1) or known
        change = f"set data.fields: {in_yaml({own: near[0]})}, or another field of the records"
    elif all(pair.values()):
        fields = ", ".join(f"{own}: {theirs}" for own, theirs in pair.items() if own != theirs)
        changes = [f"set data.fields: {{{fields}}}"] * bool(fields)
        changes += ["set train.loss to dpo, for pairs of answers"] * (formats != ("preference",))
        change = " and ".join(changes)
    elif formats == ("preference",):
        loss = "kto" if "label" in record.fields else "sft"
        change = f"{name}: {{prompt: ..., chosen: ..., rejected: ...}}, or set train.loss to {loss}"
    elif formats == ("unpaired",):
        required = "label, with prompt + completion, messages, or instruction + output"
        change = f"{name}: {{label: ..., completion: ...}}, or set train.loss to sft"
    elif found := _renaming(record.fields):
        change = f"set data.fields: {{{found}}}, if that is what they are"
    elif is_message(record.fields):
        change = 'write each conversation as one record: {"messages": [...]}, or as one .json file'
    elif tables:
        change = f"write the list of {printable(tables[0])} alone into a file"
    return record.refusal(
        f"a record with {', '.join(given) or 'no field'}", f"the fields {required}", change
    )


def _renaming(fields: Mapping[str, Any]) -> str:
    """Return a value of `data.fields` with which a record of no known format could be read, as text
    for advice: `prompt: question, completion: answer`. Return "" if the record has no such
    fields."""
    texts = [name for name, value in fields.items() if isinstance(value, str) or value is ...]
    asked, said = (next((n for n in names if n in texts), "") for names in (_ASKED, SAID))
    for name, value in fields.items():
        if isinstance(value, list) and value and all(map(is_message, value)):
            roles = [str(turn.get("role", turn.get("from"))) for turn in value]
            is_asked = roles[-1] in ("user", "human")
            if is_asked and not said and not {*roles} - {"user", "human", "system"}:
                continue  # it has no answer to train on
            return (
                f"prompt: {name}, completion: {said}" if is_asked and said else f"messages: {name}"
            )
    if not asked or not said:
        return ""
    further = next((n for n in _FURTHER if n != asked and n in texts), "")
    around = further or any(fields.get(name) for name in ("system", "history"))
    if asked != "instruction" and not around:
        return f"prompt: {asked}, completion: {said}"
    also = f", input: {further}" if further not in ("", "input") else ""
    return f"instruction: {asked}, output: {said}{also}"


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
