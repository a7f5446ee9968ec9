"""Read the fields of a record, and convert them to furlong's names and forms.

Handles fields that a run renames (`data.fields`), turns with the keys `from` and `value`, other
names of roles, contents that are lists of parts, tool calls in several forms, and JSON in texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from furlong.config.schema import OTHER_FIELDS, TURN_FIELDS
from furlong.data.records import SourceRecord, is_message
from furlong.errors import in_short

Turn = dict[str, Any]

CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")
"""The fields that may hold turns."""

MARKS = (
    "weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale",
)  # fmt: skip
"""Keys of a message with which other trainers choose what is trained on."""

_ALIASES = {"messages": ("conversations", "conversation"), "tools": ("functions",)}
_JSON = ("messages", "tools", "chat_template_kwargs")  # texts of JSON in tables and .csv files
_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "video_url", "file")
_CALL = "a call"
_ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "chatbot"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function_response", "function"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
    **{role: role for role in ("user", "assistant", "system", "tool", "developer")},  # ASSISTANT
}
_TEXTS = ("text", "input_text", "output_text", None)
_NO_COLUMNS = (*TURN_FIELDS, *OTHER_FIELDS)
_RESPONSE = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


def columns(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that a record may use for furlong's fields: known aliases, and the names
    that `data.fields` gives."""
    renamed = (theirs for ours, theirs in fields.items() if ours not in _NO_COLUMNS)
    return frozenset((*renamed, *chain(*_ALIASES.values())))


def renamed(record: SourceRecord, fields: Mapping[str, Any]) -> tuple[SourceRecord, dict[str, str]]:
    """Return the record with its fields renamed to furlong's names, and a dict of the fields that
    were renamed: furlong's name -> name in the data.

    Args:
        record: a record as it was read.
        fields: `data.fields`.
    """
    if not record.line:  # a file of text
        return record, {}
    given, values, unused = record.fields, dict(record.fields), fields.get("unused", ())
    names = {our: their for our, their in fields.items() if our not in _NO_COLUMNS}
    for own in (*names, *names.values(), *unused):
        values.pop(own, None)
    known = given.keys() - unused
    values |= {ours: given[theirs] for ours, theirs in names.items() if theirs in known}
    for own, aliases in _ALIASES.items():
        found = next((name for name in aliases if values.get(name) is not None), None)
        if found is not None and values.get(own) is None and own not in names:
            values[own] = values.pop(found)
            names[own] = found
    return replace(record, fields=values), names


def read_values(
    record: SourceRecord, fields: Mapping[str, Any], used: Collection[str], template: str = ""
) -> SourceRecord:
    """Return the record with its turns in one form (`role`, `content` and other keys of furlong),
    and with texts of JSON parsed.

    Args:
        record: a record with furlong's names of fields.
        fields: `data.fields`.
        used: the fields that the format of the record reads; other fields are not changed.
        template: the text of the chat template; if it writes <tool_response> tags, those in the
            data are removed.

    Raises:
        DataError: a field holds no JSON, a call is in no known form, or there are two system
            messages.
    """
    values = dict(record.fields)
    for name in used:
        own = values.get(name)
        if name in _JSON and isinstance(own, str) and own.strip():
            own = _of_json(record, name, own)
        if name in ("completion", "chosen", "rejected") and isinstance(own, dict):
            own = [own]  # a single turn
        if name == "completion" and isinstance(own, str) and isinstance(values.get("prompt"), list):
            own = [{"role": "assistant", "content": own}]
        if name in CONVERSATIONS and isinstance(own, list):
            marks = values.get("loss_mask") if name == "messages" else None
            if isinstance(marks, list) and own and len(marks) == len(own):
                pairs = zip(own, values.pop("loss_mask"), strict=True)
                own = [{**t, "loss_mask": m} if isinstance(t, dict) else t for t, m in pairs]
            own = _turns(record, name, own, fields)
            if "<tool_response>" in template:
                own = [turn for one in own for turn in _without_tags(one)]
        values |= {name: own} if name in values else {}
    if "system" in used and values.get("instruction") is None:
        _put_system(record, values, used)
    return replace(record, fields=values)


