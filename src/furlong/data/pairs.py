"""Two answers to one prompt: records of `chosen` and `rejected`, as they lie around.

prompt, chosen, rejected       three texts, or three lists of messages
chosen, rejected               two whole conversations, or texts: what they begin with is the prompt
prompt (a text), chosen, rejected      whole conversations in which the prompt is a turn of the user
prompt, chosen, rejected               whole texts that begin with the prompt

A record becomes two sequences, chosen and then rejected, of which the turns (or characters) behind
the prompt are learnt. Without an answer, or with the same one twice, there is nothing to prefer:
such records are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

import numpy as np

from furlong.data.cache import TokenizedSource
from furlong.data.chat import (
    Conversation,
    messages_of,
    template_of,
    tools_of,
)
from furlong.data.records import LeftOut, SourceRecord
from furlong.data.rendering import rendering
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Rendered, encode_rendered, text_of
from furlong.errors import DataError

SAME, EMPTY = "pairs with the same answers", "pairs with an empty answer"

REPEATED = "pairs of texts that repeat their prompt"
"""Counted with what is left out, though they are not: they are read as whole texts."""

ALONE = "pairs of texts of which one answer alone begins with the prompt"
TOOLS_OF_TEXTS = "pairs of texts with tools"
NO_EOS = "sequences without EOS, which the tokenizer lacks,"

# Other programs' names of a prompt: beside texts without `prompt` they would be lost.
_PROMPTS = (
    "instruction", "input", "question", "query", "messages", "conversations", "conversation",
    "history", "system", "context",
)  # fmt: skip
_Answers = tuple[Rendered, Rendered] | str
"""Chosen and rejected, or why they are left out."""
_Turns = list[dict[str, Any]]


def encode_pairs(
    records: Iterable[SourceRecord], tokenizer: Any, left_out: LeftOut
) -> Iterator[Encoded]:
    """Every record as two sequences, chosen and rejected; see `encode`. The first record decides
    whether answers are texts or conversations. Raises UserError."""
    records = iter(records)
    first = next(records)
    is_chat = not isinstance(first.fields["chosen"], str)
    texts = nullcontext(partial(render_texts, left_out=left_out))
    with rendering(tokenizer, render_turns) if is_chat else texts as render:
        found = _rendered(chain((first,), records), render, left_out)
        encoded = encode_rendered(found, tokenizer, by_template=is_chat)
        for pair in zip(encoded, encoded, strict=True):
            chosen, rejected = pair if is_chat else _learnt_from_difference(*pair)
            if np.array_equal(chosen.input_ids, rejected.input_ids):
                left_out.add(SAME, chosen)
            elif not (_is_learnt(chosen) and _is_learnt(rejected)):
                left_out.add(EMPTY, chosen)
            else:
                yield chosen
                yield rejected


def render_texts(record: SourceRecord, left_out: LeftOut) -> _Answers:
    """The answers of a record of texts. Where both repeat the prompt they are the whole texts, and
    counted. Raises DataError."""
    chosen, rejected = text_of(record, "chosen"), text_of(record, "rejected")
    if chosen == rejected:
        return SAME
    if record.fields.get("tools"):
        left_out.add(TOOLS_OF_TEXTS, record)
    if record.fields.get("prompt") is not None:
        if not isinstance(record.fields["prompt"], str):
            raise record.refusal(
                "a prompt of messages with answers that are texts",
                "a prompt and two answers of one kind",
                'write each answer as [{"role": "assistant", "content": "..."}]',
            )  # fmt: skip
        prompt = text_of(record, "prompt")
        start = _repeated(prompt, chosen, rejected)
        if start:
            left_out.add(REPEATED, record)
            prompt = chosen[:start]
        else:
            if _repeated(prompt, chosen, chosen) or _repeated(prompt, rejected, rejected):
                left_out.add(ALONE, record)
            chosen, rejected = prompt + chosen, prompt + rejected
    else:
        prompt = _common_text(record, chosen, rejected)
    start = len(prompt)
    if not (chosen[start:].strip() and rejected[start:].strip()):
        return EMPTY
    ranges = [((start, len(text)),) for text in (chosen, rejected)]
    return Rendered(chosen, ranges[0]), Rendered(rejected, ranges[1])


def render_turns(
    record: SourceRecord, tokenizer: Any, before: Callable[[], object] = lambda: None
) -> _Answers:
    """The answers of a record of conversations; see `render_conversation`. Raises UserError."""
    tools = tools_of(record)
    template = template_of(tokenizer, tools)
    chosen, rejected, first = _conversations(record, template)
    if chosen == rejected:
        return SAME
    if not (_answers(chosen[first:]) and _answers(rejected[first:])):
        return EMPTY
    make = partial(Conversation, record, tokenizer, template, tools, before=before, first=first)
    return make(turns=chosen).rendered(), make(turns=rejected).rendered()


def require_pair(found: Iterable[tuple[Sized, Mapping[str, int]]], key: str) -> None:
    """Raises DataError where all that sources held was left out as no pair. `found`: by source, its
    rows and how many of what were left out; `key`: where the sources were named."""
    counts: Counter[str] = Counter()
    for rows, left_out in found:
        if len(rows):
            return
        counts.update({what: left_out.get(what, 0) for what in (SAME, EMPTY)})
    if counts.total():
        raise DataError(
            given=" and ".join(f"{number:,} {what}" for what, number in counts.items() if number)
            + ", and no other",
            required="at least one pair of two answers that differ behind their prompt",
            source=key,
            change="check that the right files are named, and what chosen and rejected hold",
        )


def require_answers(source: TokenizedSource, row: int, limit: int) -> None:
    """Raises DataError for a pair, in `row` and the one behind, of which the first `limit` tokens
    hold no answer, or the same twice."""
    (chosen, labels), (rejected, others) = (source.tokens(r) for r in (row, row + 1))
    none = any((x[1:limit] == IGNORE_INDEX).all() for x in (labels, others))
    if none or np.array_equal(chosen[:limit], rejected[:limit]):
        what = "are a prompt and no answer" if none else "are the same in both answers"
        raise DataError(
            given=f"a pair of {max(len(chosen), len(rejected)):,} tokens, of which the first"
            f" {limit:,} {what}",
            required="two answers that differ within data.max_seq_len",
            source=source.origin(row),
            change="raise data.max_seq_len, set data.too_long to drop, or shorten the prompt",
        )


def _conversations(record: SourceRecord, template: str) -> tuple[_Turns, _Turns, int]:
    """The turns of both conversations, and how many of them are the prompt. Raises DataError."""
    chosen = messages_of(record, template, "chosen")
    rejected = messages_of(record, template, "rejected")
    prompt = record.fields.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        turns = messages_of(record, template, "prompt")
        first = len(turns)
        if not turns:
            raise _without_prompt(record, "a prompt of no message", "messages")
        whole = [answer[:first] == turns for answer in (chosen, rejected)]
        if all(whole):  # the whole conversations after all
            return chosen, rejected, first
        repeats = [_repeats(answer, turns) for answer in (chosen, rejected)]
        if any(whole) or any(repeats):
            which = "both repeat in part" if all(repeats) and not any(whole) else (
                f"{'chosen' if whole[0] or repeats[0] else 'rejected'} alone repeats"
            )  # fmt: skip
            raise record.refusal(
                f"a prompt that {which}",
                "two answers behind the prompt, or two whole conversations",
                "remove the prompt's messages from both answers",
            )  # fmt: skip
        return turns + chosen, turns + rejected, first
    first = _common(chosen, rejected)
    if not first:
        raise _without_prompt(record, "two conversations that begin differently", "messages")
    if isinstance(prompt, str) and not any(
        turn["role"] == "user" and str(turn.get("content")).strip() == prompt.strip()
        for turn in chosen[:first]
    ):
        raise record.refusal(
            f"a prompt {prompt[:40]!r} that is no turn of the user in both conversations",
            "the prompt among the turns with which chosen and rejected begin",
            'write prompt as [{"role": "user", "content": "..."}] if it precedes them, or remove'
            " the record",
        )  # fmt: skip
    return chosen, rejected, first


def _repeats(answer: _Turns, prompt: _Turns) -> bool:
    """Whether what precedes the first answer of the assistant holds a message of the prompt."""
    said = {(turn["role"], str(turn.get("content")).strip()) for turn in prompt}
    head = takewhile(lambda turn: turn["role"] in ("system", "developer", "user"), answer)
    return any((turn["role"], str(turn.get("content")).strip()) in said for turn in head)


def _repeated(prompt: str, chosen: str, rejected: str) -> int:
    """The characters with which both texts repeat the prompt, but perhaps for blanks at its end; 0
    where one of them does not."""
    for own in (prompt, prompt.rstrip()):
        if own.strip() and chosen.startswith(own) and rejected.startswith(own):
            return len(own)
    return 0


def _common(chosen: Items[Any], rejected: Items[Any]) -> int:
    """The number of turns, or of characters, with which both begin."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shorter = min(len(chosen), len(rejected))
    return next((number for number, (a, b) in pairs if a != b), shorter)


