"""furlong's training templates: chat templates with generation tags around the answers.

They write what the models' templates write, but keep the thoughts of every answer, so that each
answer stands as the model generated it. Their texts are `templates/*.jinja` beside this file.

TRL's training templates are not used. Four of them train on tokens of the prompt (see the table in
docs/data-chat.md). TRL also has templates for other models, which furlong does not need: it finds
the answers of these models without a training template.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError

ALPACA = "alpaca"
"""The name that means no template but the prompt of the Alpaca data set around an instruction."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "a number"}},
            "required": ["a"],
        },
    },
}
_USER: dict[str, Any] = {"role": "user", "content": "Hello there"}
_SAID: dict[str, Any] = {"role": "assistant", "content": "Hi, you."}
_THOUGHT = {**_SAID, "reasoning_content": "A greeting."}
_CALL = {
    "id": "123456789",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": True}},
}
_CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "2", "name": "add", "tool_call_id": "123456789"},
]
PROBES: tuple[tuple[list[dict[str, Any]], bool], ...] = (
    ([_USER, _SAID], False),
    ([{"role": "system", "content": "Be kind."}, _USER, _SAID], False),
    ([_USER, _THOUGHT], False),
    ([_USER, _SAID], True),
    ([_USER, _CALLED[0]], True),
    ([_USER, *_CALLED, _SAID], True),
    ([_USER, _SAID, _USER, _SAID], False),
)
"""Conversations that two templates must render alike, and whether with a tool."""

FOLLOWED = {False: [_USER, _SAID, _USER], True: [_USER, *_CALLED]}
"""Conversations that go on after their answer, by whether it calls a tool."""

THOUGHTFUL = (
    [_USER, _THOUGHT, _USER, _THOUGHT],
    [_USER, {**_CALLED[0], "reasoning_content": "I add."}, _CALLED[1], _THOUGHT, _USER, _SAID],
)
"""Conversations whose text or prompt a switch that keeps or leaves out thoughts changes."""

_MARK = re.compile(r"<[|｜][^\s<>'\"|｜]+[|｜]>|<(?:start|end)_of_\w+>")


def marks_of(template: str) -> frozenset[str]:
    """Return the special tokens that the text of a template names."""
    return frozenset(_MARK.findall(template))


def fitting_templates(has_token: Callable[[str], bool]) -> list[str]:
    """Return the names of furlong's templates whose special tokens are all in a vocabulary. If
    there are none, return the names of those without special tokens."""
    marks = {name: marks_of(text) for name, text in training_templates().items()}
    fitting = [name for name, own in marks.items() if own and all(map(has_token, own))]
    return fitting or [name for name, own in marks.items() if not own]


def training_templates() -> dict[str, str]:
    """Return the texts of furlong's templates by name."""
    folder = Path(__file__).parent / "templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def template_text(given: str) -> str | None:
    """Return the template that `data.chat_template` means; None for Alpaca's prompt.

    Args:
        given: the text of a template, a file, or the name of one of furlong's templates.

    Raises:
        ConfigError: it is none of these, or the file cannot be read.
    """
    if "{{" in given or "{%" in given:
        return given
    file = Path(os.path.expanduser(given))
    known = training_templates()
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f": {error}"
    else:
        if given == ALPACA:
            return None
        if given in known:
            return known[given]
        reason = ", neither a file nor a known name"
    raise ConfigError(
        given=f"data.chat_template = {given!r}{reason}",
        required=f"a file in UTF-8, a text with {{{{ or {{% tags, or one of"
        f" {', '.join((*known, ALPACA))}",
        source="data.chat_template",
        change="check the path or the name; null takes the template of the model's tokenizer",
    )
