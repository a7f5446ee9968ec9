"""Conversations as text, by the tokenizer's own template, and which of it the assistant says.

A template with `{% generation %}` tags says it itself. With any other, an answer is what the text
of the conversation up to it has more than the prompt for it. That is right only if both begin the
text of the whole conversation, which is checked every time: a template may, for instance, drop the
reasoning of earlier answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from furlong.data.formats import check_size, messages_of
from furlong.data.records import SourceRecord
from furlong.errors import ConfigError, DataError

_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN_CHARS = 24
_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text and the half-open ranges of its characters that are learnt."""

    text: str
    ranges: tuple[tuple[int, int], ...]


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
        return self.by_tags() if _TAG.search(self.template) else self.by_prefixes()

    def by_tags(self) -> Rendered:
        text, ranges = self._render(len(self.turns), tags=True)
        if not any(start < stop for start, stop in ranges) and any(
            turn["role"] == "assistant" and turn.get("content") for turn in self.turns
        ):
            raise self._cannot_be_masked("its {% generation %} tags enclose no answer")
        if self.first:
            ranges = ranges[len(self._render(self.first, tags=True)[1]) :]
        return Rendered(text, tuple((start, stop) for start, stop in ranges))

    def by_prefixes(self) -> Rendered:
        text, _ = self._render(len(self.turns))
        ranges = []
        for number, turn in enumerate(self.turns):
            if turn["role"] != "assistant" or number < self.first:
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

    def _render(
        self, num_turns: int, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The first turns as text, and the ranges between tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self.before()
        try:
            texts, ranges = render_jinja_template(
                conversations=[self.turns[:num_turns]],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=tags,
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
        return texts[0], ranges[0] if tags else []

    def _fails(self, reason: str) -> DataError:
        return DataError(
            given="a conversation that the chat template of"
            f" {self.tokenizer.name_or_path} refuses, {reason}",
            required="messages in the order that the template expects",
            source=self.record.origin,
            change="mend or remove the record, or change the tokenizer's chat template",
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
        raise DataError(
            given=f"tools of type {type(tools).__name__}",
            required="a list of tools, each of them a JSON schema",
            source=record.origin,
            change="write tools as objects, not as text",
        )
    return tools


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
