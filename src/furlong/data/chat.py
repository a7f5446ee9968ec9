"""Conversations as text, by a chat template, and which of it the assistant says.

A template with `{% generation %}` tags says it itself: marks are written where the tags stand, and
taken out of the text. With any other, an answer is what the text of the conversation up to it has
more than the prompt for it. That is right only if both begin the text of the whole conversation,
which is checked every time: a template may, for instance, drop the reasoning of earlier answers.
Then one of furlong's own training templates takes its place, if it writes the same answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from furlong.data.fields import MARKS, Turn, answers, may_be_learnt
from furlong.data.tokenize import Rendered
from furlong.data.training_templates import PROBES, TOOL, training_templates
from furlong.errors import ConfigError, DataError

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_READ = frozenset(("role", "content", *MARKS))
_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# A template may write the time.
_NUMBER = re.compile("[0-9]")
# No template has it in a text of its own.
_PROBE = "furlong-3f9c"
_OPEN, _CLOSE = f"{_PROBE}(", f"){_PROBE}"
_MARK = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")
_EMPTY = re.compile(r"<think>\s*</think>")
# The prompt may hold where they begin.
_EMPTY_FIRST = re.compile(r"\s*(<think>)?\s*</think>\s*")
_MANY = 2
"""Answers above which a known template is masked by furlong's own, where both write the same."""
_SHOWN_CHARS = 24
_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation of a record."""

    origin: str
    turns: list[Turn]
    tools: list[Any] | None = None
    first: int = 0
    """The first turn that may be learnt."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Other names that the template is given."""
    is_learnt_whole: bool = False
    """Whether all of its text is learnt."""


