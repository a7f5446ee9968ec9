"""Count the fields of records that nothing reads, and refuse those that may be a loss mask.

A field counts as a possible mask by its name (`mask`, `weight`, `train`), its length (one value per
token, message or answer) or its values (switches of 0 and 1 that differ between answers).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from furlong.data.chat import Turns
from furlong.data.fields import MARKS, Turn
from furlong.data.records import IS_MEDIA, Notes, SourceRecord
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Rendered
from furlong.errors import in_short

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_PLACEHOLDER = re.compile(r"<\|?(image|video|audio)")
_ALIGNED = re.compile("mask|position|label|weight|segment|seq_?len")
_MARKING = re.compile(
    "mask|(?<!s)train|(?<!g)loss|learn|weight|scale|span|range|boundar|doc_?end", re.IGNORECASE
)
"""Matches names of fields that may select what is trained on, whatever their values are."""
SAID = ("completion", "response", "answer", "solution", "output", "outputs", "target", "targets")
"""Names of an answer in public data sets."""
_EMPTY_ANSWER = "an empty answer"


class Unread:
    """Counts, for one source, the fields that nothing reads and faults such as empty answers."""

    def __init__(
        self, notes: Notes, template: str, needed: tuple[str, ...], lost: Mapping[str, str],
        has_answers: bool,
    ) -> None:  # fmt: skip
        """Start all counts at 0.

        Args:
            notes: counts to add to.
            template: the text of the chat template; message keys that it names count as read.
            needed: the fields that the format of the records needs.
            lost: fields that other trainers read but this format does not, and where the user
                should write their values instead.
            has_answers: whether each record holds an answer to learn; a false `label` is then
                refused.
        """
        self._notes, self._template = notes, template
        self._needed, self._lost, self._has_answers = needed, lost, has_answers
        self._marks: dict[str, Any] = {}
        self._values: set[str] = set()  # keys of answers whose values are no switch
        self._num_answers = 0

    def take(
        self,
        record: SourceRecord,
        read: Collection[str],
        found: tuple[Any, ...] | str,
        names: Mapping[str, str],
    ) -> None:
        """Count the fields of a record that nothing reads.

        Args:
            record: the record, with furlong's names of fields.
            read: the fields that were read.
            found: the texts, conversations or token ids read from the record, or the reason why the
                record is left out.
            names: the name in the data for each renamed field, by furlong's name.

        Raises:
            DataError: a field that nothing reads may select what is trained on, or other trainers
                read it.
        """
        self._notes.num_records += 1
        made = () if isinstance(found, str) else found
        for name, value in record.fields.items():
            if name not in read and value not in _EMPTY:
                self._notes.unread[str(name)] += 1
                messages = names.get("messages", "messages")
                if refusal := self._of_others(name, value, names.get(name, name)) or _refusal(
                    str(name), value, messages, *made[:1]
                ):
                    raise record.refusal(*refusal)
        for own in made:
            for what in dict.fromkeys(_remarks(own)):
                self._notes.add(f"records with {what}", record.file, record.line)
            for turn in own.turns[own.first :] if isinstance(own, Turns) else ():
                if turn["role"] == "assistant":
                    self._check_answer(record, turn)

    def _of_others(self, name: str, value: Any, theirs: str) -> tuple[str, str, str] | None:
        """Return the error's parts (given, required, change) about a field that other trainers
        read; None for any other field. `theirs`: the data's name of the field."""
        if value and name in self._lost:
            return (
                f"{name} beside {self._needed[0]}, which would be lost",
                f"all that the model reads in {' and '.join(self._needed)}",
                f"write {name} {self._lost[name]}, and remove the field, or set data.fields:"
                f" {{unused: [{theirs}]}} if nothing that is learnt needs it",
            )
        if name == "label" and self._has_answers and str(value).lower() in ("false", "0", "0.0"):
            return (
                f"label: {str(value).lower()}, which says of answers that they are not learnt",
                "answers that are learnt, or train.loss: kto, which learns of both kinds",
                "remove the record, or set train.loss to kto; a label that says something else"
                " needs another name",
            )
        return None

    def _check_answer(self, record: SourceRecord, turn: Turn) -> None:
        """Raise DataError if an answer has a key that may exclude answers from the loss, although
        nothing reads it. Such a key has values that are switches, such as 0 and 1, and that differ
        between the answers of the source. `turn`: the answer."""
        marks = {
            key: value
            for key, value in turn.items()
            if key not in (*MARKS, "tool_calls")
            and (isinstance(value, bool | int | float) or (_MARKING.search(key) and _is_off(value)))
        }
        for key in marks.keys() | self._marks.keys():
            value = marks.get(key)
            first = self._marks.setdefault(key, None if self._num_answers else value)
            differs = value != first or isinstance(value, list)
            is_named = bool(_MARKING.search(key))
            is_switch = value in (0, 1, None) and first in (0, 1, None)
            if not is_named and not is_switch:
                self._values.add(key)
            may_mark = key not in self._values and differs and (_is_off(value) or _is_off(first))
            if may_mark and not re.search(rf"""[.'"]{re.escape(key)}\b""", self._template):
                raise record.refusal(
                    f"an answer with {key} = {in_short(value, 40)}, where another one has"
                    f" {in_short(first, 40)}; nothing reads it",
                    "marks of answers that are not learnt as weight: 0",
                    f"set data.fields: {{unused: [{key}]}} if it says nothing of what is learnt"
                    + f", or {{weight: {key}}} if 0 or false says that an answer is not"
                    * (is_named and is_switch),
                )
        self._num_answers += 1