def _put_system(record: SourceRecord, values: dict[str, Any], used: Collection[str]) -> None:
    """Put the text of `system` before the turns of a record, unless they contain it. Raises
    DataError if they have another system message."""
    answers = ("chosen", "rejected") if "chosen" in used else ("messages",)
    heads = [n for n in CONVERSATIONS if isinstance(values.get(n), list) and n in used]
    heads = ["prompt"] if "prompt" in heads else [n for n in heads if n in answers]
    if not heads or values.get("system") is None:
        return
    said = text_of(record, "system")
    for name in heads:
        turns = [turn for turn in values[name] if isinstance(turn, dict)]
        if not said.strip() or any(turn.get("content") == said for turn in turns):
            continue
        if any(turn.get("role") == "system" for turn in turns):
            raise record.refusal(
                f"system beside {name} with another system message",
                "one system message",
                "remove the field system, or the message",
            )
        values[name] = [{"role": "system", "content": said}, *values[name]]
    values["system"] = None


def tools_of(record: SourceRecord) -> list[Any] | None:
    """Return the tools that a conversation may call, each as `{"type": "function", ...}`; None if
    there are none.

    Raises:
        DataError: `tools` is no list of JSON schemas.
    """
    tools = record.fields.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise record.refusal(
            f"tools of type {type(tools).__name__}",
            "a list of tools, each of them a JSON schema, or its JSON as a text",
            "write tools as a list of objects",
        )
    found = []
    for number, tool in enumerate(tools, start=1):
        own = _of_json(record, f"tool {number}", tool) if isinstance(tool, str) else tool
        if not isinstance(own, dict):
            raise record.refusal(
                f"tool {number} of type {type(own).__name__}", "each tool as a JSON schema"
            )
        is_bare = "name" in own and own.keys() <= {"name", "description", "parameters", "strict"}
        found.append({"type": "function", "function": own} if is_bare else own)
    return found


def messages_of(record: SourceRecord, field: str) -> list[Turn]:
    """Return the turns of the conversation in `field`, without keys whose value is null.

    Raises:
        DataError: the field holds no list of messages with a role and a content of text.
    """
    messages = record.fields[field]
    required = f'{field}: [{{"role": "user", "content": "..."}}, ...]'
    if not isinstance(messages, list):
        raise record.refusal(f"{field} of type {type(messages).__name__}", required)
    turns = []
    for number, given in enumerate(messages, start=1):
        message = f"message {number} of {field}"
        if not isinstance(given, dict):
            raise record.refusal(f"{message} of type {type(given).__name__}", required)
        turn = {name: value for name, value in given.items() if value is not None}
        if not isinstance(turn.get("role"), str):
            raise record.refusal(
                f"{message} without a role: it has {', '.join(turn) or 'no field'}",
                required,
                "mend the record, or name the fields of its messages: data.fields: {role: ...,"
                " content: ...}",
            )
        if not turn.get("tool_calls", True):
            del turn["tool_calls"]
        content = turn.get("content", "" if turn.get("tool_calls") else None)
        if isinstance(content, list):
            turn["content"] = "".join(_text_of_part(record, part, message) for part in content)
        elif not isinstance(content, str):
            kind = type(content).__name__
            raise record.refusal(f"{message} whose content is of type {kind}", required)
        _check_marks(record, turn, message)
        turns.append(turn)
    return turns


def answers(turns: list[Turn]) -> bool:
    """Return whether the assistant says something or calls a tool in these turns."""
    return any(
        turn["role"] == "assistant"
        and ((turn.get("content") or "").strip() or turn.get("tool_calls"))
        for turn in turns
    )


def may_be_trained(turn: Mapping[str, Any]) -> bool:
    """Return whether a message may be trained on: none of its loss marks (`MARKS`, such as `train`)
    is 0 or false."""
    return all(turn.get(mark, True) for mark in MARKS)


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the beginning that two texts, or two lists of turns, have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def text_of(record: SourceRecord, field: str) -> str:
    """Return the text of a field. Raises DataError if it is no text."""
    text = record.fields[field]
    if not isinstance(text, str):
        is_turns = isinstance(text, list) and bool(text) and all(map(is_message, text))
        raise record.refusal(
            f"{field} of type {type(text).__name__}",
            f"a string in the field {field}",
            f"write {field} as a string" + "; conversations go into messages" * is_turns,
        )
    return text


