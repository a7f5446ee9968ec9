"""Fields to shapes, and what is refused of fields that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from furlong.data.chat import messages_of
from furlong.data.formats import FORMATS, check_fields, decide_format, text_of, unused_fields
from furlong.data.records import SourceRecord
from furlong.data.tokenize import Encoded
from furlong.errors import DataError

USER = {"role": "user", "content": "hi"}


def record(**fields: Any) -> SourceRecord:
    return SourceRecord(fields, 0, 7, "a.jsonl:7")


def refused(call: Any, *arguments: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        call(*arguments)
    assert caught.value.source == "a.jsonl:7"
    return caught.value


def tokens_of(one: SourceRecord) -> Encoded:
    (encoded,) = FORMATS["tokens"].read(one)
    assert isinstance(encoded, Encoded)
    return encoded


@pytest.mark.parametrize(
    ("fields", "format", "unused"),
    [
        (("text", "id", "labels"), "text", ["id", "labels"]),
        (("prompt", "completion", "text"), "completion", ["text"]),
        (("messages", "tools", "text", "prompt"), "chat", ["prompt", "text"]),
        (("input_ids", "labels", "messages"), "tokens", ["messages"]),
        (("prompt", "text"), "text", ["prompt"]),
    ],
)
def test_auto_goes_by_the_fields(fields: tuple[str, ...], format: Any, unused: list[str]) -> None:
    given = dict.fromkeys(fields, "x")
    assert decide_format(record(**given)) == format
    assert unused_fields(given, format) == unused


def test_a_record_must_have_the_fields_of_its_shape() -> None:
    error = refused(decide_format, record(content="x", prompt="y", text=None))
    assert error.given == "a record with prompt, text (null), content"
    assert "input_ids or messages or prompt + completion or text" in error.required
    assert "no field" in refused(decide_format, record()).given
    check_fields(record(text="x", id=1), "text")
    assert "text" in refused(check_fields, record(messages=[], id=1), "text").required
    assert "prompt + completion" in refused(check_fields, record(prompt="x"), "completion").required
    assert text_of(record(text="x"), "text") == "x"
    assert "text of type int" in refused(text_of, record(text=5), "text").given
    assert "prompt of type NoneType" in refused(text_of, record(prompt=None), "prompt").given


def test_turns_lose_fields_without_a_value() -> None:
    answer = {"role": "assistant", "tool_calls": [{}]}
    turns = [{**USER, "tool_calls": None}, answer | {"content": None}]
    assert messages_of(record(messages=turns), "messages") == [USER, answer]


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ("hi", "messages of type str"),
        (["hi"], "message 1 of messages of type str"),
        ([USER, {"content": "x"}], "message 2 of messages without a role"),
        ([{"role": 1, "content": "x"}], "message 1 of messages without a role"),
        ([{"from": "human", "value": "x"}], "without a role: it has from, value"),
        ([{"role": "user"}], "message 1 of messages whose content is of type NoneType"),
        ([{"role": "user", "content": 5}], "content is of type int"),
        ([{"role": "assistant", "content": {}, "tool_calls": [{}]}], "content is of type dict"),
        ([USER | {"content": [{"type": "image_url", "image_url": {}}]}], "a part {'type': 'image"),
        ([USER | {"content": [{"type": "text", "text": None}]}], "a part {'type': 'text'"),
        ([USER | {"content": [{"text": "a", "image": "x.png"}]}], "a part {'text': 'a'"),
        ([USER | {"content": ["a", 5]}], "message 1 of messages: a part 5"),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], "weight = 0.5"),
        ([{"role": "assistant", "content": "x", "train": [True]}], "train = [True]"),
        ([USER | {"training": True}], "of role user: training = True"),
    ],
)
def test_a_bad_turn_is_named(messages: Any, given: str) -> None:
    assert given in refused(messages_of, record(messages=messages), "messages").given


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"text": "a", "type": None, "image_url": None}, "b"], "ab"),
        ([], ""),
    ],
)
def test_content_of_parts_is_their_text(content: list[Any], text: str) -> None:
    (turn,) = messages_of(record(messages=[{**USER, "content": content}]), "messages")
    assert turn == {**USER, "content": text}


def test_tokens_are_taken_as_they_are() -> None:
    plain = tokens_of(record(input_ids=[3, 1, 2], attention_mask=[1, True, 1]))
    assert plain.input_ids.tolist() == [3, 1, 2] and plain.labels is plain.input_ids
    masked = tokens_of(record(input_ids=[3, 1], labels=[-100, 1], position_ids=[0, 1]))
    assert masked.labels.tolist() == [-100, 1] and masked.labels.dtype == "int32"
    tokens_of(record(input_ids=[5], labels=[5], completion_mask=[1]))
    assert len(tokens_of(record(input_ids=[])).input_ids) == 0


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"input_ids": None}, "input_ids of type NoneType"),
        ({"input_ids": "3 1"}, "input_ids of type str"),
        ({"input_ids": [3, 1.5]}, "list float and int"),
        ({"input_ids": [[3, 1]]}, "list list"),
        ({"input_ids": [3, None]}, "NoneType and int"),
        ({"input_ids": [3, True]}, "bool and int"),
        ({"input_ids": [3, -1]}, "from -1 to 3"),
        ({"input_ids": [3, 2**31]}, "from 3 to 2147483648"),
        ({"input_ids": [3, 2**70]}, "from 3 to"),
        ({"input_ids": [3], "labels": [3, 4]}, "1 input_ids with 2 labels"),
        ({"input_ids": [3, 4], "labels": [3, -1]}, "labels from -1"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "an attention_mask"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "an attention_mask"),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, "position_ids"),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, "completion_mask"),
    ],
)
def test_bad_tokens_are_named(fields: dict[str, Any], given: str) -> None:
    assert given in refused(tokens_of, record(**fields)).given


@pytest.mark.parametrize(
    ("fields", "format", "given"),
    [
        ({"messages": [USER], "system": "s"}, "chat", "system beside messages"),
        ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "completion", "history"),
        ({"prompt": "a", "completion": "b", "label": 0}, "completion", "label: 0"),
        ({"messages": [], "label": "False"}, "chat", "label: false"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"}, "preference", "system"),
    ],
)
def test_fields_of_other_programs_that_would_be_lost_are_refused(
    fields: dict[str, Any], format: Any, given: str
) -> None:
    assert refused(check_fields, record(**fields), format).given.startswith(given)
    empty = {name: value for name, value in fields.items() if name not in ("history", "label")}
    check_fields(record(**empty | {"system": "", "history": []}), format)
    check_fields(record(text="x", system="s", history=["y"], label=False), "text")
    said = {"role": "system", "content": "s"}
    check_fields(record(messages=[said, USER], system="s"), "chat")