class CannotBeMaskedError(DataError):
    """A template by whose text nobody can tell what the assistant says."""


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Any,
        before: Callable[[], object] = lambda: None,
        eot_tokens: Iterable[str] = (),
    ) -> None:
        """`before` is called whenever the template is about to run. `eot_tokens` are learnt where
        they follow an answer."""
        self._tokenizer, self._before = tokenizer, before
        ends = tuple(eot_tokens)
        self._end = re.compile(rf"\s*({'|'.join(map(re.escape, ends))})") if ends else None
        self._stops = (*ends, *tokenizer.get_added_vocab())
        self._templates: dict[str, _Template] = {}
        self._trained_by: dict[_Template, tuple[str, _Template] | None] = {}

    def render(self, turns: Turns) -> Rendered:
        """The text of a conversation, with what the assistant says from its first turn on that may
        be learnt.

        Raises DataError for a conversation or a template that cannot be rendered or masked, and
        ConfigError for a tokenizer without a template.
        """
        template = self._template_of(turns)
        for number, turn in enumerate(turns.turns, start=1):
            role = turn["role"]
            if role not in _ROLES and not template.names(role):
                raise DataError(
                    given=f"message {number} of role {role!r}",
                    required=f"one of {', '.join(sorted(_ROLES))}, or a role of the chat template",
                    source=turns.origin,
                    change="name the role in data.fields: {roles: {"
                    + f"{role}: user}}}}, or rename it; what is to be learnt is said by the"
                    " assistant",
                )
        notes = []
        if turns.is_learnt_whole:
            text, ranges = template.write(turns), None
        else:
            try:
                text, ranges = self._masked(turns, template)
            except CannotBeMaskedError:
                other = self._training_template(template, turns)
                if other is None:
                    raise
                name, template = other
                text, ranges = self._masked(turns, template)
                notes.append(
                    f"conversations by furlong's training template {name}, since the model's own"
                    " writes earlier answers anew"
                )
            ranges = self._as_generated(turns, text, ranges)
            if ranges and not text[slice(*ranges[-1])].rstrip().endswith(self._stops):
                notes.append(
                    "conversations whose last answer ends without a special token: where to stop"
                    " is not learnt (data.eot_tokens)"
                )
        notes += [
            f"conversations with {what} that the template does not write"
            for what in template.unwritten(turns, text)
        ]
        return Rendered(text, None if ranges is None else tuple(ranges), True, tuple(notes))

    def _template_of(self, turns: Turns) -> _Template:
        try:
            return self._of(str(self._tokenizer.get_chat_template(None, turns.tools)))
        except ValueError as error:
            raise ConfigError(
                given=f"{self._tokenizer.name_or_path}: a tokenizer without a default chat"
                " template",
                required="a chat template, since the data has messages",
                source="model.name",
                change="use the tokenizer of a chat model, or set data.chat_template, such as"
                " chatml",
            ) from error

    def _of(self, text: str) -> _Template:
        return self._templates.setdefault(text, _Template(text, self._tokenizer, self._before))

    def _masked(self, own: Turns, template: _Template) -> tuple[str, list[tuple[int, int]]]:
        num_answers = sum(turn["role"] == "assistant" for turn in own.turns)
        if template.has_tags:
            return template.by_tags(own)
        if num_answers > _MANY and (known := self._training_template(template, own)):
            # Prefixes take two renderings for each answer, tags two in all.
            with suppress(DataError):
                found = known[1].by_tags(own)
                if found[0] == template.write(own):
                    return found
        return template.by_prefixes(own)

    def _training_template(self, template: _Template, own: Turns) -> tuple[str, _Template] | None:
        """The name of furlong's own template that writes the answers of this one, and itself."""
        if template not in self._trained_by:
            ours = ((name, self._of(text)) for name, text in training_templates().items())
            found = (one for one in ours if self._writes_the_same(own, template, one[1]))
            self._trained_by[template] = next(found, None)
        return self._trained_by[template]

    def _writes_the_same(self, own: Turns, template: _Template, other: _Template) -> bool:
        """Whether another template writes the probes as this one does, and learns of them the
        same: whole texts where there is one answer, else the last answer."""
        num_same = 0
        for turns, has_tools in PROBES:
            tools = [TOOL] if has_tools else None
            probe = replace(own, turns=turns, first=len(turns) - 1, tools=tools, kwargs={})
            try:
                text, ranges = self._masked(probe, template)
            except DataError:
                continue  # there is nothing to compare it with
            try:
                others, found = self._masked(probe, other)
            except DataError:
                return False
            said = self._as_generated(probe, text, ranges)
            others_said = self._as_generated(probe, others, found)
            is_first = sum(turn["role"] == "assistant" for turn in turns) == 1
            if _parts(text, said) != _parts(others, others_said) or (is_first and text != others):
                return False
            num_same += 1
        return num_same > len(PROBES) // 2

    def _as_generated(
        self, own: Turns, text: str, ranges: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The ranges of a text with the mark that ends a turn, and without the thoughts of an
        answer that has none: a template writes them empty, and no record."""
        is_own = any(_EMPTY.search(turn.get("content", "")) for turn in own.turns)
        found = []
        for start, stop in ranges:
            if not is_own and (empty := _EMPTY_FIRST.match(text, start, stop)):
                start = empty.end()
            end = self._end and self._end.match(text, stop)
            if end and not text[start:stop].rstrip().endswith(end[1]):
                stop = end.end()
            found.append((start, stop))
        return found


class _Template:
    """The text of a template, and how it takes turns."""

    def __init__(self, text: str, tokenizer: Any, before: Callable[[], object]) -> None:
        self._text, self._tokenizer, self._before = text, tokenizer, before
        self.has_tags = bool(_TAG.search(text))
        self._takes_text = False
        """Whether arguments of calls must be texts."""
        self._takes_parts = None if "text" in text else False
        """Whether it writes contents of parts alone; None where nobody has tried."""

    def names(self, role: str) -> bool:
        """Whether the template asks for a role."""
        return f"'{role}'" in self._text or f'"{role}"' in self._text

    def by_tags(self, own: Turns) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and what of it its tags say is learnt. Raises DataError."""
        text = self.write(own)
        marked, ranges = self._marked(own)
        if _NUMBER.sub("0", marked) != _NUMBER.sub("0", text):
            raise self._cannot_be_masked(
                own, "it works on the text between its {% generation %} tags"
            )
        if not any(start < stop for start, stop in ranges) and answers(own.turns):
            raise self._cannot_be_masked(own, "its {% generation %} tags enclose no answer")
        for number in reversed(range(own.first, len(own.turns))):
            if not may_be_learnt(own.turns[number]):
                start, stop = (self._num_ranges(own, n, ranges) for n in (number, number + 1))
                ranges = ranges[:start] + ranges[stop:]
        return text, ranges[self._num_ranges(own, own.first, ranges) :]

    def by_prefixes(self, own: Turns) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and what each answer adds to its prompt. Raises DataError."""
        text = self.write(own)
        ranges = []
        for number, turn in enumerate(own.turns):
            if turn["role"] != "assistant" or number < own.first or not may_be_learnt(turn):
                continue
            try:
                prompt = self.write(own, number, prompt=True)
            except DataError as error:
                if number:
                    raise
                reason = "it writes no prompt for an answer that no message precedes"
                raise self._cannot_be_masked(own, reason) from error
            if not text.startswith(prompt):
                raise self._cannot_be_masked(
                    own,
                    f"the prompt for message {number + 1} is not what precedes the answer:"
                    f" {_difference(prompt, text)}",
                )
            is_last = number + 1 == len(own.turns)
            upto = text if is_last else self.write(own, number + 1)
            if not text.startswith(upto):
                raise self._cannot_be_masked(
                    own,
                    f"message {number + 1} is another text once messages follow it:"
                    f" {_difference(upto, text)}",
                )
            ranges.append((len(prompt), len(upto)))
        return text, ranges

    def _num_ranges(self, own: Turns, num_turns: int, ranges: list[tuple[int, int]]) -> int:
        """How many of `ranges` are of the first turns. Raises DataError."""
        found = self._marked(own, num_turns)[1] if num_turns else []
        if ranges[: len(found)] != found:
            raise self._cannot_be_masked(
                own, f"what is learnt of message {num_turns} changes behind it"
            )
        return len(found)

    def _marked(
        self, own: Turns, num_turns: int | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The first turns as text, and the ranges between tags, wherever the template writes what
        they enclose: transformers counts characters where it renders them."""
        return _unmarked(self.write(own, num_turns, tags=True))

    def unwritten(self, own: Turns, text: str) -> Iterator[str]:
        """Name what has no part in the text of a conversation."""
        filled = {
            key
            for turn in own.turns
            for key, value in turn.items()
            if key not in _READ and value not in ("", [], {})
        }
        for key in sorted(filled):
            less = [{name: turn[name] for name in turn if name != key} for turn in own.turns]
            if self._tried(replace(own, turns=less)) == text:
                yield f"{key} in a message"
        if own.tools and self._tried(replace(own, tools=None)) == text:
            yield "tools"
        roles = {turn["role"] for turn in own.turns if turn.get("content", "").strip() not in text}
        yield from (f"content of role {role}" for role in sorted(roles))

    def _tried(self, own: Turns) -> str | None:
        with suppress(DataError):  # it may ask for what was taken out
            return self.write(own)
        return None

    def write(
        self, own: Turns, num_turns: int | None = None, *, prompt: bool = False, tags: bool = False
    ) -> str:
        """The first turns as text, with a generation prompt, or with marks where the tags are.
        Raises DataError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._takes_parts is None:
            probe = replace(own, turns=[{"role": "user", "content": _PROBE}])
            found = []
            for self._takes_parts in (False, True):
                found.append(_PROBE in (self._tried(probe) or ""))
            self._takes_parts = found == [False, True]
        turns = own.turns[:num_turns]
        if self._takes_text:
            turns = [_as_openai_has_it(turn) for turn in turns]
        if self._takes_parts:
            turns = [
                turn | {"content": [{"type": "text", "text": turn["content"]}]}
                if "content" in turn
                else turn
                for turn in turns
            ]
        self._before()
        try:
            (text,), _ = render_jinja_template(
                conversations=[turns],
                tools=own.tools,
                chat_template=_TAG.sub(_with_mark, self._text) if tags else self._text,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **own.kwargs},
            )
        except Exception as error:  # a template is a program of someone else's
            if not self._takes_text and any(turn.get("tool_calls") for turn in turns):
                self._takes_text = True
                with suppress(DataError):
                    return self.write(own, num_turns, prompt=prompt, tags=tags)
                self._takes_text = False
            reason = " ".join(str(error).split())[:_REASON_CHARS]
            if type(error).__name__ != "TemplateError":  # which a template raises on purpose
                reason = f"{type(error).__name__}: {reason}"
            part = "the prompt behind" if prompt else "the conversation up to"
            raise DataError(
                given="a conversation that the chat template of"
                f" {self._tokenizer.name_or_path} refuses, {part} message {len(turns)}: {reason}",
                required="messages in the order that the template expects",
                source=own.origin,
                change="mend or remove the record, or change the tokenizer's chat template",
            ) from error
        return str(text)

    def _cannot_be_masked(self, own: Turns, reason: str) -> CannotBeMaskedError:
        return CannotBeMaskedError(
            given=f"a chat template that cannot be masked: {reason}",
            required="a template with {% generation %} tags, or one whose text for a conversation"
            " begins with its text for every earlier part of it",
            source=f"{own.origin} and the chat template of {self._tokenizer.name_or_path}",
            change="set data.chat_template to a template with {% generation %} and"
            " {% endgeneration %} around the answers (TRL ships such files), or data.train_on to"
            " last",
        )


def _as_openai_has_it(turn: Turn) -> Turn:
    """A turn with calls as they come from OpenAI, which some templates count on: arguments are a
    text, and there is a content, if only null."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"])}}
        for call in turn.get("tool_calls", ())
    ]
    return {"content": None, **turn, "tool_calls": calls} if calls else turn


def _json(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _parts(text: str, ranges: list[tuple[int, int]]) -> list[str]:
    return [text[start:stop] for start, stop in ranges]


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


def _difference(part: str, whole: str) -> str:
    """Where `whole` stops beginning with `part`, for people."""
    at = next(
        (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
        min(len(part), len(whole)),
    )
    return f"{part[at : at + _SHOWN_CHARS]!r} became {whole[at : at + _SHOWN_CHARS]!r}"
