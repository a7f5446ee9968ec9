"""Fields to shapes, and what is refused of fields that do not fit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHATML, CHATML_WITH_TAGS, byte_tokenizer

from furlong.data.fields import messages_of, text_of
from furlong.data.formats import (
    FORMATS,
    Reading,
    decide_format,
    encode,
    read_whole,
)
from furlong.data.pairs import EMPTY
from furlong.data.records import Notes, SourceRecord
from furlong.data.tokenize import IGNORE_INDEX, Encoded
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
    ((_, (encoded,)),) = read_whole([one], byte_tokenizer(), Reading("tokens"), Notes())
    assert isinstance(encoded, Encoded)
    return encoded


def sequences_of(
    one: SourceRecord, format: Any, tokenizer: Any = None, **reading: Any
) -> list[tuple[str, str]]:
    """Of each sequence its text, and what of it is learnt."""
    tokenizer = tokenizer or byte_tokenizer()
    own = Reading(format, **reading).decided(one)
    return [
        (
            tokenizer.decode(found.input_ids),
            tokenizer.decode(found.input_ids[found.labels != IGNORE_INDEX]),
        )
        for _, pair in encode([one], tokenizer, own, Notes())
        for found in pair
    ]


SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "add"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "two"},
]
SAYS_CALLS = CHATML_WITH_TAGS.replace(
    "message['content'] + '<|im_end|>",
    "(message.tool_calls or '') | string + (message.content or '') + '<|im_end|>",
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AS_OPENAI = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "add"},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]  # fmt: skip


def test_conversations_of_others_are_the_same() -> None:
    tools = [{"name": "add", "parameters": {}}]
    (expected,) = sequences_of(
        record(messages=AS_OPENAI, tools=tools), "auto", byte_tokenizer(SAYS_CALLS)
    )
    assert expected[1] == f"{[CALL]}<|im_end|>\ntwo<|im_end|>\n"
    renamed = {"messages": "talk", "role": "who", "content": "says", "roles": {"me": "user"}}
    names = {"from": "who", "value": "says"}
    own = [{names[key]: value for key, value in turn.items()} for turn in SHAREGPT]
    own[1]["who"] = "me"
    whole = record(conversations=SHAREGPT, tools=json.dumps(tools))
    for other, reading in (
        (whole, {}),
        (record(conversation=SHAREGPT[1:], system="s"), {"format": "sharegpt"}),
        (record(messages=json.dumps(AS_OPENAI[1:]), system="s"), {}),
        (record(prompt=AS_OPENAI[:2], completion=AS_OPENAI[2:]), {}),
        (record(talk=own, messages="x"), {"fields": renamed}),
    ):
        format = reading.pop("format", "auto")
        found = sequences_of(other, format, byte_tokenizer(SAYS_CALLS), **reading)
        assert found == [expected], other.fields
    given = Reading("auto").decided(whole).facts(whole)
    assert (given["format"], given["fields"]) == ("chat", ["conversations"])


def test_an_instruction_is_a_conversation_or_alpacas_words() -> None:
    own = record(instruction="add", input="1 1", output="2", text="unused", history=None)
    told = "<|im_start|>user\nadd\n1 1<|im_end|>\n<|im_start|>assistant\n"
    assert sequences_of(own, "auto") == [(f"{told}2<|im_end|>\n", "2<|im_end|>\n")]
    ((text, learnt),) = sequences_of(own, "alpaca", byte_tokenizer(None))
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith("### Instruction:\nadd\n\n### Input:\n1 1\n\n### Response:\n2<end>")
    assert learnt == "2<end>"
    more = record(instruction="b", output="c", history=[["d", "e"]], system="s")
    ((_, learnt),) = sequences_of(more, "auto")
    assert learnt == "e<|im_end|>\nc<|im_end|>\n"
    assert "a history" in refused(sequences_of, more, "alpaca", byte_tokenizer(None)).given
    odd = record(instruction="b", output="c", history=["d"])
    assert "a history with d" in refused(sequences_of, odd, "auto").given
    odd = record(instruction="b", output="c", history=1.5)
    assert "a history with 1.5" in refused(sequences_of, odd, "auto").given


@pytest.mark.parametrize(
    ("fields", "learnt"),
    [
        ({"prompt": "a", "completion": "b"}, "b<end>"),
        (
            {"prompt": [USER], "completion": [{"role": "assistant", "content": "b"}]},
            "b<|im_end|>\n",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "b<|im_end|>\n"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "b<|im_end|>\n"),
    ],
)
def test_an_answer_is_wanted_or_not(fields: dict[str, Any], learnt: str) -> None:
    tokenizer = byte_tokenizer()
    reading = Reading("unpaired", fields={"label": "kto_tag"})
    records = [record(**fields, kto_tag=label) for label in (True, False, 1)]
    found = [own for _, (own, _) in encode(records, tokenizer, reading, Notes())]
    assert [own.desirable for own in found] == [True, False, True]
    labels = found[0].labels
    assert tokenizer.decode(labels[labels != IGNORE_INDEX]) == learnt
    assert "label: 'yes'" in refused(sequences_of, record(**fields, label="yes"), "unpaired").given
    blank = {
        name: ""
        for name, own in fields.items()
        if name in ("completion", "output") and isinstance(own, str)
    }
    if blank:
        less = {name: fields[name] for name in fields if name not in ("prompt", "output")}
        assert "label" in refused(sequences_of, record(**less, label=1), "unpaired").required
        notes = Notes()
        assert not list(encode([record(**fields | blank, kto_tag=1)], tokenizer, reading, notes))
        assert list(notes) == [EMPTY]


def test_what_is_learnt_of_a_conversation() -> None:
    turns = [
        USER,
        {"role": "assistant", "content": "a"},
        USER,
        {"role": "assistant", "content": "b"},
    ]
    own = record(messages=turns)
    ((text, learnt),) = sequences_of(own, "chat", train_on="last")
    assert learnt == "b<|im_end|>\n"
    ((_, learnt),) = sequences_of(record(messages=turns[1::2]), "chat", train_on="last")
    assert learnt == "a<|im_end|>\nb<|im_end|>\n"
    assert sequences_of(own, "chat", train_on="all") == [(text, text)]
    completion = record(prompt="a", completion="b")
    assert sequences_of(completion, "auto", train_on="all") == [("ab<end>", "ab<end>")]
    assert sequences_of(own, "chat", train_on="conversations") == [(text, text)]
    assert sequences_of(completion, "auto", train_on="conversations") == [("ab<end>", "b<end>")]
    agent = record(messages=AS_OPENAI)
    ((_, learnt),) = sequences_of(agent, "chat", byte_tokenizer(SAYS_CALLS), train_on="last")
    assert learnt == f"{[CALL]}<|im_end|>\ntwo<|im_end|>\n"


def test_a_template_is_given_what_run_and_record_say() -> None:
    tokenizer = byte_tokenizer("{{ mood }}{{ end }}" + CHATML)
    own = record(messages=[USER], chat_template_kwargs={"mood": "glad", "end": None})
    ((text, _),) = sequences_of(
        own, "chat", tokenizer, chat_template_kwargs={"mood": "x", "end": "!"}
    )
    assert text.startswith("gladNone<|im_start|>")
    odd = record(messages=[USER], chat_template_kwargs={"tools": []})
    assert "chat_template_kwargs" in refused(sequences_of, odd, "chat").given


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "no JSON"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "a call 1"),
        ({"messages": [{**USER, "tool_calls": [{"id": 1}]}]}, "a call {'id': 1}"),
        ({"messages": "hi"}, "messages: a text 'hi' that is no JSON"),
        ({"messages": [USER], "tools": "hammer"}, "tools: a text 'hammer'"),
        ({"messages": [USER], "tools": [5]}, "tool 1 of type int"),
        (
            {"messages": [{"role": "system", "content": "t"}], "system": "s"},
            "another system message",
        ),
        ({"conversations": [{"from": None, "value": "x"}]}, "without a role"),
    ],
)
def test_odd_conversations_of_others_are_named(fields: dict[str, Any], given: str) -> None:
    assert given in refused(sequences_of, record(**fields), "chat").given


def test_the_records_that_the_page_of_data_begins_with_are_recognised() -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    lines = page.split("```json\n")[1].split("```")[0].splitlines()
    found = [decide_format(record(**json.loads(line)), {}) for line in lines[:3]]
    assert found == ["text", "chat", "completion"]
    assert json.loads(lines[3]).keys() == {"prompt", *FORMATS["preference"].needed}


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
    assert decide_format(record(**given), {}) == format
    known = {"messages": [USER], "tools": [], "input_ids": [1], "labels": [1]}
    notes = Notes()
    own = record(**given | {name: known[name] for name in fields if name in known})
    list(read_whole([own], byte_tokenizer(), Reading(format), notes))
    assert sorted(notes.unread) == unused


def read_fields(given: SourceRecord, format: Any) -> None:
    list(read_whole([given], byte_tokenizer(), Reading(format), Notes()))


def test_a_record_must_have_the_fields_of_its_shape() -> None:
    error = refused(decide_format, record(content="x", prompt="y", text=None), {})
    assert error.given == "a record with prompt, text (null), content"
    assert "or prompt + completion or instruction + output or text" in error.required
    renaming = refused(decide_format, record(text="x"), {"text": "chapter"})
    assert "a record with text, and data.fields: {text: chapter}" in renaming.given
    assert "or chapter" in renaming.required and "{text: text}" in renaming.change
    near = refused(decide_format, record(body="x", id=1), {"text": "boddy"})
    assert "data.fields: {text: body}" in near.change
    tables = refused(decide_format, record(v=1, data=[{"text": "x"}]), {})
    assert "the list of data" in tables.change
    assert "no field" in refused(decide_format, record(), {}).given
    assert "text" in refused(sequences_of, record(messages=[], id=1), "text").required
    renaming = partial(sequences_of, fields={"completion": "y"})
    lacking = refused(renaming, record(prompt="x"), "completion")
    assert "prompt + y" in lacking.required
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
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "attention_mask"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "attention_mask"),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, "position_ids"),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, "completion_mask"),
    ],
)
def test_bad_tokens_are_named(fields: dict[str, Any], given: str) -> None:
    assert given in refused(tokens_of, record(**fields)).given


@pytest.mark.parametrize(
    ("fields", "format", "given"),
    [
        ({"messages": [USER], "history": [["c", "d"]]}, "chat", "history beside messages"),
        ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "completion", "history"),
        ({"prompt": "a", "completion": "b", "label": 0}, "completion", "label: 0"),
        ({"messages": [], "label": "False"}, "chat", "label: false"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"}, "preference", "system"),
    ],
)
def test_fields_of_other_programs_that_would_be_lost_are_refused(
    fields: dict[str, Any], format: Any, given: str
) -> None:
    assert refused(read_fields, record(**fields), format).given.startswith(given)
    empty = {name: value for name, value in fields.items() if name not in ("history", "label")}
    read_fields(record(**empty | {"system": "", "history": []}), format)
    read_fields(record(text="x", system="s", history=["y"], label=False), "text")


SAYS_ALL = CHATML.replace(
    "message['content'] + '<|im_end|>",
    "(message.reasoning_content or '') + (message.content or '') + (message.tool_calls or '')"
    " | string + '<|im_end|>",
)


def turns_of(messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages of a record as a chat template is given them."""
    own = record(messages=messages, **fields)
    ((read, _),) = read_whole([own], byte_tokenizer(), Reading("chat"), Notes())
    return messages_of(read, "messages")