def instruction_turns(record: SourceRecord, answer: str | None = None) -> list[Turn]:
    """Return an instruction as turns: system, history, instruction and input, and the answer.

    Args:
        record: a record under furlong's names.
        answer: the field that holds the answer; None for no answer.

    Raises:
        DataError: one of the fields is no text, or the history is no list of pairs.
    """
    system = optional_text(record, "system")
    asked = (text_of(record, "instruction"), optional_text(record, "input"))
    said = [("system", system)] * bool(system) + _history(record)
    said.append(("user", "\n".join(filter(None, asked))))
    if answer is not None:
        said.append(("assistant", text_of(record, answer)))
    return [{"role": role, "content": content} for role, content in said]


def _turns(
    record: SourceRecord, field: str, turns: list[Any], fields: Mapping[str, Any]
) -> list[Any]:
    """Return turns with keys and roles renamed to furlong's, such as `from` to `role` and "human"
    to "user".

    Tool calls without a text are joined to the assistant's message right before them. A turn that
    is no dict stays as it is. Raises DataError.
    """
    roles = {**_ROLES, **fields.get("roles", {})}
    renamed = {theirs: ours for ours, theirs in fields.items() if ours in TURN_FIELDS}
    found: list[Any] = []
    for number, given in enumerate(turns, start=1):
        if not isinstance(given, dict):
            found.append(given)
            continue
        others: dict[Any, str] = renamed | {
            theirs: ours
            for theirs, ours in (("from", "role"), ("value", "content"))
            if ours not in fields and given.get(ours) is None
        }
        turn: Turn = {
            str(others.get(name, name)): value
            for name, value in given.items()
            if name not in fields.get("unused", ())
        }
        role = turn.get("role")
        if isinstance(role, str):
            turn["role"] = roles.get(role, roles.get(role.lower(), role))
        message = f"message {number} of {field}"
        if turn.get("role") == _CALL:
            turn |= {"role": "assistant", "content": None, "tool_calls": turn.get("content")}
        if results := _read_parts(record, message, turn):
            found += results
            if not turn["content"]:
                continue
        both = turn.get("tool_calls"), turn.pop("function_call", None)  # OpenAI's older name
        calls = [call for one in both if one for call in _calls(record, message, one)]
        if calls:
            turn["tool_calls"] = calls
        before = found[-1] if found and isinstance(found[-1], dict) else {}
        are_answers = before.get("role") == turn.get("role") == "assistant"
        if not calls or turn.get("content") or not are_answers:
            found.append(turn)
            continue
        if may_be_trained(before) != may_be_trained(turn):
            raise record.refusal(
                f"{message}: calls that are marked otherwise than the message before them",
                "one mark for an answer and its calls, which the model writes as one",
                "mark both alike",
            )
        found[-1] = {**turn, **before, "tool_calls": [*(before.get("tool_calls") or ()), *calls]}
    return found


def _read_parts(record: SourceRecord, message: str, turn: Turn) -> list[Turn]:
    """Take reasoning, tool calls and tool results out of the content of a turn, if the content is a
    list of parts.

    Reasoning and tool calls become keys of `turn`, which is changed in place. Tool results are
    returned as messages of role `tool`; without tool results the list is empty. Raises DataError.
    """
    results: list[Turn] = []
    rest, calls, thoughts = [], [], []
    for part in turn["content"] if isinstance(turn.get("content"), list) else ():
        match part:
            case {"type": "thinking" | "reasoning" as kind}:
                thoughts.append(part.get(kind) or part.get("text") or part.get("value") or "")
            case {"type": "tool_use", "name": str(name), "input": dict(given)}:
                own = {"id": part.get("id"), "function": {"name": name, "arguments": given}}
                calls.append({key: value for key, value in own.items() if value is not None})
            case {"type": "tool_call", "value": str(text)}:
                calls.append(_of_json(record, f"{message}: the call", text))
            case {"type": "tool_result"}:
                same = {"role": "tool", "tool_call_id": part.get("tool_use_id")}
                results.append({**same, "content": part.get("content") or ""})
            case _:
                rest.append(part)
    if thoughts:
        turn["reasoning_content"] = "".join(map(str, thoughts))
    if calls:
        turn["function_call"] = calls
    if thoughts or calls or results:
        turn["content"] = rest or ("" if thoughts else None)
    return results


