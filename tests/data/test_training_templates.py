"""furlong's own templates beside those of the models, character by character.

The models' own are those that TRL ships, exactly as the models have them; Mistral's, which it has
not, is stated here.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_tokenizers import byte_tokenizer

from furlong.config.schema import DataConfig
from furlong.data.chat import ChatTemplate, Turns, _Template
from furlong.data.formats import Reading, encode
from furlong.data.records import Notes, SourceRecord
from furlong.data.tokenize import IGNORE_INDEX, Rendered, load_tokenizer, tokenizer_checksum
from furlong.data.training_templates import (
    TOOL,
    fitting_templates,
    template_text,
    training_templates,
)
from furlong.errors import ConfigError, DataError

MODELS = {
    "gemma": "gemma", "gemma3": "gemma3", "gpt-oss": "gptoss", "llama3": "llama3",
    "llama3.1": "llama3_1", "qwen2.5": "qwen2_5", "qwen3": "qwen3", "qwen3.5": "qwen3_5_think",
}  # fmt: skip
THOUGHTFUL = ("gpt-oss", "qwen3", "qwen3.5")

SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "2 + 2? <b>é</b>\n"}
ANSWER = {"role": "assistant", "content": "Four.\n\n"}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "\nTwo and two."}
FUNCTION = {"name": "add", "arguments": {"a": 1, "b": "x\n", "c": True, "d": [1, {"e": None}]}}
CALL = {
    "role": "assistant", "content": "", "reasoning_content": "A tool may help.",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}],
}  # fmt: skip
BARE_CALL = {key: value for key, value in CALL.items() if key != "reasoning_content"}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "abcdefghi"}
LAST = {"role": "assistant", "content": "It is 4."}
CONVERSATIONS = {
    "one": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "thought": [USER, THOUGHT],
    "in the text": [USER, {**ANSWER, "content": "<think>\nhm\n</think>\n\nFour."}],
    "several": [SYSTEM, USER, THOUGHT, USER, ANSWER, USER, THOUGHT],
    "call": [USER, CALL],
    "call and words": [USER, BARE_CALL | {"content": "I add."}, RESULT, LAST],
    "calls": [USER, BARE_CALL, RESULT, BARE_CALL, RESULT, LAST, USER, THOUGHT],
    "two results": [
        USER,
        {**BARE_CALL, "tool_calls": BARE_CALL["tool_calls"] * 2},
        RESULT,
        RESULT,
        LAST,
    ],
}
NESTED = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds \"it\".",
        "parameters": {
            "type": "object",
            "required": ["what"],
            "properties": {
                "what": {"type": "string", "enum": ["a", "b"], "description": "which",
                         "default": "a"},
                "where": {"type": ["string", "null"]},
                "how": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                "many": {"type": "array", "items": {"type": "object", "properties": {
                    "x": {"type": "number", "default": 1}, "y": {"type": "boolean"}}}},
                "any": {"type": "array"},
                "one": {"oneOf": [{"type": "string", "description": "s"},
                                  {"type": "integer", "default": 3}], "default": "z"},
                "deep": {"type": "object", "required": ["u"], "properties": {
                    "u": {"type": "string", "nullable": True}, "v": {"type": "object"}}},
                "odd": {"description": "no type", "default": [1]},
            },
        },
    },
}  # fmt: skip
BARE = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = {"no tool": None, "tools": [NESTED, TOOL, BARE]}


def unthinking(turn: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key != "reasoning_content"}


def own_template(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "chat_templates" / f"{MODELS[name]}.jinja"
    return file.read_text(encoding="utf-8")


def rendered(template: str, turns: list[Any], tools: Any, first: int = 0) -> Rendered:
    return ChatTemplate(byte_tokenizer(template)).render(Turns("x", turns, tools, first))


def learnt(found: Rendered) -> list[str]:
    assert found.ranges is not None
    return [found.text[start:stop] for start, stop in found.ranges]


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_as_the_models_own_template_writes_it_last(name: str, tools: str) -> None:
    """Texts are the same but for the thoughts of earlier answers, which the models' own leave out;
    what is learnt of each answer is what the own template writes where it ends with it."""
    own, ours = own_template(name), training_templates()[name]
    compared = 0
    conversations = [*CONVERSATIONS.values()]
    if name not in THOUGHTFUL:
        conversations += [list(map(unthinking, turns)) for turns in conversations]
    for conversation in conversations:
        answers = [n for n, turn in enumerate(conversation) if turn["role"] == "assistant"]
        try:
            for number in answers:
                rendered(own, conversation[: number + 1], TOOLS[tools], number)
            last = rendered(own, conversation, TOOLS[tools], len(conversation) - 1)
        except DataError:  # the model's own refuses it or loses an answer, and so does this one
            with pytest.raises(DataError):
                rendered(ours, conversation, TOOLS[tools])
            continue
        found = rendered(ours, conversation, TOOLS[tools])
        if name not in THOUGHTFUL or len(answers) == 1:
            assert found.text == last.text
        assert len(learnt(found)) == len(answers)
        assert learnt(found)[-1:] == learnt(last)
        for number, said in zip(answers, learnt(found), strict=True):
            upto = rendered(own, conversation[: number + 1], TOOLS[tools], number)
            (as_last,) = learnt(upto)
            # in a conversation gpt-oss reads another mark than the one by which it ends
            assert said == as_last or said + "<|return|>" == as_last
        compared += len(answers)
    assert compared > 3


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_the_models_own(name: str) -> None:
    for turns in ([USER], [SYSTEM, USER], [USER, ANSWER, USER]):
        texts = []
        for template in (own_template(name), training_templates()[name]):
            texts.append("refused")
            try:
                of = ChatTemplate(byte_tokenizer(template))
                texts[-1] = of._of(template).write(Turns("x", turns), prompt=True)
            except DataError:
                continue
        assert texts[0] == texts[1] or (name in THOUGHTFUL and len(turns) == 3)


def mistral(turns: list[dict[str, Any]], tools: Any) -> tuple[str, list[str]]:
    """A conversation of Mistral 7B Instruct v0.3, and its answers: what stands before the user's
    last message stands there too where the model reads it as a prompt."""
    text, answers = "<begin>", []
    last = max((n for n, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    system = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
    for number, turn in enumerate(turns):
        if turn["role"] == "user":
            known = f"[AVAILABLE_TOOLS] {json.dumps(tools)}[/AVAILABLE_TOOLS]" if tools else ""
            text += (known if number == last else "") + "[INST] "
            text += (system if number == last else "") + turn["content"] + "[/INST]"
        elif turn["role"] == "assistant":
            said = " " + turn["content"].strip()
            if calls := turn.get("tool_calls"):
                named = [{**call["function"], "id": call["id"]} for call in calls]
                said = f"[TOOL_CALLS] {json.dumps(named)}"
            answers.append(f"{said}<end>")
            text += answers[-1]
        elif turn["role"] == "tool":
            result = f'"content": {turn["content"]}, "call_id": "{turn["tool_call_id"]}"'
            text += f"[TOOL_RESULTS] {{{result}}}[/TOOL_RESULTS]"
    return text, answers


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_mistral_is_as_it_is_stated(conversation: str) -> None:
    turns = list(map(unthinking, CONVERSATIONS[conversation]))
    if conversation == "call and words":  # it writes no words beside a call
        with pytest.raises(DataError, match="content of message 2"):
            rendered(training_templates()["mistral"], turns, None)
        turns[1]["content"] = ""
    for tools in (None, [TOOL]):
        found = rendered(training_templates()["mistral"], turns, tools)
        assert (found.text, learnt(found)) == mistral(turns, tools)


def encoded(template: str, turns: list[Any], **reading: Any) -> tuple[str, list[str], list[str]]:
    """The text of a conversation, what is learnt of it in runs of tokens, and what is told."""
    tokenizer, notes = byte_tokenizer(template), Notes()
    record = SourceRecord({"messages": turns}, 0, 1, "x")
    ((_, (one,)),) = encode([record], tokenizer, Reading("chat", **reading), notes)
    marked = "".join(
        chr(0) if label == IGNORE_INDEX else tokenizer.decode([id])
        for id, label in zip(one.input_ids, one.labels, strict=True)
    )
    return (
        tokenizer.decode(one.input_ids),
        [part for part in marked.split(chr(0)) if part],
        [*notes],
    )


def test_a_template_that_forgets_thoughts_is_replaced() -> None:
    """Of a model that is known, and only where its own cannot be masked."""
    turns = [USER, THOUGHT, USER, ANSWER]
    text, answers, (told,) = encoded(own_template("qwen3"), turns)
    assert (text, answers) == encoded(training_templates()["qwen3"], turns)[:2]
    assert "Two and two." in text and "furlong's training template qwen3" in told
    said = ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>\n", "Four.\n\n<|im_end|>\n"]
    assert answers == said
    own, answers, told_of_last = encoded(own_template("qwen3"), turns, train_on="last")
    assert answers == said[1:] and "reasoning_content of role assistant" in told_of_last[0]
    assert "Two and two." not in own
    with pytest.raises(DataError, match="cannot be masked"):
        encoded(own_template("qwen3").replace("</think>\\n\\n", "</think>\\n"), turns)


@pytest.mark.parametrize("name", ["llama3.1", "qwen3.5"])
def test_a_conversation_may_begin_with_an_answer(name: str) -> None:
    """Although the model's own template writes no prompt without messages."""
    turns = [ANSWER, USER, ANSWER]
    assert encoded(own_template(name), turns)[:2] == encoded(training_templates()[name], turns)[:2]


