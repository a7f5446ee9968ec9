"""Fields to shapes, and what is said of fields that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from furlong.data import records
from furlong.data.chat import messages_of
from furlong.data.formats import check_endings, check_fields, decide_format, unused_fields
from furlong.data.records import SourceRecord
from furlong.data.sources import SourceFile
from furlong.data.tokenize import text_of, tokens_of
from furlong.errors import DataError

USER = {"role": "user", "content": "hi"}


def record(**fields: Any) -> SourceRecord:
    return SourceRecord(fields, 0, 7, "a.jsonl:7")


def refused(call: Any, *arguments: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        call(*arguments)
    assert caught.value.source == "a.jsonl:7"
    return caught.value


@pytest.mark.parametrize(
    ("fields", "format", "unused"),
    [
        (("text",), "text", []),
        (("text", "id", "labels"), "text", ["id", "labels"]),
        (("prompt", "completion", "text"), "completion", ["text"]),
        (("messages", "tools", "text", "prompt", "completion"), "chat",
         ["completion", "prompt", "text"]),
        (("input_ids", "labels", "messages"), "tokens", ["messages"]),
        (("prompt", "text"), "text", ["prompt"]),
    ],
)  # fmt: skip
def test_auto_goes_by_the_fields(fields: tuple[str, ...], format: Any, unused: list[str]) -> None:
    given = dict.fromkeys(fields, "x")
    assert decide_format(record(**given)) == format
    assert unused_fields(given, format) == unused


def test_auto_needs_a_shape() -> None:
    error = refused(decide_format, record(content="x", prompt="y", text=None))
    assert error.given == "a record with prompt, text (null), content"
    assert error.required == "the fields input_ids or messages or prompt + completion or text"
    assert refused(decide_format, record()).given == "a record with no field"


def test_a_record_must_have_the_fields_of_its_shape() -> None:
    check_fields(record(text="x", id=1), "text")
    error = refused(check_fields, record(messages=[], id=1), "text")
    assert (error.given, error.required) == ("a record with messages, id", "the field text")
    error = refused(check_fields, record(prompt="x"), "completion")
    assert error.required == "the fields prompt + completion"


@pytest.mark.parametrize("ending", [".json", ".csv", ".TSV"])
def test_what_may_hold_records_is_not_taken_for_a_text(ending: str) -> None:
    file, other = SourceFile(Path(f"a{ending}"), "text"), SourceFile(Path("c.md"), "text", False)
    found = SourceFile(Path(f"b{ending}"), "text", False)
    readme = SourceFile(Path("README.md"), "text", False)  # of a download, and no text of its own
    for files in ([file], [found, found], [readme, file]):
        with pytest.raises(DataError) as caught:
            check_endings(files)
        assert f"{files[-1].path}: a {ending.lower()} file" in caught.value.given
        assert "convert it" in caught.value.change
    check_endings([readme])
    check_endings([found, other])


def test_a_text_is_a_string_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(record(text="x"), "text") == "x"
    assert refused(text_of, record(text=5), "text").given == "text that is of type int"
    assert refused(text_of, record(prompt=None), "prompt").given == "prompt that is null"
    error = refused(text_of, record(prompt=[USER]), "prompt")
    assert "conversations go into messages" in error.change
    monkeypatch.setattr(records, "MAX_TEXT_BYTES", 3)
    assert text_of(record(text="123"), "text") == "123"
    assert text_of(record(text="é"), "text") == "é"
    assert refused(text_of, record(text="éé"), "text").given == "text of 4 B"
    assert refused(messages_of, record(messages=[USER, USER]), "").given == "messages of 4 B"


def test_turns_lose_fields_without_a_value() -> None:
    turns = [
        {**USER, "tool_calls": None},
        {"role": "assistant", "tool_calls": [{}], "content": None},
    ]
    assert messages_of(record(messages=turns), "") == [
        USER,
        {"role": "assistant", "tool_calls": [{}]},
    ]


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ("hi", "messages that are of type str"),
        (["hi"], "messages that are a list of str"),
        ({"role": ["user"]}, "messages that are of type dict"),
        ([USER, {"content": "x"}], "message 2 with content"),
        ([{"role": 1, "content": "x"}], "message 1 with role, content"),
        ([{}], "message 1 with no field"),
        ([{"role": "user"}], "message 1 whose content is missing"),
        ([{"role": "user", "content": 5}], "message 1 whose content is of type int"),
        ([{"role": "user", "content": None}], "message 1 whose content is null"),
        ([{"role": None, "content": "x"}], "message 1 whose role is null"),
        (None, "messages that are null"),
        ([USER, {"role": "bot", "content": "x"}], "message 2 of role 'bot'"),
    ],
)
def test_a_bad_turn_is_named(messages: Any, given: str) -> None:
    assert refused(messages_of, record(messages=messages), "").given == given


def test_a_template_may_know_more_roles() -> None:
    turns = [{"role": "ipython", "content": "x"}]
    assert messages_of(record(messages=turns), "{% if message.role == 'ipython' %}") == turns
    assert messages_of(record(messages=turns), '{% if message.role == "ipython" %}') == turns
    assert "system, tool" in refused(messages_of, record(messages=turns), "ipython").required


def test_tokens_are_taken_as_they_are() -> None:
    ids, labels = tokens_of(record(input_ids=[3, 1, 2]))
    assert ids.tolist() == [3, 1, 2] and labels is ids and ids.dtype == "int32"
    ids, labels = tokens_of(record(input_ids=[3, 1], labels=[-100, 1]))
    assert labels.tolist() == [-100, 1] and labels.dtype == "int32"
    assert len(tokens_of(record(input_ids=[]))[0]) == 0


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"input_ids": None}, "input_ids that are null"),
        ({"input_ids": "3 1"}, "input_ids that are of type str"),
        ({"input_ids": [3, 1.5]}, "input_ids that are a list of float and int"),
        ({"input_ids": [[3, 1]]}, "input_ids that are a list of list"),
        ({"input_ids": [3, None]}, "input_ids that are a list of NoneType and int"),
        ({"input_ids": [3, True]}, "input_ids that are a list of bool and int"),
        ({"input_ids": [3, -1]}, "input_ids that are a list of int from -1 to 3"),
        ({"input_ids": [3, 2**31]}, "input_ids that are a list of int from 3 to 2147483648"),
        ({"input_ids": [3, 2**70]}, "input_ids that are a list of int"),
        ({"input_ids": [3], "labels": [3, 4]}, "1 input_ids with 2 labels"),
        ({"input_ids": [3, 4], "labels": [3, -1]}, "label -1"),
    ],
)
def test_bad_tokens_are_named(fields: dict[str, Any], given: str) -> None:
    assert refused(tokens_of, record(**fields)).given == given


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"text": "a", "type": None, "image_url": None}, "b"], "ab"),
        ([], ""),
    ],
)
def test_content_of_parts_is_their_text(content: list[Any], text: str) -> None:
    (turn,) = messages_of(record(messages=[{**USER, "content": content}]), "")
    assert turn == {**USER, "content": text}


def test_content_beside_calls_is_a_text_too() -> None:
    turn = {"role": "assistant", "content": {"a": 1}, "tool_calls": [{}]}
    assert "content is of type dict" in refused(messages_of, record(messages=[turn]), "").given


@pytest.mark.parametrize(
    ("part", "given"),
    [
        ({"type": "image_url", "image_url": {}}, "message 1 of chosen, part 2: of type image_url"),
        ({"type": "input_audio"}, "message 1 of chosen, part 2: of type input_audio"),
        ({"type": "text", "text": None}, "message 1 of chosen, part 2: of type dict"),
        ({"text": "a", "image": "x.png"}, "message 1 of chosen, part 2: with image"),
        (
            {"type": "text", "text": "a", "file": {"id": 1}},
            "message 1 of chosen, part 2: with file",
        ),
        (5, "message 1 of chosen, part 2: of type int"),
    ],
)
def test_parts_that_are_no_text_are_named(part: Any, given: str) -> None:
    turns = [{**USER, "content": [{"type": "text", "text": "x"}, part]}]
    assert refused(messages_of, record(chosen=turns), "", "chosen").given == given


@pytest.mark.parametrize(
    ("role", "mark", "value"),
    [
        ("assistant", "weight", 0.5),
        ("assistant", "weight", "0"),
        ("assistant", "train", [True]),
        ("user", "training", True),
    ],
)
def test_a_mark_that_is_no_yes_or_no_is_named(role: str, mark: str, value: Any) -> None:
    turn = {"role": role, "content": "x", mark: value}
    error = refused(messages_of, record(messages=[turn]), "")
    assert error.given == f"message 1 of messages, of role {role}: {mark} = {value!r}"


@pytest.mark.parametrize(
    ("fields", "format", "given"),
    [
        ({"messages": [USER], "system": "s"}, "chat", "system beside messages"),
        ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "completion", "history"),
        ({"prompt": "a", "completion": "b", "label": False}, "completion", "label: false"),
        ({"prompt": "a", "completion": "b", "label": 0}, "completion", "label: 0"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "completion", "label: false"),
        ({"messages": [], "label": False}, "chat", "label: false"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"},
            "preference",
            "system beside chosen",
        ),
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


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({"attention_mask": [1, 1, 0]}, "an attention_mask that is not 1"),
        ({"attention_mask": [1, 1]}, "an attention_mask that is not 1"),
        ({"position_ids": [0, 1, 0]}, "position_ids that are not 0 to 2"),
        ({"completion_mask": [0, 1, 1]}, "completion_mask beside input_ids, without labels"),
    ],
)
def test_what_other_fields_say_of_tokens_is_not_passed_over(
    more: dict[str, Any], given: str
) -> None:
    ids = {"input_ids": [5, 6, 7]}
    assert given in refused(tokens_of, record(**ids, **more)).given
    plain = {"attention_mask": [1, True, 1], "position_ids": [0, 1, 2]}
    assert tokens_of(record(**ids, **plain))[0].tolist() == [5, 6, 7]
    tokens_of(record(**ids, labels=[5, 6, 7], completion_mask=[1, 1, 1]))
