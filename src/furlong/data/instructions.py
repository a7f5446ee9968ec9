"""Records of an instruction and its output, as Alpaca has them: as a conversation, or in the words
of that data set where a tokenizer has no chat template."""

from __future__ import annotations

from furlong.data.fields import Turn
from furlong.data.records import SourceRecord
from furlong.data.tokenize import Rendered

_ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request."
)


def text_of(record: SourceRecord, field: str) -> str:
    """A field that must be a text. Raises DataError."""
    text = record.fields[field]
    if not isinstance(text, str):
        raise record.refusal(
            f"{field} of type {type(text).__name__}",
            f"a string in the field {field}",
            f"write {field} as a string; conversations go into messages",
        )
    return text


def instruction_turns(record: SourceRecord, answer: str | None = None) -> list[Turn]:
    """The turns of a record: its system message, its history, instruction and input as one message
    of the user, and the answer in the field of that name. Raises DataError."""
    turns: list[Turn] = []
    for role, content in (
        ("system", _optional(record, "system")),
        *_history(record),
        (
            "user",
            "\n".join(filter(None, (text_of(record, "instruction"), _optional(record, "input")))),
        ),
        ("assistant", None if answer is None else text_of(record, answer)),
    ):
        if content is not None and (content or role != "system"):
            turns.append({"role": role, "content": content})
    return turns


def instruction_text(record: SourceRecord) -> tuple[Rendered]:
    """The record in Alpaca's words, of which the output is learnt. Raises DataError."""
    if record.fields.get("history"):
        raise record.refusal(
            "a history, with a tokenizer that has no chat template",
            "a chat template for several instructions and outputs",
            "set data.chat_template, such as chatml",
        )
    own, output = _optional(record, "input"), text_of(record, "output")
    system = _optional(record, "system") or (_WITH_INPUT if own else _ALONE)
    prompt = f"{system}\n\n### Instruction:\n{text_of(record, 'instruction')}\n\n"
    prompt += f"### Input:\n{own}\n\n" if own else ""
    prompt += "### Response:\n"
    return (Rendered(prompt + output, ((len(prompt), len(prompt) + len(output)),)),)


def _optional(record: SourceRecord, field: str) -> str:
    return "" if record.fields.get(field) is None else text_of(record, field)


def _history(record: SourceRecord) -> list[tuple[str, str]]:
    """Earlier instructions and outputs, by who said them. Raises DataError."""
    found = []
    history = record.fields.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        match pair:
            case [str(asked), str(said)]:
                found += [("user", asked), ("assistant", said)]
            case _:
                raise record.refusal(
                    f"a history with {str(pair)[:40]}",
                    'history: [["an instruction", "its output"], ...]',
                )
    return found
