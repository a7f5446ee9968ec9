"""Read preference pairs: two answers to one prompt, in the forms that public data sets have.

prompt, chosen, rejected       three texts, or three lists of messages
chosen, rejected               two whole conversations or texts, which begin with the prompt
prompt (a text), chosen, rejected      whole conversations in which the prompt is a user message
prompt, chosen, rejected               whole texts that begin with the prompt
messages, chosen, rejected             a conversation and two ends of it, of one message or more
instruction, input, chosen, rejected   an instruction of Alpaca and two outputs
chosen, rejected                       a whole conversation, and a text for its last message

A record becomes two sequences, chosen and then rejected, in which the turns (or characters) after
the prompt are trained on. Records with an empty answer, or the same answer twice, are left out and
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import takewhile

import numpy as np

from furlong.data.chat import Turns
from furlong.data.fields import Turn, answers, instruction_turns, messages_of, num_common, tools_of
from furlong.data.records import SourceRecord
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Rendered
from furlong.errors import DataError, in_short

SAME = "pairs with the same answers left out"
EMPTY = "pairs with an empty answer left out"

# Other trainers' names of a prompt, which would be lost beside texts without `prompt`.
_PROMPTS = ("input", "question", "query", "messages")
_PAIR = "prompt, chosen and rejected, or whole texts or conversations that begin alike"


def read_pair(record: SourceRecord) -> tuple[Rendered | Turns, ...] | str:
    """Return the chosen and the rejected sequence, or the reason why the pair is left out.

    Raises:
        DataError: the record is in none of the forms that this module reads.
    """
    if is_of_texts(record):
        return _texts(record, record.fields["chosen"], record.fields["rejected"])
    chosen, rejected, first = _conversations(record)
    if chosen == rejected:
        return SAME
    if not (answers(chosen[first:]) and answers(rejected[first:])):
        return EMPTY
    tools = tools_of(record)
    return tuple(Turns(record.origin, turns, tools, first) for turns in (chosen, rejected))


def is_of_texts(record: SourceRecord) -> bool:
    """Return whether a pair is two texts, which no chat template renders."""
    is_instruction = record.fields.get("prompt") is None and "instruction" in record.fields
    answers = (record.fields["chosen"], record.fields["rejected"])
    return all(isinstance(one, str) for one in answers) and not is_instruction


def check_pair(pair: Items[Encoded], *, of_texts: bool) -> list[Encoded] | str:
    """Return the two sequences of a pair, or the reason why the pair is left out: both are equal,
    or one has no answer.

    In plain texts (`of_texts`), labels are added to the first token that differs and to all tokens
    after it, so that these are trained on. The last word of the common beginning may be tokenized
    differently in each text.
    """
    chosen, rejected = pair
    if np.array_equal(chosen.input_ids, rejected.input_ids):
        return SAME
    found = list(pair)
    if of_texts:
        shorter = min(len(chosen.input_ids), len(rejected.input_ids))
        differ = chosen.input_ids[:shorter] != rejected.input_ids[:shorter]
        first = int(differ.argmax()) if differ.any() else shorter
        for number, one in enumerate(pair):
            labels = one.labels.copy()
            labels[first:] = one.input_ids[first:]
            found[number] = replace(one, labels=labels)
    is_learnt = [(one.labels[1:] != IGNORE_INDEX).any() for one in found]
    return found if all(is_learnt) else EMPTY


def _texts(record: SourceRecord, chosen: str, rejected: str) -> tuple[Rendered, ...] | str:
    if chosen == rejected:
        return SAME
    prompt = record.fields.get("prompt")
    if prompt is None:
        start = num_common(chosen, rejected)
        # The difference of their log-probabilities does not depend on where the prompt ends: common
        # tokens add the same to both.
        foreign = next((name for name in _PROMPTS if name in record.fields), None)
        if foreign is not None or not chosen[:start].strip():
            beside = f"texts beside {foreign}" if foreign else "two texts that begin differently"
            change = "add the prompt of each record"
            if foreign:
                change = f"set data.fields: {{prompt: {foreign}}}"
            raise record.refusal(f"{beside}, without a prompt", _PAIR, change)
    elif not isinstance(prompt, str):
        raise record.refusal(
            "a prompt of messages with answers that are texts",
            "a prompt and two answers of one kind",
            'write each answer as [{"role": "assistant", "content": "..."}]',
        )
    else:
        start = _repeated(prompt, chosen, rejected)
        if not start:
            start = len(prompt)
            chosen, rejected = prompt + chosen, prompt + rejected
    if not (chosen[start:].strip() and rejected[start:].strip()):
        return EMPTY
    return tuple(Rendered(text, ((start, len(text)),)) for text in (chosen, rejected))


def _conversations(record: SourceRecord) -> tuple[list[Turn], list[Turn], int]:
    """Return the turns of both conversations, and the number of turns in the prompt. Raises
    DataError."""
    chosen, rejected = (_answer(record, name) for name in ("chosen", "rejected"))
    prompt = record.fields.get("prompt")
    if prompt is None and not num_common(chosen, rejected) and (asked := _asked(record)):
        return asked + chosen, asked + rejected, len(asked)
    if prompt is not None and not isinstance(prompt, str):
        turns = messages_of(record, "prompt")
        first = len(turns)
        whole = [answer[:first] == turns for answer in (chosen, rejected)]
        if all(whole) and turns:  # both answers are whole conversations
            return chosen, rejected, first
        if not turns or any(whole) or any(_repeats(own, turns) for own in (chosen, rejected)):
            raise record.refusal(
                "a prompt that one answer repeats, or both in part" if turns else "an empty prompt",
                "two answers behind the prompt, or two whole conversations",
                "remove the prompt's messages from both answers",
            )
        return turns + chosen, turns + rejected, first
    first = num_common(chosen, rejected)
    if not first:
        given = "without a prompt" if prompt is None else "beside a prompt that is a text"
        change = 'add the prompt of each record as [{"role": "user", "content": "..."}]'
        raise record.refusal(f"two conversations that begin differently, {given}", _PAIR, change)
    if prompt is not None and ("user", prompt.strip()) not in map(_said, chosen[:first]):
        raise record.refusal(
            f"a prompt {in_short(prompt, 40)!r} that is no turn of the user in both conversations",
            "the prompt among the turns with which chosen and rejected begin",
            'write prompt as [{"role": "user", "content": "..."}] if it precedes them, or remove'
            " the record",
        )
    return chosen, rejected, first


def _answer(record: SourceRecord, name: str) -> list[Turn]:
    """Return the turns of the answer `name`. An answer that is a text becomes one assistant
    message; if the other answer is a whole conversation, this message replaces its last one. Raises
    DataError."""
    given = record.fields[name]
    if not isinstance(given, str):
        return messages_of(record, name)
    said = {"role": "assistant", "content": given}
    other = "rejected" if name == "chosen" else "chosen"
    if isinstance(record.fields[other], list):
        turns = messages_of(record, other)
        if turns and turns[-1]["role"] == "assistant" and len(turns) > 1:
            return [*turns[:-1], said]
    return [said]


def _asked(record: SourceRecord) -> list[Turn]:
    """Return the prompt's turns in a record without `prompt`: those of its instruction or its
    `messages`."""
    if "instruction" in record.fields:
        return instruction_turns(record)
    if isinstance(record.fields.get("messages"), list):
        return messages_of(record, "messages")
    return []


def _said(turn: Turn) -> tuple[str, str]:
    return turn["role"], turn.get("content", "").strip()


def _repeats(answer: list[Turn], prompt: list[Turn]) -> bool:
    """Return whether one of the prompt's messages occurs in an answer before the first assistant
    message."""
    head = takewhile(lambda turn: turn["role"] in ("system", "developer", "user"), answer)
    return not {_said(turn) for turn in prompt}.isdisjoint(map(_said, head))


def _repeated(prompt: str, chosen: str, rejected: str) -> int:
    """Return the length of the prompt, with or without trailing blanks, if both texts begin with
    it; otherwise 0."""
    for own in (prompt, prompt.rstrip()):
        if own.strip() and chosen.startswith(own) and rejected.startswith(own):
            return len(own)
    return 0


def require_answers(pair: Items[Encoded], limit: int, origin: str, noun: str = "pair") -> None:
    """Require that the first `limit` tokens of both sequences hold an answer and are not equal.

    Args:
        pair: the two sequences of a record.
        limit: the length to which they are truncated.
        origin: file and line of the record.
        noun: `pair`, or `answer` if the second sequence is a mismatch of KTO, which may be equal.

    Raises:
        DataError: a sequence has no answer left, or both are the same.
    """
    chosen, rejected = pair
    none = any((one.labels[1:limit] == IGNORE_INDEX).all() for one in pair)
    same = np.array_equal(chosen.input_ids[:limit], rejected.input_ids[:limit])
    if none or (same and noun == "pair"):
        longer = max(len(one.input_ids) for one in pair)
        what = "are a prompt and no answer" if none else "are the same in both answers"
        raise DataError(
            given=f"{noun} of {longer:,} tokens, of which the first {limit:,} {what}",
            required="answers within data.max_seq_len, those of a pair not the same",
            source=origin,
            change="raise data.max_seq_len, set data.too_long to drop, or shorten the prompt",
        )


def with_mismatches(
    answers: Iterable[tuple[SourceRecord, list[Encoded]]],
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Yield each record with its answer and a mismatch: its prompt with the next record's answer.

    `train.loss: kto` estimates the KL divergence from mismatches (arXiv:2402.01306). The last
    record takes the answer of the first.

    Raises:
        DataError: there is a single record.
    """
    first: Encoded | None = None
    before: tuple[SourceRecord, Encoded] | None = None
    for record, (own,) in answers:
        if before is not None:
            yield before[0], [before[1], _mismatch(before[1], own)]
        first, before = first or own, (record, own)
    if before is None or first is None:
        return
    record, last = before
    if last is first:
        raise record.refusal(
            "the only answer of its source",
            "at least two answers in a source: train.loss: kto compares each with another one's",
            "add answers to the source, or write its record into another one",
        )
    yield record, [last, _mismatch(last, first)]


def _mismatch(asked: Encoded, said: Encoded) -> Encoded:
    """Return the prompt of one record with the answer of another."""
    prompt, start = asked.input_ids[: _answer_start(asked)], _answer_start(said)
    labels = np.concatenate([np.full_like(prompt, IGNORE_INDEX), said.labels[start:]])
    return Encoded(np.concatenate([prompt, said.input_ids[start:]]), labels, asked.desirable)


def _answer_start(one: Encoded) -> int:
    """Return the index of the first token that is trained on."""
    return int((one.labels != IGNORE_INDEX).argmax())
