"""Which characters of a conversation are learnt."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHATML, CHATML_WITH_TAGS, byte_tokenizer

from furlong.data.chat import ChatTemplate, Turns
from furlong.data.tokenize import Rendered
from furlong.errors import ConfigError, DataError

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi! How can I help?"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
]
ANSWERS = ["Hi! How can I help?<|im_end|>\n", "4.<|im_end|>\n"]
# An answer keeps its thoughts only while it is the last one, as reasoning models have it.
FORGETFUL = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '(thinking)' }}{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FIRST_WORDS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>(think)' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def rendered(messages: Any, template: str | None, tools: Any = None) -> Rendered:
    turns = Turns("a.jsonl:3", messages, tools)
    return ChatTemplate(byte_tokenizer(template)).render(turns)


def learnt(messages: Any, template: str | None, tools: Any = None) -> tuple[str, list[str]]:
    found = rendered(messages, template, tools)
    assert found.by_template and found.ranges is not None
    return found.text, [found.text[start:stop] for start, stop in found.ranges]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
def test_what_the_assistant_says_is_learnt(template: str) -> None:
    text, answers = learnt([SYSTEM, *TURNS], template)
    assert answers == ANSWERS
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    assert learnt(TURNS[:2], template)[1] == ANSWERS[:1]
    assert learnt(TURNS[:1], template)[1] == []
    assert learnt(TURNS[1:], template)[1] == ANSWERS
    twice = [TURNS[0], TURNS[1], TURNS[3]]
    assert learnt(twice, template)[1] == ANSWERS


@pytest.mark.parametrize(
    "family",
    ["llama3", "gemma", "gemma3", "cohere", "cohere2", "qwen2_5_vl", "qwen3_instruct_2507",
     "qwen3_vl", "lfm2", "lfm2_v2"],
)  # fmt: skip
def test_prefixes_and_tags_agree_for_templates_of_real_models(family: str) -> None:
    """TRL ships the templates of these models as they are and with generation tags."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    plain = (folder / f"{family}.jinja").read_text(encoding="utf-8")
    tagged = (folder / f"{family}_training.jinja").read_text(encoding="utf-8")
    conversations = [TURNS, TURNS[:2], TURNS[:3]]
    if "System role not supported" not in plain:
        conversations.append([SYSTEM, *TURNS])
    for messages in conversations:
        text, answers = learnt(messages, plain)
        assert (text, answers) == learnt(messages, tagged)
        said = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        assert all(part in answer for part, answer in zip(said, answers, strict=True))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETFUL, "message 2 is another text once messages follow it: '(thinking)Hi"),
        (FIRST_WORDS, "the prompt for message 2 is not what precedes the answer: '(think)' became"),
        ("{% generation %}{% endgeneration %}x", "its {% generation %} tags enclose no answer"),
    ],
)
def test_a_template_that_cannot_be_masked_is_told(template: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        learnt(TURNS, template)
    assert reason in caught.value.given
    assert "a.jsonl:3 and the chat template of" in caught.value.source
    assert "{% generation %}" in caught.value.change


def test_a_conversation_that_ends_with_its_first_answer_can_be_masked() -> None:
    assert learnt(TURNS[:2], FORGETFUL)[1] == ["(thinking)Hi! How can I help?"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (ALTERNATING, [SYSTEM, *TURNS], "up to message 5: roles must alternate"),
        ("{{ messages[0].name.first }}", TURNS, "up to message 4"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TURNS, "RecursionError: "),
        (CHATML, [*TURNS, {"role": "bot", "content": "x"}], "message 5 of role 'bot'"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_told(
    template: str, messages: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        learnt(messages, template)
    assert reason in caught.value.given
    assert caught.value.source == "a.jsonl:3"


@pytest.mark.parametrize("template", ["\n{% for m in messages %}", "\n{{ messages | nope }}"])
def test_a_template_that_is_not_jinja_is_told_with_its_line(template: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2(?s:.*)data\.chat_template"):
        learnt(TURNS, template)


def test_tools_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHATML
    assert learnt(TURNS, template, tools=[tool])[0].startswith("add<|im_start|>user")
    assert learnt([{"role": "ipython", "content": "x"}], "{{ '' if 'ipython' }}x")[1] == []


def test_a_tokenizer_without_a_template_is_told() -> None:
    with pytest.raises(ConfigError, match="without a default chat template"):
        learnt(TURNS, None)


PARTS_ALONE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.mark.parametrize(
    "template", [CHATML, CHATML_WITH_TAGS, PARTS_ALONE], ids=["prefixes", "tags", "parts alone"]
)
def test_a_template_that_writes_parts_alone_gets_them(template: str) -> None:
    text, answers = learnt(TURNS, template)
    assert "Hello there" in text and "type" not in text
    assert [answer[:2] for answer in answers] == ["Hi", "4."]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}, {"loss_mask": 0},
     {"trainable": False}],
)  # fmt: skip
def test_an_answer_that_is_marked_is_not_learnt(template: str, mark: dict[str, Any]) -> None:
    marked = [TURNS[0], TURNS[1] | mark, TURNS[2], TURNS[3] | {"weight": 1}]
    text, answers = learnt(marked, template)
    assert text == learnt(TURNS, template)[0]
    assert answers == ANSWERS[1:]
    assert learnt([*TURNS[:3], TURNS[3] | mark], template)[1] == ANSWERS[:1]


CALL = {"function": {"name": "add", "arguments": {}}}
ANSWER_ALONE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content or '' }}{{ m.reasoning }}</>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_what_the_template_does_not_write_is_told() -> None:
    turns = [
        {"role": "system", "content": "2 + 2"},
        {"role": "developer", "content": "unseen"},
        {"role": "user", "content": "2 + 2?", "name": "x"},
        {"role": "assistant", "tool_calls": [CALL], "weight": 0},
        {"role": "assistant", "content": "4", "reasoning": "hm", "audio": {}, "mask": 0},
    ]
    template = ANSWER_ALONE.replace("{{ m.content or '' }}", USER_AND_ANSWER)
    notes = rendered(turns, template, [CALL]).notes
    unwritten = (
        "tool_calls of role assistant", "content of role developer", "tools", "mask in a message",
    )  # fmt: skip
    told = "conversations with {} that the template does not write"
    assert {*notes[:-1]} == {*map(told.format, unwritten)}
    assert "without a special token" in notes[-1]
    writing = "{{ tools }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    whole = Turns("a.jsonl:3", turns, [CALL], is_trained_whole=True)
    assert ChatTemplate(byte_tokenizer(writing)).render(whole).notes == ()