def _refusal(name: str, value: Any, messages: str, one: Any = None) -> tuple[str, str, str] | None:
    """Return the error's parts (given, required, change) for a field that nothing reads and that
    may select what is trained on; None for any other field.

    `messages`: the data's name of the field `messages`. `one`: the conversation, text or token ids
    read from the record.
    """
    turns = one.turns if isinstance(one, Turns) else []
    leave_out = f"set data.fields: {{unused: [{name}]}}"
    if name in ("chosen", "rejected") and turns and turns[-1]["role"] != "assistant":
        return (
            f"{name} beside a conversation that ends before its answer",
            "an answer in the conversation, or a loss that learns from pairs",
            "set train.loss to dpo, or add the answer that is to be learnt",
        )
    is_text = isinstance(value, str) and value.strip()
    if name in SAID and is_text and turns and turns[-1]["role"] != "assistant":
        return (
            f"{name}, a text, beside {messages} that end before their answer",
            "the answer as the last message, or as the completion of the messages",
            f"set data.fields: {{prompt: {messages}, completion: {name}}}, or {leave_out}",
        )
    if IS_MEDIA.search(name) and (turns or _PLACEHOLDER.search(getattr(one, "text", ""))):
        return (
            f"{name} beside a text, images or sound that the text is about",
            "text alone: images and sound are not trained on",
            f"remove the records with {name}, or {leave_out} if their texts do not need it",
        )
    if isinstance(one, Encoded) and _marks_tokens(name, value, one):
        return (
            f"{name} beside {len(one.input_ids):,} input_ids, which would not be read",
            "input_ids of one sequence, and labels if not every token is learnt",
            "remove padding, write packed sequences as records of their own, and write labels:"
            f" {IGNORE_INDEX} where a token is not learnt; or {leave_out} if it says none of this",
        )
    if isinstance(value, list):
        sizes = (len(turns), len(turns) - 1, sum(turn["role"] == "assistant" for turn in turns))
        switches = len(value) > 2 and len(value) in sizes and all(one in (0, 1) for one in value)
        is_named = bool(_MARKING.search(name)) and not isinstance(one, Encoded)
        may_mark = switches or is_named
        is_mark = may_mark and _is_numbers(value) and _is_off(value) and _differs(name, value)
    else:
        is_weight = "weight" in name or "scale" in name
        is_off = not value or (is_weight and value != 1)
        is_mark = name in MARKS and isinstance(value, bool | int | float) and is_off
    if not is_mark:
        return None
    return (
        f"{name} = {in_short(value, 40)} beside what is learnt, which would not be read",
        "marks in the messages: weight: 0 in those of the assistant that are not learnt",
        f"write them there, leave out records that are not to be learnt, or {leave_out} if it says"
        " none of this",
    )


def _remarks(own: Any) -> Iterator[str]:
    """Yield notes on empty answers, on null values in calls and tools that a table has filled in,
    and on arguments that are no JSON object."""
    ranges = own.ranges or () if isinstance(own, Rendered) else ()
    if ranges and not any(own.text[start:stop].strip() for start, stop in ranges):
        yield _EMPTY_ANSWER
    if not isinstance(own, Turns):
        return
    known: dict[Any, Any] = {}
    for tool in own.tools or ():
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict):
            known[function.get("name")] = properties
            if None in properties.values():
                yield "null properties of tools, as a table of many tools writes them"
    for turn in own.turns[own.first :]:
        if turn["role"] == "assistant":
            said = [value for key, value in turn.items() if key != "role" and key not in MARKS]
            if not any(one.strip() if isinstance(one, str) else one for one in said):
                yield _EMPTY_ANSWER
        for call in turn.get("tool_calls") or ():
            function = call.get("function", {})
            given, schema = function.get("arguments"), known.get(function.get("name"), {})
            if isinstance(given, str):
                yield "arguments of a call that are no JSON object"
            elif isinstance(given, dict) and any(
                value is None and key not in schema for key, value in given.items()
            ):
                yield "null arguments of a call, as a table of many calls writes them"


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, bool | int | float) for one in value)


def _is_off(value: Any) -> bool:
    """Return whether a value may switch a loss off, or weigh it: a bool; a number in [0, 1); a list
    with at least one such item; or a dict with at least one bool."""
    if isinstance(value, dict):
        return any(isinstance(one, bool) for one in value.values())
    if isinstance(value, list):
        return any(map(_is_off, value))
    return isinstance(value, bool) or (isinstance(value, int | float) and 0 <= value < 1)


def _differs(name: str, value: list[Any]) -> bool:
    """Return whether numbers that may be a mask differ, or are all 0, which masks everything. Zeros
    in a field of ids, such as `token_type_ids`, are no mask."""
    is_off = not value[0] and ("position" in name or not name.endswith("_ids"))
    return is_off or len(set(value)) > 1


def _marks_tokens(name: str, value: Any, own: Encoded) -> bool:
    """Return whether a field beside `input_ids` may be a token mask, or the ends or lengths of
    packed sequences."""
    # tokenizers return a special_tokens_mask, which is no loss mask
    is_named = bool(_MARKING.search(name)) and name != "special_tokens_mask"
    if isinstance(value, str):
        return is_named and not value.strip("01 ,")
    if not isinstance(value, list) or name == "special_tokens_mask":
        return False
    if not _is_numbers(value):
        return is_named
    num_tokens = len(own.input_ids)
    if len(value) != num_tokens:
        ends = len(value) > 2 and (value[0], value[-1]) == (0, num_tokens)
        is_packed = ends or (len(value) > 1 and sum(value) == num_tokens)
        return is_packed or (value != [num_tokens] and (is_named or bool(_ALIGNED.search(name))))
    labelled = own.labels != IGNORE_INDEX
    is_known = value == labelled.tolist() and own.labels is not own.input_ids
    is_order = value == list(range(num_tokens)) and "mask" not in name
    return not (is_known or is_order) and _differs(name, value)
