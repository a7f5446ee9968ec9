"""Conversations as text, by the tokenizer's own template, and which of it the assistant says.

A template with `{% generation %}` tags says it itself: marks are written where the tags stand, and
taken out of the text. With any other, an answer is what the text of the conversation up to it has
more than the prompt for it. That is right only if both begin the
text of the whole conversation, which is checked every time: a template may, for instance, drop the
reasoning of earlier answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

from furlong.data.records import LeftOut, SourceRecord, check_size, kind_of
from furlong.data.rendering import rendering
from furlong.data.tokenize import Encoded, Rendered, encode_rendered, rendered
from furlong.errors import ConfigError, DataError

MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Fields of a message by which other trainers choose what is learnt."""

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "video_url", "file")
_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
UNWRITTEN, EMPTY_ANSWERS = "conversations with {}", "empty answers"
ESCAPED = "calls with arguments as a string of JSON"
"""Counted with what is left out: conversations of which the template does not write all, answers
that are learnt as they are, and calls that the template writes as a text within JSON."""
# A template may write the time.
_NUMBER = re.compile("[0-9]")
_SHOWN_CHARS = 24
# No template has it in a text of its own.
_PROBE = "furlong-3f9c"
_OPEN, _CLOSE = f"{_PROBE}(", f"){_PROBE}"
_MARK = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")
_READ = frozenset(("role", "content", *MARKS))
_REASON_CHARS = 200


def encode_chat(
    records: Iterable[SourceRecord], tokenizer: Any, left_out: LeftOut
) -> Iterator[Encoded]:
    """Records of messages, of which the assistant's are learnt. Raises UserError."""
    with rendering(tokenizer, render_conversation) as render:
        texts = rendered(records, render, left_out)
        yield from encode_rendered(texts, tokenizer, by_template=True)