def calls(*cities: str, **keys: Any) -> dict[str, Any]:
    made = [{"function": {"name": "look", "arguments": {"at": city}}} for city in cities]
    return {"role": "assistant", "content": "", "tool_calls": made, **keys}


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = (
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FIRST_CALL = (
    HEAD + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}" + TAIL
)
CALLS_BESIDE_NULL = (
    HEAD + "{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}" + TAIL
)
NO_TOOLS = "x" + HEAD + "{% if m.role != 'tool' %}{{ m.content }}{% endif %}" + TAIL
RESULT = {"role": "tool", "content": '{"t": "1\n"}'}


@pytest.mark.parametrize(
    ("template", "turns", "lost"),
    [
        (FIRST_CALL, [TURNS[0], calls("Paris", "Rome"), RESULT, TURNS[3]], "message 2"),
        (FIRST_CALL, [TURNS[0], calls("Paris", "Paris"), RESULT, TURNS[3]], "message 2"),
        (FIRST_CALL, [TURNS[0], calls("Rome", content="Aha"), RESULT, TURNS[3]], "message 2"),
        (NO_TOOLS, [TURNS[0], calls("Rome", weight=0), RESULT, TURNS[3]], "message 3"),
        (CHATML, [TURNS[0], TURNS[1] | {"thinking": "hm"}], "thinking of message 2"),
        (NO_TOOLS, [*TURNS[:2], calls("Rome")], "tool_calls of message 3"),
    ],
)
def test_a_loss_in_what_is_learnt_is_refused(template: str, turns: Any, lost: str) -> None:
    for is_whole in (False, True):
        with pytest.raises(DataError) as caught:
            ChatTemplate(byte_tokenizer(template)).render(
                Turns("a.jsonl:3", turns, is_trained_whole=is_whole)
            )
        assert lost in caught.value.given and "a.jsonl:3" in caught.value.source