def _without_tags(turn: Any) -> list[Any]:
    """Return a message as a list. A message that consists of tool results in <tool_response> tags
    becomes one message for each result, without the tags: the chat template writes them around each
    result. Any other message is the only item, unchanged."""
    said = turn.get("content") if isinstance(turn, dict) and turn.get("role") == "tool" else None
    if not isinstance(said, str) or not said.strip() or _RESPONSE.sub("", said):
        return [turn]
    return [{**turn, "content": one} for one in _RESPONSE.findall(said)]


def _calls(record: SourceRecord, message: str, given: Any) -> list[Any]:
    """Return tool calls as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
    Arguments that are text are parsed as JSON, but stay a text if they are invalid. Raises
    DataError.

    `given`: one call, a list of calls, or either as a text of JSON.
    """
    calls = _of_json(record, f"{message}: the call", given) if isinstance(given, str) else given
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        around = call if isinstance(call, dict) else {}
        own = around.get("function", around)
        if not isinstance(own, dict) or not isinstance(own.get("name"), str):
            raise record.refusal(
                f"{message}: a call {in_short(call, 40)}",
                '{"type": "function", "function": {"name": "...", "arguments": {...}}}',
            )
        arguments = {} if (said := own.get("arguments")) is None else said
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # a model may have written invalid JSON
                value = json.loads(arguments) if arguments.strip() else {}
                arguments = value if isinstance(value, dict) else arguments
        function = {"function": {**own, "arguments": arguments}}
        found.append({"type": "function", **(around if own is not call else {}), **function})
    return found


def _of_json(record: SourceRecord, what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise record.refusal(
            f"{what}: a text {in_short(text, 40)!r} that is no JSON",
            "a list or an object, or its JSON as a text",
        ) from error


def _text_of_part(record: SourceRecord, part: Any, message: str) -> str:
    """Return the text of one part of a message's content. Raises DataError for an image or
    sound."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        text = part.get("text", part.get("value"))
        if isinstance(text, str) and not any(part.get(key) for key in _MEDIA):
            return text
    raise record.refusal(
        f"{message}: a part {in_short(part, 40)}",
        'content as a string, or parts such as {"type": "text", "text": "..."}',
        "write the part as a text, or remove it or the record: texts, thoughts and calls alone are"
        " trained on",
    )


def _check_marks(record: SourceRecord, turn: Turn, message: str) -> None:
    """Raise DataError for a message with a wrong loss mark (`MARKS`, such as `train`).

    Each mark must be 0 or 1. Only messages of the assistant may have a mark of 1; the mark `weight`
    may be 1 on any message.
    """
    for mark in MARKS:
        value = turn.get(mark, True)
        others = mark != "weight" and value and mark in turn and turn["role"] != "assistant"
        if others or value not in (0, 1):
            raise record.refusal(
                f"{message}, of role {turn['role']}: {mark} = {value!r}",
                "0 or 1 (false or true), and true for what the assistant says alone",
                f"remove {mark}, or mend it; an answer with 0 or false is not learnt",
            )


def optional_text(record: SourceRecord, field: str) -> str:
    return "" if record.fields.get(field) is None else text_of(record, field)


def _history(record: SourceRecord) -> list[tuple[str, str]]:
    found = []
    history = record.fields.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        match pair:
            case [str(asked), str(said)]:
                found += [("user", asked), ("assistant", said)]
            case _:
                raise record.refusal(
                    f"a history with {in_short(pair, 40)}",
                    'history: [["an instruction", "its output"], ...]',
                )
    return found