def render_conversation(
    record: SourceRecord, tokenizer: Any, before: Callable[[], object] = lambda: None
) -> Rendered | None:
    """A record of messages as the model reads it; None if it has no message.

    `before` is called whenever the template is about to run. Raises DataError for a record or a
    template that cannot be rendered or masked, and ConfigError for a tokenizer without a template.
    """
    tools = tools_of(record)
    template = template_of(tokenizer, tools)
    turns = messages_of(record, template)
    if not turns:
        return None
    return Conversation(record, tokenizer, template, tools, turns, before).rendered()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a record that are about to be rendered."""

    record: SourceRecord
    tokenizer: Any
    template: str
    tools: list[dict[str, Any]] | None
    turns: list[dict[str, Any]]
    before: Callable[[], object]
    first: int = 0
    """The first turn that may be learnt."""

    def rendered(self) -> Rendered:
        """The text, with what the assistant says from the turn `first` on."""
        written = self._in_parts() if self._takes_parts_alone() else self
        found = written.by_tags() if _TAG.search(self.template) else written.by_prefixes()
        return replace(found, told=tuple(self._told(written, found.text)))

    def by_tags(self) -> Rendered:
        (text, _), (marked, ranges) = (self._render(len(self.turns), tags=t) for t in (False, True))
        if _NUMBER.sub("0", marked) != _NUMBER.sub("0", text):
            raise self._cannot_be_masked("it works on the text between its {% generation %} tags")
        if not any(start < stop for start, stop in ranges) and any(
            turn["role"] == "assistant" and turn.get("content") for turn in self.turns
        ):
            raise self._cannot_be_masked("its {% generation %} tags enclose no answer")
        unlearnt = [n for n, turn in enumerate(self.turns) if not may_be_learnt(turn)]
        for number in reversed([n for n in unlearnt if n >= self.first]):
            start, stop = self._num_ranges(number, ranges), self._num_ranges(number + 1, ranges)
            ranges = ranges[:start] + ranges[stop:]
        if self.first:
            ranges = ranges[self._num_ranges(self.first, ranges) :]
        return Rendered(text, tuple((start, stop) for start, stop in ranges))

    def by_prefixes(self) -> Rendered:
        text, _ = self._render(len(self.turns))
        ranges = []
        for number, turn in enumerate(self.turns):
            if turn["role"] != "assistant" or number < self.first or not may_be_learnt(turn):
                continue
            prompt, _ = self._render(number, prompt=True)
            if not text.startswith(prompt):
                raise self._cannot_be_masked(
                    f"the prompt for message {number + 1} is not what precedes the answer:"
                    f" {_difference(prompt, text)}"
                )
            upto = text if number + 1 == len(self.turns) else self._render(number + 1)[0]
            if not text.startswith(upto):
                raise self._cannot_be_masked(
                    f"message {number + 1} is another text once messages follow it:"
                    f" {_difference(upto, text)}"
                )
            ranges.append((len(prompt), len(upto)))
        return Rendered(text, tuple(ranges))

    def _num_ranges(self, num_turns: int, ranges: list[tuple[int, int]]) -> int:
        """How many of `ranges` are of the first turns. Raises DataError."""
        own = self._render(num_turns, tags=True)[1] if num_turns else []
        if ranges[: len(own)] != own:
            raise self._cannot_be_masked(f"what is learnt of message {num_turns} changes behind it")
        return len(own)

    def _takes_parts_alone(self) -> bool:
        """Whether the template writes contents of parts, and none that are strings."""
        if "text" not in self.template:
            return False
        probe = replace(self, turns=[{"role": "user", "content": _PROBE}])
        try:
            return _PROBE not in probe._render(1)[0] and _PROBE in probe._in_parts()._render(1)[0]
        except DataError:
            return False

    def _in_parts(self) -> Conversation:
        turns = [
            turn | {"content": [{"type": "text", "text": turn["content"]}]}
            if "content" in turn else turn for turn in self.turns
        ]  # fmt: skip
        return replace(self, turns=turns)

    def _told(self, written: Conversation, text: str) -> Iterator[str]:
        """Name what has no part in the text of the conversation, and its empty answers."""
        unread = self._unread(written, text)
        yield from (UNWRITTEN.format(f"{k} in a message") for k in sorted({k for _, k in unread}))
        if self.tools and replace(written, tools=None)._writes(text):
            yield UNWRITTEN.format("tools")
        for role in sorted(self._unwritten_roles(text, in_parts=written is not self)):
            yield UNWRITTEN.format(f"content of role {role}")
        for call in (call for turn in self.turns for call in _listed(turn.get("tool_calls"))):
            own = call.get("function", call) if isinstance(call, dict) else None
            arguments = own.get("arguments") if isinstance(own, dict) else None
            if isinstance(arguments, str) and arguments not in text and any(
                json.dumps(arguments, ensure_ascii=is_ascii) in text for is_ascii in (False, True)
            ):  # fmt: skip
                yield ESCAPED
        for number, turn in enumerate(self.turns[self.first :], start=self.first):
            says = turn.get("content", "").strip() or any(
                v for k, v in turn.items() if k not in _READ and (number, k) not in unread
            )
            if turn["role"] == "assistant" and may_be_learnt(turn) and not says:
                yield EMPTY_ANSWERS

    def _unread(self, written: Conversation, text: str) -> set[tuple[int, str]]:
        """Numbers and keys of what messages have beside role and content, and the text has not."""
        filled = {
            (n, key) for n, turn in enumerate(self.turns) for key, value in turn.items()
            if key not in _READ and value not in ("", [], {})
        }  # fmt: skip
        unread: set[tuple[int, str]] = set()
        if not filled:
            return unread
        keys = {key for _, key in filled}
        for some in [keys] if written._without(filled)._writes(text) else [{k} for k in keys]:
            own = {at for at in filled if at[1] in some}
            is_unread = written._without(own)._writes(text)
            unread |= own if is_unread else {a for a in own if written._without({a})._writes(text)}
        return unread

    def _unwritten_roles(self, text: str, *, in_parts: bool) -> set[str]:
        """Roles of messages whose content has no part in the text of the conversation."""
        filled = {n for n, turn in enumerate(self.turns) if turn.get("content", "").strip()}

        def probed(numbers: set[int]) -> Conversation:
            turns = [
                turn | {"content": f"{_PROBE}-{n}-{turn['content']}{_PROBE}-{n}-"}
                if n in numbers else turn for n, turn in enumerate(self.turns)
            ]  # fmt: skip
            asked = replace(self, turns=turns)
            return asked._in_parts() if in_parts else asked

        try:
            found = probed(filled)._render(len(self.turns))[0]
        except DataError:  # the template looks into contents
            found = ""
        missing = [n for n in filled if f"{_PROBE}-{n}-" not in found]
        return {self.turns[n]["role"] for n in missing if probed({n})._writes(text)}

    def _without(self, keys: set[tuple[int, str]]) -> Conversation:
        turns = [
            {key: value for key, value in turn.items() if (n, key) not in keys}
            for n, turn in enumerate(self.turns)
        ]
        return replace(self, turns=turns)

    def _writes(self, text: str) -> bool:
        try:
            return self._render(len(self.turns))[0] == text
        except DataError:  # the template asks for what was taken out
            return False

    def _render(
        self, num_turns: int, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The first turns as text, and the ranges between tags, wherever the template writes what
        they enclose: transformers counts characters where it renders them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self.before()
        try:
            texts, _ = render_jinja_template(
                conversations=[self.turns[:num_turns]],
                tools=self.tools,
                chat_template=_TAG.sub(_with_mark, self.template) if tags else self.template,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program of someone else's
            part = "the prompt for" if prompt else "the conversation up to"
            number = num_turns + 1 if prompt else num_turns
            raise self._fails(f"{part} message {number}: {_reason(error)}") from error
        check_size(
            self.record, f"a text by the chat template of {self.tokenizer.name_or_path}", texts[0]
        )
        return _unmarked(texts[0]) if tags else (texts[0], [])

    def _fails(self, reason: str) -> DataError:
        return self.record.refusal(
            "a conversation that the chat template of"
            f" {self.tokenizer.name_or_path} refuses, {reason}",
            "messages in the order that the template expects",
            "mend or remove the record, or change the tokenizer's chat template",
        )

    def _cannot_be_masked(self, reason: str) -> DataError:
        return DataError(
            given=f"a chat template that cannot be masked: {reason}",
            required="a template with {% generation %} tags, or one whose text for a conversation"
            " begins with its text for every earlier part of it",
            source=f"{self.record.origin} and the chat template of {self.tokenizer.name_or_path}",
            change="put {% generation %} and {% endgeneration %} around the answers in the template"
            " (TRL ships such templates), or cut the conversation after its first answer",
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def template_of(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str:
    """The tokenizer's chat template. Raises ConfigError."""
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:
        raise ConfigError(
            given=f"{tokenizer.name_or_path}: a tokenizer without a default chat template",
            required="a chat template, since the data has messages",
            source="model.name",
            change="use the tokenizer of a chat model, or add chat_template.jinja to the folder",
        ) from error