def test_a_known_template_is_not_rendered_for_every_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, plain = list[int](), _Template.write
    counted = lambda *args, **options: (count.append(1), plain(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(_Template, "write", counted)
    turns = Turns("x", [USER, LAST] * 30)
    template = ChatTemplate(byte_tokenizer(own_template("llama3")))
    found = template.render(turns)
    count.clear()
    assert template.render(turns) == found and len(count) < 5
    count.clear()
    text = "x" + own_template("llama3")
    unknown = ChatTemplate(byte_tokenizer(text)).render(turns)
    assert len(count) < 80  # most of them once for a template
    shifted = tuple((start + 1, stop + 1) for start, stop in found.ranges or ())
    assert (unknown.text, unknown.ranges) == ("x" + found.text, shifted)


@pytest.mark.parametrize(("name", "is_refused"), [("glm4moe", False), ("gemma4", True)])
def test_a_long_conversation_with_thoughts_is_rendered_a_few_times(
    name: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In long parts as often if it is twice as long; each answer is as it is rendered last."""
    turns, sizes, plain = list[Any](), list[int](), _Template.write
    for n in range(30):
        thought = {"reasoning_content": f"\n hm{n}"} if n % 5 else {}
        turns += [USER | {"content": f"q{n}"}, LAST | {"content": f" a{n}\n"} | thought]
    of = ChatTemplate(byte_tokenizer(of_trl(name)))

    def counted(self: _Template, own: Turns, number: int | None = None, **options: Any) -> str:
        sizes.append(len(own.turns[:number]))
        return plain(self, own, number, **options)

    monkeypatch.setattr(_Template, "write", counted)
    counts = []
    for num_turns in (30, 30, 60):  # the first one also renders what is kept for the template
        sizes.clear()
        with pytest.raises(DataError) if is_refused else nullcontext():
            found = of.render(Turns("x", turns[:num_turns]))
        counts.append(sum(size > 8 for size in sizes))
    assert counts[1] == counts[2]
    if not is_refused:
        has_thought = [f"hm{n}" in said for n, said in enumerate(learnt(found))]
        assert has_thought == [n % 5 > 0 for n in range(30)]
        whole = lambda own, n: replace(own, turns=own.turns[: n + 1], first=n)  # noqa: E731
        monkeypatch.setattr("furlong.data.chat._as_last", whole)
        assert of.render(Turns("x", turns)) == found


def test_empty_thoughts_are_learnt_only_where_the_record_has_them() -> None:
    _, (said,), _ = encoded(own_template("qwen3"), [USER, ANSWER])
    assert said == "Four.\n\n<|im_end|>\n"
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert encoded(own_template("qwen3"), [USER, ANSWER], **kwargs)[1] == [said]
    for given, learnt_too in ((None, ""), (True, "\n</think>\n\n")):
        # the model closes thoughts that the prompt opens, unless another prompt does
        kwargs = {"chat_template_kwargs": {"enable_thinking": given} if given else {}}
        closed = encoded(own_template("qwen3.5"), [USER, LAST], **kwargs)[1]
        assert closed == [f"{learnt_too}{LAST['content']}<|im_end|>\n"]
    empty = {**ANSWER, "content": f"<think>\n\n</think>\n\n{ANSWER['content']}"}
    _, (said,), _ = encoded(own_template("qwen3"), [USER, empty])
    assert said == "<think>\n\n</think>\n\nFour.\n\n<|im_end|>\n"


def of_trl(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"llama3.1"}))
def test_some_of_trls_templates_train_on_tokens_of_the_prompt(name: str) -> None:
    """As the table in docs/data-chat.md has it; the others mark what furlong's mark."""
    turns, alike = [USER, ANSWER, USER, THOUGHT], {"gemma", "gemma3", "llama3", "qwen3"}
    turns = turns if name in THOUGHTFUL else list(map(unthinking, turns))
    both = training_templates()[name], of_trl(f"{MODELS[name]}_training")
    ours, theirs = (learnt(rendered(template, turns, None)) for template in both)
    assert (ours == theirs) == (name in alike)
    assert all(our in their for our, their in zip(ours, theirs, strict=True))


TALK = [USER, {**ANSWER, "content": "yo"}, USER, {**ANSWER, "content": "sure"}]
THINKING = [turn if turn["role"] == "user" else turn | {"reasoning_content": "hm"} for turn in TALK]


@pytest.mark.parametrize(
    ("name", "turns", "said"),
    [
        ("nemotron_3_nano", TALK, ["yo<|im_end|>\n", "sure<|im_end|>\n"]),
        ("phi3", TALK, ["yo<|end|>\n", "sure<|end|>\n<end>"]),
        ("phi3_5", TALK * 6, ["yo<|end|>\n", "sure<|end|>\n"] * 5 + ["yo<|end|>\n",
         "sure<|end|>\n<end>"]),
        ("glm4moe", TALK * 6, ["\nyo", "\nsure"] * 6),
        ("qwen3_8", THINKING[:2], ["hm\n</think>\n\nyo<|im_end|>\n"]),
    ],
)  # fmt: skip
def test_templates_of_other_models_are_masked(name: str, turns: Any, said: list[str]) -> None:
    """Prompts without thoughts, tails of every text, and many turns, as the prefixes have them."""
    assert learnt(rendered(of_trl(name), turns, None)) == said


STOPS = ("<|user|>", "<|observation|>")
FAMILIES = {
    # what the model writes before an answer without and with the thought "hm", and its stop
    "deepseekv3": ("\n</think>\n\n", "hm\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "deepseek_r1_distill": ("\n</think>\n\n", "hm\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "nemotron_3_nano": ("", "hm\n</think>\n", "<|im_end|>\n"),
    "nemotron_3_super": ("", "hm\n</think>\n", "<|im_end|>\n"),
    "nemotron_3_ultra": ("", "hm</think>", "<|im_end|>\n"),
    "nemotron_3_5_lightning": ("", "hm</think>", "<|im_end|>\n"),
    "qwen3_6": ("", "hm\n</think>\n\n", "<|im_end|>\n"),
    "glm4moe": ("\n", "\n<think>hm</think>\n", "<|user|>"),
    "gemma4_v5": ("", "<|channel>thought\nhm\n<channel|>", "<turn|>\n"),
}


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("turns", [TALK[:2], THINKING[:2], TALK, THINKING, THINKING[:2] + TALK[2:],
                                   TALK[:2] + THINKING[2:]])  # fmt: skip
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_thinking_model_would_generate_is_learnt(
    name: str, turns: Any, train_on: Any
) -> None:
    """Behind the prompt that the model's own template writes, with and without thoughts."""
    plain, thought, stop = FAMILIES[name]
    eot = STOPS if name == "glm4moe" else ()
    text, said, _ = encoded(of_trl(name), turns, train_on=train_on, eot_tokens=eot)
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    wanted = [
        f"{thought if 'reasoning_content' in turn else plain}{turn['content']}{stop}"
        for turn in answers
    ]
    assert said == (wanted[-1:] if train_on == "last" else wanted)
    assert text.endswith(wanted[-1])
    template = ChatTemplate(byte_tokenizer(of_trl(name)))._of(of_trl(name))
    # before the last answer thoughts are the template's matter, but in DeepSeek's they stay
    number = -1 if train_on == "last" and "deepseek" not in name else 1
    silent = {} if "reasoning_content" in turns[number] else {"enable_thinking": False}
    prompt = template.write(Turns("x", turns[:number], kwargs=silent), prompt=True)
    assert text.startswith(prompt.replace("/nothink", ""))


@pytest.mark.parametrize(
    ("name", "turns", "switch"),
    [
        ("nemotron_3_nano", THINKING, {"truncate_history_thinking": False}),
        ("qwen3_6", TALK, {"preserve_thinking": True}),
        ("lfm2_2_5", THINKING, {"preserve_thinking": True}),
    ],
)
def test_a_switch_that_keeps_thoughts_is_set(
    name: str, turns: Any, switch: dict[str, bool]
) -> None:
    """Unless the run sets it: then the other value is offered, or a template by name taken."""
    *found, (told,) = encoded(of_trl(name), turns)
    assert found == [*encoded(of_trl(name), turns, chat_template_kwargs=switch)[:2]]
    ((key, value),) = switch.items()
    assert f"{{{key}: {json.dumps(value)}}}" in told
    given = {"chat_template_kwargs": {key: not value}}
    if name == "qwen3_6":
        *same, (told,) = encoded(of_trl(name), turns, **given)
        assert same == found and "qwen3.5" in told
        return
    with pytest.raises(DataError) as caught:
        encoded(of_trl(name), turns, **given)
    assert f"chat_template_kwargs: {{{key}: {json.dumps(value)}}}" in caught.value.change


@pytest.mark.parametrize(
    ("name", "turns", "given", "change"),
    [
        ("nemotron_3_nano", TALK[:2], {"chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs: {enable_thinking: false}"),
        ("glm4moe", THINKING, {"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs: {enable_thinking: true}"),
        ("phi3", THINKING[:2] + TALK[2:], {}, "train_on: last"),
        ("deepseek_r1_distill", [USER, BARE_CALL, RESULT, LAST], {}, "chat_template: deepseek-r1"),
    ],
)  # fmt: skip
def test_the_change_that_is_offered_was_tried(
    name: str, turns: Any, given: dict[str, Any], change: str
) -> None:
    with pytest.raises(DataError) as caught:
        encoded(of_trl(name), turns, **given)
    assert f"set data.{change};" in caught.value.change
    key, value = change.split(": ", 1)
    known = training_templates()
    if key == "chat_template":
        assert encoded(known[value], turns)[1]
    else:
        assert encoded(of_trl(name), turns, **{key: yaml.safe_load(value)})[1]


def test_thoughts_that_a_prompt_opens_are_not_learnt_to_be_opened() -> None:
    """Gemma 4 writes so after the result of a tool, if thinking is enabled."""
    last = {**LAST, "reasoning_content": "hm"}
    turns = [USER, CALL, RESULT, last, USER, last]
    given = {"chat_template_kwargs": {"enable_thinking": True}}
    text, said, _ = encoded(of_trl("gemma4_v5"), turns, **given)
    assert [one.count("<|channel>thought\n") for one in said] == [1, 0, 1]
    assert said[1] == "hm\n<channel|>It is 4.<turn|>\n" and text.count("<|think|>") == 1
    assert said[0].startswith("<|channel>thought\nA tool may help.\n<channel|><|tool_call>")
    assert f"<tool_response|><|channel>thought\n{said[1]}<|turn>user" in text
    for mixed in ([USER, CALL, RESULT, LAST, USER, last], [USER, BARE_CALL, RESULT, LAST]):
        with pytest.raises(DataError) as caught:
            encoded(of_trl("gemma4_v5"), mixed, **given)
        assert "set data.chat_template_kwargs: {enable_thinking: false};" in caught.value.change
        given_up = {"chat_template_kwargs": {"enable_thinking": False}}
        assert encoded(of_trl("gemma4_v5"), mixed, **given_up)[1]


def test_a_model_that_knows_no_thoughts_is_taught_none() -> None:
    """Although Qwen's templates write the same prompt and answers as plain ChatML."""
    with pytest.raises(DataError, match="reasoning_content of message 2"):
        encoded(training_templates()["chatml"], THINKING)


FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}"
    "{% else %}A{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}{{ m.content }}."
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def test_answers_with_thoughts_are_put_together_only_if_nothing_else_changes() -> None:
    turns = [turn | ({"thinking": f"hm{n}"} if n % 2 else {}) for n, turn in enumerate(TALK)]
    text, said, (told, *_) = encoded(FORGETFUL, turns)
    assert said == ["(hm1)yo.", "(hm3)sure."] and "the last one" in told
    asked = USER["content"]
    assert text == f"U{asked}A(hm1)yo.U{asked}A(hm3)sure."
    assert encoded(FORGETFUL, turns, train_on="all")[0] == text
    marked = [*turns[:3], {**turns[3], "weight": 0}]  # an answer that is not learnt stays
    assert encoded(FORGETFUL, marked)[:2] == (f"U{asked}A(hm1)yo.U{asked}Asure.", ["(hm1)yo."])
    counting = FORGETFUL.replace("{{ m.thinking }}", "{{ m.thinking }}{{ loop.index }}")
    many = turns * 3  # each is another text where less precedes it
    assert encoded(counting, many)[1] == [
        f"(hm{n % 4}{n + 1}){turn['content']}." for n, turn in enumerate(many) if n % 2
    ]
    loud = FORGETFUL.replace("{{ m.content }}.", "{{ m.content }}{{ '!' if m.thinking else '.' }}")
    quiet = "{% if add_generation_prompt %}{{ '' if messages[-2:-1] else 'A' }}{% endif %}"
    silent = FORGETFUL.replace("{% if add_generation_prompt %}A{% endif %}", quiet)
    for template in (loud, silent):  # another end; another prompt once messages precede it
        with pytest.raises(DataError, match="cannot be masked"):
            encoded(template, turns)


def test_the_template_of_deepseek_r1_writes_what_the_models_own_does() -> None:
    """But for thoughts, and the empty ones that close what the prompt opens. Its own template calls
    tools in one round only."""
    known, own = training_templates()["deepseek-r1"], of_trl("deepseekv3")
    for name, turns in CONVERSATIONS.items():
        if name in ("calls", "in the text"):
            continue
        bare = list(map(unthinking, turns))
        text, said, (told, *_) = encoded(own, bare)
        assert (text, said) == encoded(known, bare)[:2] and "deepseek-r1" in told
        written = ChatTemplate(byte_tokenizer(own))
        plain = written._masked(Turns("x", bare, is_trained_whole=True), written._of(own))[0]
        assert text.replace("<think>\n\n</think>\n\n", "") == plain
        count = sum(turn["role"] == "assistant" for turn in turns)
        assert len(said) == count
    calls = list(map(unthinking, CONVERSATIONS["calls"]))
    with pytest.raises(DataError) as caught:
        encoded(own, calls)
    assert "chat_template: deepseek-r1" in caught.value.change
    text, said, _ = encoded(known, calls)
    assert [one.count("<｜tool▁calls▁begin｜>") for one in said] == [1, 1, 0, 0]


def test_a_stop_that_begins_the_next_message_is_learnt(tmp_path: Path) -> None:
    """If the model's folder names it, or the run: behind each answer, and behind the last one."""
    template, turns = of_trl("glm4moe"), [USER, BARE_CALL, RESULT, LAST, USER, LAST]
    tokenizer = byte_tokenizer(template)
    tokenizer.save_pretrained(tmp_path)
    plain = load_tokenizer(str(tmp_path))
    found = ChatTemplate(plain).render(Turns("x", turns))
    assert plain.stop_tokens == () and not any(said.endswith(STOPS) for said in learnt(found))
    assert any("eot_tokens: [<|user|>]" in note for note in found.notes)
    ids = [-1, tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([*STOPS]), 2**40]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.stop_tokens == ("<end>", *STOPS)
    for by_template in (False, True):
        sums = {tokenizer_checksum(one, by_template=by_template) for one in (plain, loaded)}
        assert len(sums) == 1 + by_template
    loaded.stop_tokens = ("<end>", "<|im_end|>")  # the EOS, and a token that is not in the template
    assert tokenizer_checksum(loaded) == tokenizer_checksum(plain)
    loaded.stop_tokens = ("<end>", *STOPS)
    stopped = ChatTemplate(loaded).render(Turns("x", turns))
    assert [said.endswith(STOPS) for said in learnt(stopped)] == [True] * 3
    assert stopped.text == f"{found.text}<|user|>" and stopped.notes == ()
    by_run = ChatTemplate(plain, STOPS).render(Turns("x", turns))
    assert (by_run.text, by_run.ranges) == (stopped.text, stopped.ranges)
    call = ChatTemplate(loaded).render(Turns("x", turns[:2]))
    assert learnt(call)[-1].endswith("</tool_call><|observation|>")
    unlearnt = ChatTemplate(loaded).render(Turns("x", [*turns[:-1], {**LAST, "weight": 0}]))
    assert unlearnt.text == found.text and len(learnt(unlearnt)) == 2


def test_a_mark_that_is_no_token_is_refused_with_templates_that_fit() -> None:
    """None of which is refused, then; without any that name marks there is one that names none."""
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    for own, fitting in (([], "mistral"), (marks, "llama3"), (marks, "llama3.1")):
        tokenizer = byte_tokenizer(None)
        tokenizer.add_special_tokens({"additional_special_tokens": own})
        for name in (None, "gemma3"):
            tokenizer.chat_template = name and training_templates()[name]
            # the marks of ChatML are in every tokenizer of these tests
            with pytest.raises(ConfigError) as caught:
                ChatTemplate(tokenizer).render(Turns("x", TALK))
            assert ("llama3" in caught.value.change) == bool(own)
        if own:
            tokenizer.chat_template = training_templates()[fitting]
            assert ChatTemplate(tokenizer).render(Turns("x", TALK)).notes == ()
    has = {"<|im_start|>", "<|im_end|>"}.__contains__
    assert set(fitting_templates(has)) == {"chatml", "qwen2.5", "qwen3", "qwen3.5"}
    assert fitting_templates(lambda mark: False) == ["mistral"]


def test_remarks_on_the_end_of_a_conversation_and_on_the_template_are_true() -> None:
    turns = [ANSWER, USER, ANSWER]
    assert "no prompt for an answer" in encoded(own_template("llama3.1"), turns)[2][0]
    assert encoded(own_template("llama3.1"), [USER, BARE_CALL, RESULT, LAST])[2] == []
    (told,) = encoded(own_template("gpt-oss"), [USER, BARE_CALL])[2]
    assert "<|call|>" in told and "generation_config" in told
    _, said, (told,) = encoded(of_trl("glm4moe"), [*TALK, LAST], eot_tokens=STOPS)
    assert [one.endswith(STOPS) for one in said] == [True, False, True]
    assert "not learnt there" in told
    (told,) = encoded(of_trl("glm4moe"), TALK)[2]
    assert "without a special token" in told and "eot_tokens: [<|user|>]" in told
    assert encoded(of_trl("glm4moe"), TALK, eot_tokens=("<|user|>",))[2] == []


def test_the_end_of_a_turn_is_learnt_if_it_is_named() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        " <|im_end|>\n{% endfor %}"
    )
    turns = [USER, LAST, USER, LAST]
    _, answers, (told,) = encoded(template, turns)
    assert (answers, "where to stop is not learnt" in told) == (["It is 4."] * 2, True)
    assert encoded(template, turns, eot_tokens=("<|im_end|>",))[1:] == (
        ["It is 4. <|im_end|>"] * 2,
        [],
    )
    assert encoded(training_templates()["chatml"], turns, eot_tokens=("<|im_end|>",))[2] == []


def settings(**data: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "x", **data})


def test_a_run_names_template_and_tokens(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)

    def load(**data: Any) -> Any:
        return load_tokenizer(str(tmp_path), settings=settings(**data))

    (tmp_path / "own.jinja").write_text("é{{ messages }}")
    found = load(eos_token="<|im_end|>", pad_token="<end>", chat_template="chatml")
    assert (found.eos_token, found.pad_token) == ("<|im_end|>", "<end>")
    assert found.chat_template == training_templates()["chatml"]
    assert load(chat_template=str(tmp_path / "own.jinja")).chat_template == "é{{ messages }}"
    assert load(chat_template="{{ messages }}").chat_template == "{{ messages }}"
    assert load(chat_template="alpaca").chat_template is None
    for data in ({"eos_token": "</s>"}, {"pad_token": "x" * 9}, {"eot_tokens": "<eot>"}):
        with pytest.raises(ConfigError) as caught:
            load(**data)
        assert caught.value.source == f"data.{next(iter(data))}"
    with pytest.raises(ConfigError, match="neither a file nor a known name"):
        template_text("qwen")