def test_calls_are_given_as_the_template_takes_them() -> None:
    turns = [TURNS[0], calls("Paris", "Rome"), RESULT, TURNS[3]]
    said = 'look{"at": "Paris"}look{"at": "Rome"}<|im_end|>\n'
    assert learnt(turns, CALLS_BESIDE_NULL)[1] == [said, ANSWERS[1]]
    # one record decides nothing about the next
    template = ChatTemplate(byte_tokenizer(FIRST_CALL))
    one = Turns("a.jsonl:4", [TURNS[0], calls("Paris"), RESULT, TURNS[3]])
    first = template.render(one)
    with pytest.raises(DataError):
        template.render(replace(one, turns=turns))
    assert template.render(one) == first


def test_values_are_known_in_the_forms_of_templates() -> None:
    """As JSON, with and without escapes, JSON in a JSON text, one by one, and in other letters."""
    arguments = {"at": 'é "x"\n', "many": [1, True, {"deep": 1.5}], "none": None}
    call = {"function": {"name": "look", "arguments": arguments}}
    turns = [TURNS[0], calls() | {"tool_calls": [call]}, RESULT | {"content": '{"é": "\\n"}'}]
    each = "{% for c in m.tool_calls %}{{ c.function.name }}"
    for written in (
        "{{ m.tool_calls | tojson }}", "{{ m.tool_calls }}",
        "{{ (m.tool_calls | tojson) | tojson }}",
        each + "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
        "{% endfor %}",
    ):  # fmt: skip
        for result in ("m.content | tojson", "m.content"):
            template = (
                HEAD + "{% if m.tool_calls %}" + written + "{% elif m.role == 'tool' %}{{ "
                f"{result} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}" + TAIL
            )
            assert rendered(turns, template).notes == ()
    told = rendered(TURNS, HEAD + "{{ m.content | upper }}" + TAIL).notes
    assert len(told) == 2 and all("another form" in one for one in told)


USER_AND_ANSWER = "{% if m.role != 'developer' %}{{ m.content or '' }}{% endif %}"


IN_TAGS = "{%- generation -%}\n {{ m.content }}<|im_end|>\n {%- endgeneration %}\n"
WITHIN = "{% for m in messages %}{% if m.role == 'user' %}Q{{ m.content }}{% else %}"
BEHIND = "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(m) %}A" + IN_TAGS + "{% endmacro %}" + WITHIN + "{{ say(m) }}" + BEHIND,
        WITHIN + "{% set said %}" + IN_TAGS + "{% endset %}A{{ said }}" + BEHIND,
        WITHIN + "{% filter trim %}A" + IN_TAGS + "{% endfilter %}" + BEHIND,
    ],
    ids=["macro", "set", "filter"],
)
def test_tags_are_found_where_the_template_writes_them(template: str) -> None:
    text, answers = learnt(TURNS, template)
    assert text == "QHello thereAHi! How can I help?<|im_end|>Q2 + 2?A4.<|im_end|>"
    assert answers == ["Hi! How can I help?<|im_end|>", "4.<|im_end|>"]
    with pytest.raises(DataError, match="works on the text between its"):
        learnt(TURNS, "{% filter upper %}" + template + "{% endfilter %}")


FROM_OPENAI = (
    "{% for m in messages %}{{ m.role }}{% if m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.function.name + '!' + call.function.arguments }}{% endfor %}{% else %}"
    "{{ ':' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def test_a_template_may_count_on_calls_as_openai_has_them() -> None:
    turns = [TURNS[0], {"role": "assistant", "tool_calls": [CALL]}, TURNS[2], TURNS[3]]
    assert learnt(turns, FROM_OPENAI)[1] == ["add!{}", ":4."]