THOUGHT = {"role": "assistant", "content": "<think>look it up</think>"}
SAID = {"role": "assistant", "content": "done"}
ADD = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "call",
    [
        {"role": "tool_call", "content": json.dumps(ADD)},
        {"from": "function_call", "value": ADD},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "function_call": ADD},
    ],
)
def test_a_call_joins_the_answer_before_it(call: dict[str, Any]) -> None:
    found = turns_of([USER, THOUGHT, call, {"role": "tool", "content": "2"}, SAID])
    assert found[1:] == [
        {**THOUGHT, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, SAID,
    ]  # fmt: skip
    several = turns_of([USER, THOUGHT, call, call, SAID])
    assert [turn["role"] for turn in several] == ["user", "assistant", "assistant"]
    assert several[1]["tool_calls"] == [CALL, CALL]
    text = {"role": "assistant", "content": "and", "tool_calls": [CALL]}
    assert turns_of([USER, THOUGHT, text])[1:] == [THOUGHT, text]
    assert "message 3" in refused(turns_of, [USER, {**THOUGHT, "weight": 0}, call]).given
    marked = turns_of([USER, {**THOUGHT, "loss": False}, {**call, "loss": False}])
    assert marked[1] == {**THOUGHT, "loss": False, "tool_calls": [CALL]}


def test_calls_as_openai_had_them_are_calls() -> None:
    say = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}}
    result = {"role": "function", "name": "add", "content": "2"}
    found = turns_of([USER, say, result, SAID], functions=[{"name": "add", "parameters": {}}])
    empty = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert found[1] == {"role": "assistant", "content": "", "tool_calls": [empty]}
    assert found[2] == {**result, "role": "tool"}
    assert turns_of([USER, {**SAID, "function_call": None}])[1] == SAID