def _answers(turns: _Turns) -> bool:
    """Whether the assistant says or calls anything."""
    return any(
        turn["role"] == "assistant" and (str(turn.get("content") or "").strip()
                                         or turn.get("tool_calls"))
        for turn in turns
    )  # fmt: skip


def _common_text(record: SourceRecord, chosen: str, rejected: str) -> str:
    """The characters with which two whole texts begin. Sums of log-probabilities of a pair do not
    depend on where in them the prompt ends: tokens that both have add the same to both."""
    foreign = [name for name in _PROMPTS if name in record.fields]
    common = chosen[: _common(chosen, rejected)]
    if foreign or not common.strip():
        what = f"texts beside {foreign[0]}" if foreign else "two texts that begin differently"
        raise _without_prompt(record, what, "text", *foreign[:1])
    return common


def _rendered(
    records: Iterable[SourceRecord], render: Callable[[SourceRecord], _Answers], left_out: LeftOut
) -> Iterator[tuple[SourceRecord, Rendered]]:
    """The answers of each record, one after the other."""
    for record in records:
        found = render(record)
        if isinstance(found, str):
            left_out.add(found, record)
        else:
            for answer in found:
                left_out.counts.update(answer.told)
                yield record, answer


def _learnt_from_difference(chosen: Encoded, rejected: Encoded) -> tuple[Encoded, Encoded]:
    """Texts of which all tokens are learnt from the first one on that differs: the last word of
    what both begin with may be other tokens in each of them."""
    shorter = min(len(chosen.input_ids), len(rejected.input_ids))
    differ = chosen.input_ids[:shorter] != rejected.input_ids[:shorter]
    first = int(differ.argmax()) if differ.any() else shorter
    pair = []
    for one in (chosen, rejected):
        labels = one.labels.copy()
        labels[first:] = one.input_ids[first:]
        pair.append(replace(one, labels=labels))
    return pair[0], pair[1]


def _is_learnt(encoded: Encoded) -> bool:
    return bool((encoded.labels[1:] != IGNORE_INDEX).any())


def _without_prompt(record: SourceRecord, what: str, kind: str, *foreign: str) -> DataError:
    change = f"rename {foreign[0]} to prompt" if foreign else "add the prompt of each record"
    return record.refusal(
        f"{what}, without a prompt",
        f"prompt ({kind}), chosen and rejected, or whole conversations that begin alike", change,
    )  # fmt: skip