def tools_of(record: SourceRecord) -> list[dict[str, Any]] | None:
    """The tools that a conversation may call. Raises DataError."""
    tools = record.fields.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise record.refusal(
            f"tools of type {type(tools).__name__}",
            "a list of tools, each of them a JSON schema",
            "write tools as objects, not as text",
        )
    return tools


def _with_mark(tag: re.Match[str]) -> str:
    """A tag with what writes its mark. The assignment stands where the template trims the white
    space beside the tag, which it would not do beside the mark."""
    before, is_end, behind = tag.groups()
    if is_end:
        return f"{{%{before} set furlong = 0 %}}{{{{ '{_CLOSE}' }}}}{{% endgeneration {behind}%}}"
    return f"{{%{before} generation %}}{{{{ '{_OPEN}' }}}}{{% set furlong = 0 {behind}%}}"


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the ranges that they enclosed."""
    pieces, opened, ranges, num_chars = [], [], [], 0
    for piece in _MARK.split(marked):
        if piece == _OPEN:
            opened.append(num_chars)
        elif piece == _CLOSE and opened:
            ranges.append((opened.pop(), num_chars))
        else:
            pieces.append(piece)
            num_chars += len(piece)
    return "".join(pieces) + _OPEN * len(opened), ranges


def _reason(error: Exception) -> str:
    """Words of an error that a template raised on purpose; of any other, with its type in front."""
    if isinstance(error, MemoryError):
        return "MemoryError: it takes more memory than a template may"
    text = " ".join(str(error).split())[:_REASON_CHARS]
    return text if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {text}"


def _difference(part: str, whole: str) -> str:
    """Where `whole` stops beginning with `part`, for people."""
    at = next(
        (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
        min(len(part), len(whole)),
    )
    return f"{part[at : at + _SHOWN_CHARS]!r} became {whole[at : at + _SHOWN_CHARS]!r}"


def messages_of(
    record: SourceRecord, template: str, field: str = "messages"
) -> list[dict[str, Any]]:
    """The turns of the conversation in `field`, without fields that have no value.

    A role must be one of the usual ones or one that `template` names. Raises DataError.
    """
    messages = record.fields[field]
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise _bad_turn(record, f"{field} that are {kind_of(messages)}", field)
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
            raise record.refusal(
                f"message {number} of role {role!r}",
                f"one of {', '.join(sorted(_ROLES))}, or a role of the chat template",
                "rename the role; what the model is to learn is said by the assistant",
            )
        if not isinstance(content, str | list) and ("content" in turn or "tool_calls" not in turn):
            kind = kind_of(content) if "content" in given else "missing"
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
            kind = kind_of(part)
            if isinstance(part, dict) and not is_text:
                is_other = part.get("type") not in ("text", None)
                kind = f"of type {part['type']}" if is_other else f"with {media[0]}"
            raise record.refusal(
                f"{message}, part {number}: {kind}",
                'content as a string, or parts such as {"type": "text", "text": "..."}',
                "remove the record, or the part: images and sound are not trained on",
            )
        texts.append(text)
    return "".join(texts)


def _check_marks(record: SourceRecord, turn: Mapping[str, Any], message: str) -> None:
    """Raises DataError for a mark that asks for more than learning an answer or not."""
    for mark in MARKS:
        value = turn.get(mark, True)
        others = mark != "weight" and value and mark in turn and turn["role"] != "assistant"
        if others or value not in (0, 1):
            raise record.refusal(
                f"{message}, of role {turn['role']}: {mark} = {value!r}",
                "0 or 1 (false or true), and true for what the assistant says alone",
                f"remove {mark}, or mend it; an answer with 0 or false is not learnt",
            )


def _bad_turn(
    record: SourceRecord, given: str, field: str, *, is_sharegpt: bool = False
) -> DataError:
    return record.refusal(
        given,
        f'{field}: [{{"role": "user", "content": "..."}}, ...]',
        "rename from to role and value to content, human to user and gpt to assistant"
        if is_sharegpt
        else "mend or remove the record",
    )