def test_parts_of_other_programs_are_read() -> None:
    parts = [
        {"type": "thinking", "thinking": "h", "signature": "x"}, {"type": "text", "text": "so "},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
    ]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}]}
    asked = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    found = turns_of([USER, {"role": "assistant", "content": parts}, asked])
    assert found[1:] == [
        {
            "role": "assistant", "content": "so ", "reasoning_content": "h",
            "tool_calls": [{**CALL, "id": "1"}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    assert turns_of([{"role": "user", "content": [result]}, SAID])[0]["role"] == "tool"
    values = [
        {"type": "reasoning", "value": "h"}, {"type": "text", "value": "so "},
        {"type": "tool_call", "value": json.dumps(ADD)},
    ]  # fmt: skip
    (other,) = turns_of([{"role": "assistant", "content": values}])
    assert other == {**found[1], "tool_calls": [CALL]}
    odd = [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]
    assert "redacted_thinking" in refused(turns_of, odd).given


def test_roles_of_others_in_any_case() -> None:
    given = ("SYSTEM", "Human", "ai", "USER", "ASSISTANT")
    found = turns_of([{"role": role, "content": "x"} for role in given])
    roles = [turn["role"] for turn in found]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_results_lose_the_tags_that_the_template_writes() -> None:
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>2</tool_response>"
    own = record(messages=[USER, SAID, {"role": "tool", "content": results}])
    writes = CHATML.replace("message['content']", "'<tool_response>' + message['content']")
    ((text, _),) = sequences_of(own, "chat", byte_tokenizer(writes))
    assert text.count("<tool_response>1<|im_end|>") == text.count("<tool_response>2<|im_end|>") == 1
    ((text, _),) = sequences_of(own, "chat")
    assert text.count("<tool_response>") == 2
