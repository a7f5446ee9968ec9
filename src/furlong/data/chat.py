"""Render conversations with a chat template, and find the assistant's answers in the text.

A template with `{% generation %}` tags shows where the answers are: a mark is rendered at each tag,
and then removed from the text.

For any other template, two texts are rendered for each answer: the prompt for it, and the
conversation up to the end of the answer. The answer is what the second text adds to the first. The
whole conversation's text must begin with both texts, which is checked. A template fails this check
if, for instance, it drops the reasoning of earlier answers. furlong then writes the text with the
thoughts of every answer, in the first of these ways that changes nothing else: by one of its
training templates, by a switch of the template, or with each answer as the template writes it where
the conversation ends with it.

An answer ends with a token at which the model stops. In some templates, such as that of GLM-4.5,
this token begins the next message. It is trained on there, and added to a text that ends with an
answer.

The text is also checked for what it leaves out: each content, thought, tool call and tool result is
searched in the text of its message. It is an error if part of an answer that is trained on, or of a
user or tool message before such an answer, is missing. Anything else that is missing is counted,
and reported with the other counts of the source.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import chain
from typing import Any

from furlong.data.fields import MARKS, Turn, answers, may_be_trained, num_common
from furlong.data.tokenize import Rendered
from furlong.data.training_templates import (
    FOLLOWED,
    PROBES,
    THOUGHTFUL,
    TOOL,
    fitting_templates,
    marks_of,
    training_templates,
)
from furlong.errors import ConfigError, DataError, in_short

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # transformers gives each as the others
_LINKS = ("tool_call_id", "id", "name", "is_error")  # they link a result to its call
_READ = frozenset(("role", "content", "tool_calls", *_THOUGHTS, *MARKS))
_THINK = re.compile("</?think>")
_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
DATE = "strftime_now"
"""The function with which a template writes the date, and the key of `chat_template_kwargs` that
sets the day."""
_DATE = re.compile(rf"{DATE}\(\s*(['\"])(.*?)\1\s*\)")
_NUMBER = re.compile("[0-9]")  # a template may write the time
_PROBE = "furlong-3f9c"  # occurs in no template
_OPEN, _CLOSE = f"{_PROBE}(", f"){_PROBE}"
_MARK = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")
_EMPTY = re.compile(r"<think>\s*</think>")
_EMPTY_BEFORE = re.compile(rf"{_EMPTY.pattern}(\n\n)?(?!\s*\Z)")  # not those that end a prompt
# The prompt may contain their beginning.
_EMPTY_FIRST = re.compile(r"\s*(<think>)?\s*</think>\s*")
_OPENED = ("<think>", "<think>\n")
_BY_NAME = "by furlong's training template "
_CANNOT = "a chat template that cannot be masked"
_MANY = 2
"""Conversations of more answers are masked by furlong's template if it writes the same text."""
_MOST_TRIED = 3
"""The most values of a kind to replace, one by one, when the text has them in no known form."""
_SHOWN_CHARS = 24

Range = tuple[int, int]
"""A half-open range of characters."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation of a record: its turns and tools, and which of the turns are trained on."""

    origin: str
    """File and line of the record."""
    turns: list[Turn]
    tools: list[Any] | None = None
    first: int = 0
    """The index of the first turn that may be trained on."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Other variables of the template, `chat_template_kwargs`."""
    is_trained_whole: bool = False
    """Whether all of the text is trained on."""


class CannotBeMaskedError(DataError):
    """A template leaves out part of a message, or its text does not show who says what."""

    why = ""
    """The fault of the template as a predicate, such as "writes earlier answers anew"."""


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, eot_tokens: Iterable[str] = ()) -> None:
        """Use the chat template of a tokenizer. `eot_tokens`: tokens that end a turn; after an
        answer, they are trained on."""
        self._tokenizer = tokenizer
        ends = self._eot_tokens = tuple(eot_tokens)
        self._added = tokenizer.get_added_vocab()
        self._marks = (*ends, *self._added)
        stops = (tokenizer.eos_token, *getattr(tokenizer, "stop_tokens", ()), *ends)
        self._stops = tuple(filter(None, stops))
        """The tokens at which the model is known to stop."""
        self._ends: dict[_Template, str | None] = {}
        self._next_marks: dict[tuple[_Template, bool], str] = {}
        self._templates: dict[str, _Template] = {}
        self._keeping: dict[_Template, _Keeping] = {}
        self._trained_by: dict[_Template, tuple[str, _Template] | None] = {}

    def render(self, turns: Turns) -> Rendered:
        """Return the text of a conversation, and the character ranges in it that are trained on.

        Raises:
            DataError: the template cannot render the conversation, or does not show its answers.
            ConfigError: the tokenizer has no template, or lacks tokens that the template writes.
        """
        template = self._template_of(turns)
        for number, turn in enumerate(turns.turns, start=1):
            role = turn["role"]
            if role not in _ROLES and not template.names(role):
                is_said = any(one["role"] == "assistant" for one in turns.turns)
                raise DataError(
                    given=f"message {number} of role {role!r}",
                    required=f"one of {', '.join(sorted(_ROLES))}, or a role of the chat template",
                    source=turns.origin,
                    change=f"name the role in data.fields: {{roles: {{{role}:"
                    f" {'user' if is_said else 'assistant'}}}}}, or rename it;"
                    " what is to be learnt is said by the assistant",
                )
        try:
            text, ranges, notes, template = self._masked_in_a_way(turns, template)
        except CannotBeMaskedError as error:
            if change := self._change(turns, template):
                error.change = f"{change}; or {error.change}"
            raise
        if unknown := self._unknown(template, text):
            raise ConfigError(
                given=f"a chat template that writes {', '.join(unknown)}, no token of"
                f" {self._tokenizer.name_or_path}",
                required="marks that are tokens of the model's vocabulary, or of model.new_tokens",
                source="data.chat_template, or the model's own",
                change=self._offer(),
            )
        if turns.is_trained_whole:
            return Rendered(text, None, True, tuple(notes))
        ranges = self._as_generated(turns, template, text, ranges)
        text, ranges = self._with_stop(turns, template, text, ranges)
        notes += self._on_the_end(turns, template, text, ranges)
        return Rendered(text, tuple(ranges), True, tuple(notes))

    def _offer(self) -> str:
        names = " or ".join(fitting_templates(self._added.__contains__))
        return f"set data.chat_template to {names}, or use the tokenizer of a chat model"

    def _masked_in_a_way(
        self, own: Turns, template: _Template
    ) -> tuple[str, list[Range], list[str], _Template]:
        """Return what `_masked` returns, and the template that was used: the template, or that of
        the first of `_ways` in which the conversation can be masked. Raises DataError."""
        try:
            return *self._masked(own, template), template
        except CannotBeMaskedError as refused:
            error, why = refused, refused.why
        known = self._training_template(template, own)
        for how, other, conversation in self._ways(own, template, known):
            try:
                text, ranges, notes = self._masked(conversation, other)
            except CannotBeMaskedError as last:
                error = last if known is not None and other is known[1] else error
                continue
            except DataError:
                continue
            if not self._unknown(other, text):
                note = f"conversations {how}, since the model's own {why}"
                return text, ranges, [*notes, note], other
        raise error

    def _ways(
        self, own: Turns, template: _Template, known: tuple[str, _Template] | None
    ) -> Iterator[tuple[str, _Template, Turns]]:
        """Yield ways to render a conversation that keep the thoughts of every answer and change
        nothing else: the way in words, the template, and the conversation to render with it.

        `known`: furlong's training template of the model, if it has one.
        """
        if known is not None:
            yield _BY_NAME + known[0], known[1], own
        bares = [self._bare(one, template) for one in _short_first(own)]
        opens_thoughts = (bares[-1][0] or "").endswith(_OPENED)  # others may know no thoughts
        text = template.tried(own)
        for _, how, other, conversation in self._tries(own, template):
            if other is template:
                is_free = len(conversation.kwargs) > len(own.kwargs)
                may_be = is_free and template.tried(conversation) != text
            else:
                may_be = opens_thoughts
            if may_be and all(
                None not in bare and self._bare(one, other, bare) == bare
                for one, bare in zip(_short_first(conversation), bares, strict=True)
            ):
                yield how, other, conversation
        if not template.has_tags and any(_is_thinking(own.turns[n]) for n in _trained_turns(own)):
            keeping = self._keeping.setdefault(template, _Keeping(template.text, self._tokenizer))
            yield "with every answer as the template writes the last one", keeping, own

    def _tries(
        self, own: Turns, template: _Template
    ) -> Iterator[tuple[str, str, _Template, Turns]]:
        """Yield changes of a run's settings: each switch of the template, then each of furlong's
        templates. A change has two texts, for an error and for a note, the template, and the
        conversation to render with it."""
        turned = ((key, not to) for key, to in own.kwargs.items() if isinstance(to, bool))
        for name, value in dict.fromkeys((*template.switches, *turned)):
            switch = f"{{{name}: {json.dumps(value)}}}"
            changed = replace(own, kwargs={**own.kwargs, name: value})
            how = f"with chat_template_kwargs: {switch}"
            yield f"set data.chat_template_kwargs: {switch}", how, template, changed
        for name, text in training_templates().items():
            yield f"set data.chat_template: {name}", _BY_NAME + name, self._of(text), own

    def _unknown(self, template: _Template, text: str) -> list[str]:
        """Return the special tokens of a template that a text has and the tokenizer has not."""
        return sorted(m for m in template.marks if m in text and m not in self._added)

    def _change(self, own: Turns, template: _Template) -> str | None:
        """Return a change of the run's settings after which the conversation can be trained on, as
        advice in words; None if no change helps.

        Three kinds of change are tried: another value for a key of `chat_template_kwargs` that the
        template reads, one of furlong's templates that writes the same prompt, and training on the
        last answers alone.
        """
        last = ("set data.train_on: last", "", template, only_last_answers(own))
        for change, _, other, conversation in (*self._tries(own, template), last):
            with suppress(DataError):
                for one in _short_first(conversation):
                    text, *_ = self._masked_in_a_way(one, other)
                first = _first_answer(own)
                prompts = [one.write(own, first, prompt=True) for one in (template, other)]
                if prompts[0] == prompts[1] and not self._unknown(other, text):
                    return change
        return None

    def _bare(
        self, own: Turns, template: _Template, like: tuple[str | None, str | None] = (None, None)
    ) -> tuple[str | None, str | None]:
        """Return the prompt for the first answer, and the text of the conversation, both without
        thoughts; None for what the template refuses. Two templates for which both are equal differ
        in thoughts alone.

        `like`: the texts to compare with. The text is rendered only if the prompt is equal.
        """
        prompt, text = None, None
        with suppress(DataError):
            written = template.write(own, _first_answer(own), prompt=True)
            prompt = _EMPTY_BEFORE.sub("", written)
        if prompt is not None and like[0] in (None, prompt):
            bare = replace(own, turns=[*map(_unthinking, own.turns)])
            shaped = (template.tried(_shaped(bare, shape)) for shape in _shapes(bare))
            text = next((one for one in shaped if one is not None), None)
        return prompt, None if text is None else _EMPTY_BEFORE.sub("", text)

    def _with_stop(
        self, own: Turns, template: _Template, text: str, ranges: list[Range]
    ) -> tuple[str, list[Range]]:
        """Return the text and the ranges, with the token at which the model stops added to both if
        the text ends with an answer after which the template writes it in the next message only."""
        is_last = _trained_turns(own)[-1:] == [len(own.turns) - 1]
        if not (ranges and is_last) or text[ranges[-1][1] :].strip():
            return text, ranges
        start, stop = ranges[-1]
        stops = self._stops_of(template)
        if _end_of(text[start:stop], self._stops) is None and (
            (mark := self._next_mark(own, template)).strip() in stops
        ):
            text = text[:stop] + mark
            ranges = [*ranges[:-1], (start, len(text))]
        return text, ranges

    def _stops_of(self, template: _Template) -> tuple[str, ...]:
        """Return the tokens that are trained on after an answer. A template with tags excludes all
        but `eot_tokens`."""
        return self._eot_tokens if template.has_tags else self._stops

    def _next_mark(self, own: Turns, template: _Template) -> str:
        """Return the special token with which the template begins a message after an answer like
        the last one, with the white space before the token; an empty text if there is none."""
        has_calls = bool(own.turns[-1].get("tool_calls"))
        if (template, has_calls) not in self._next_marks:
            self._next_marks[template, has_calls] = ""
            with suppress(DataError):
                probe = Turns(own.origin, FOLLOWED[has_calls], [TOOL] if has_calls else None)
                text, ranges, _ = self._masked(probe, template, is_proved=False)
                if mark := _one_of(self._marks).match(text, ranges[0][1]):
                    self._next_marks[template, has_calls] = mark[0]
        return self._next_marks[template, has_calls]

    def _on_the_end(
        self, own: Turns, template: _Template, text: str, ranges: list[Range]
    ) -> Iterator[str]:
        """Yield notes on the conversation if its last answer does not end with a token at which the
        model stops, or another one with no special token. `text`: the text of the conversation;
        `ranges`: its ranges that are trained on."""
        if not ranges:
            return
        *others, end = (_end_of(said, self._marks) for said in _parts(text, ranges))
        if end and None in others and len(ranges) == len(_trained_turns(own)):
            yield (
                "conversations with an answer before the last one that ends without a special"
                " token: where to stop is not learnt there"
            )
        if end is None:
            mark = self._next_mark(own, template).strip()
            way = f"data.eot_tokens: [{mark}]" if mark else "the template writes none"
            way = "data.eot_tokens" if text[ranges[-1][1] :].strip() else way
            yield (
                "conversations whose last answer ends without a special token: where to stop"
                f" is not learnt ({way})"
            )
        elif end not in self._stops:
            if template not in self._ends:
                self._ends[template] = None
                with suppress(DataError):  # how a plain answer ends
                    probe = Turns(own.origin, PROBES[0][0])
                    said, found, _ = self._masked(probe, template, is_proved=False)
                    self._ends[template] = _end_of(_parts(said, found)[-1], self._marks)
            if end != self._ends[template]:
                yield (
                    f"conversations whose last answer ends with {end}, which is not the EOS:"
                    " generation stops there only if generation_config.json names it"
                )

    def _template_of(self, turns: Turns) -> _Template:
        try:
            return self._of(str(self._tokenizer.get_chat_template(None, turns.tools)))
        except ValueError as error:
            raise ConfigError(
                given=f"{self._tokenizer.name_or_path}: a tokenizer without a default chat"
                " template",
                required="a chat template, since the data has messages",
                source="model.name",
                change=self._offer(),
            ) from error

    def _of(self, text: str) -> _Template:
        return self._templates.setdefault(text, _Template(text, self._tokenizer))

    def _masked(
        self, own: Turns, template: _Template, *, is_proved: bool = True
    ) -> tuple[str, list[Range], list[str]]:
        """Return the text of a conversation, the ranges that are trained on (empty if the whole
        text is trained on), and notes.

        Templates expect tool calls in different forms, so each form in `_shapes` is tried until one
        raises no error. `is_proved`: whether to check what the text leaves out; see
        `_Template.proved`. Raises DataError if each form raises an error.
        """
        errors: list[DataError] = []
        for shape in _shapes(own):
            shaped = _shaped(own, shape)
            try:
                if own.is_trained_whole:
                    text, ranges = template.write(shaped), list[Range]()
                else:
                    text, ranges = self._ranges_of(shaped, template)
                return text, ranges, template.proved(own, shape, text, ranges) if is_proved else []
            except DataError as error:
                errors.append(error)
        raise next((one for one in errors if isinstance(one, CannotBeMaskedError)), errors[0])

    def _ranges_of(self, own: Turns, template: _Template) -> tuple[str, list[Range]]:
        if template.has_tags:
            return template.by_tags(own)
        num_answers = sum(turn["role"] == "assistant" for turn in own.turns)
        if num_answers > _MANY and (known := self._training_template(template, own)):
            # Tags take two renderings per conversation, prefixes up to two per answer.
            with suppress(DataError):
                found = known[1].by_tags(own)
                if found[0] == template.write(own):
                    return found
        return template.by_prefixes(own)

    def _training_template(self, template: _Template, own: Turns) -> tuple[str, _Template] | None:
        """Return the name and template of furlong's training template that writes the same answers
        as `template`; None if there is none."""
        if template not in self._trained_by:
            ours = ((name, self._of(text)) for name, text in training_templates().items())
            found = (one for one in ours if self._writes_the_same(own, template, one[1]))
            self._trained_by[template] = next(found, None)
        return self._trained_by[template]

    def _writes_the_same(self, own: Turns, template: _Template, other: _Template) -> bool:
        """Return whether two templates write the same answers in a few test conversations
        (`PROBES`).

        If a conversation has one answer, the whole texts must be equal; otherwise, the last answers
        must be equal. Conversations that `template` cannot render are skipped, and the result is
        false unless more than half remain. `own`: the conversation whose file and line errors name.
        """
        num_same = 0
        for turns, has_tools in PROBES:
            probe = Turns(own.origin, turns, [TOOL] if has_tools else None, len(turns) - 1)
            try:
                text, ranges, _ = self._masked(probe, template, is_proved=False)
            except DataError:
                continue  # nothing to compare with
            try:
                others, found, _ = self._masked(probe, other, is_proved=False)
            except DataError:
                return False
            said = _parts(text, self._as_generated(probe, template, text, ranges))
            is_first = sum(turn["role"] == "assistant" for turn in turns) == 1
            if said != _parts(others, self._as_generated(probe, other, others, found)) or (
                is_first and text != others
            ):
                return False
            num_same += 1
        return num_same > len(PROBES) // 2

    def _as_generated(
        self, own: Turns, template: _Template, text: str, ranges: list[Range]
    ) -> list[Range]:
        """Return the answers' ranges, changed to cover what a model generates.

        If a token at which the model stops follows an answer, the range is extended by it. If the
        template has put an empty thought at the start of an answer, the range begins after this
        thought, unless each prompt opens the thought, so that the model has to close it.
        """
        is_own = any(_EMPTY.search(turn.get("content", "")) for turn in own.turns)
        found, next_stop = [], _one_of(self._stops_of(template))
        for start, stop in ranges:
            if not is_own and _EMPTY_FIRST.match(text, start, stop):
                empty = template.empty.match(text, start, stop)
                may_skip = template.empty is not _EMPTY_FIRST
                must_close = own.kwargs.get("enable_thinking") or not may_skip
                if empty and not (must_close and text.endswith(_OPENED, 0, start)):
                    start = empty.end()
            if end := next_stop.match(text, stop):
                known = (end[1],) if end[1] in self._eot_tokens else self._stops
                stop = stop if text[start:stop].rstrip().endswith(known) else end.end()
            found.append((start, stop))
        return found


class _Template:
    """One chat template, which renders conversations and finds the answers in their texts."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text, self._tokenizer = text, tokenizer
        self._marks = tuple(tokenizer.get_added_vocab())
        self.has_tags = bool(_TAG.search(text))
        self.marks = marks_of(text)
        self._takes_parts = None if "text" in text else False
        """Whether it requires contents as lists of parts; None until it is asked."""

    def names(self, role: str) -> bool:
        return f"'{role}'" in self.text or f'"{role}"' in self.text

    @cached_property
    def switches(self) -> list[tuple[str, bool]]:
        """The keys of `chat_template_kwargs`, each with a value, that change the text or the prompt
        of a conversation with thoughts."""
        from transformers.utils.chat_template_utils import _get_template_variables

        probes = [Turns("", turns, [TOOL]) for turns in THOUGHTFUL]

        def texts(**kwargs: bool) -> list[str | None]:
            given = [replace(probe, kwargs=kwargs) for probe in probes]
            return [self.tried(own, prompt=prompt) for own in given for prompt in (False, True)]

        set_here = {"messages", "tools", "documents", "add_generation_prompt"}
        names = _get_template_variables(self.text) - set_here
        names = {name for name in names if not name.endswith("_token")}
        tried = ((one, to) for one in sorted(names) for to in (True, False))
        plain = texts()
        return [(one, to) for one, to in tried if texts(**{one: to}) != plain]

    @cached_property
    def empty(self) -> re.Pattern[str]:
        """A pattern of the empty thoughts at the start of an answer, with the white space that the
        prompt of `enable_thinking: false` has after them, if it has them."""
        probe = Turns("", [{"role": "user", "content": _PROBE}], kwargs={"enable_thinking": False})
        with suppress(DataError):
            if found := re.search(r"</think>(\s*)$", self.write(probe, prompt=True)):
                return re.compile(rf"\s*(<think>)?\s*</think>{found[1]}")
        return _EMPTY_FIRST

    def by_tags(self, own: Turns) -> tuple[str, list[Range]]:
        """Return the text of a conversation, and the ranges between generation tags that are
        trained on. Raises DataError."""
        text = self.write(own)
        # `return_assistant_tokens_mask` counts characters when a block is rendered, which is wrong
        # for a template that stores the rendered block and writes it later.
        marked, ranges = _unmarked(self.write(own, tags=True))
        if _NUMBER.sub("0", marked) != _NUMBER.sub("0", text):
            what = "it works on the text between its {% generation %} tags"
            raise self._refusal(own, f"{_CANNOT}: {what}")
        if not any(start < stop for start, stop in ranges) and answers(own.turns):
            raise self._refusal(own, f"{_CANNOT}: its {{% generation %}} tags enclose no answer")
        for number in reversed(range(own.first, len(own.turns))):
            if not may_be_trained(own.turns[number]):
                start, stop = (self._num_ranges(own, n, ranges) for n in (number, number + 1))
                ranges = ranges[:start] + ranges[stop:]
        return text, ranges[self._num_ranges(own, own.first, ranges) :]

    def by_prefixes(self, own: Turns) -> tuple[str, list[Range]]:
        """Return the text of a conversation, and the range that each answer adds to its prompt.

        Rendering two texts for every answer would take time quadratic in the number of answers. So
        the answers are first sorted into kinds (`_kinds`). Only the first, a middle and the last
        answer of each kind are rendered. They show which texts separate an answer from the contents
        before and after it. These texts locate the other answers of the kind. Raises DataError.
        """
        text, kinds = self.write(own), _kinds(own)
        models = {n for _, some in kinds for n in some}
        found = {number: self._added(own, text, number) for number in sorted(models)}
        contents = self._contents(own, text) if len(found) < len(_trained_turns(own)) else {}
        for group, _ in kinds:
            known = set[tuple[str, str]]()
            for number in sorted(group, key=lambda n: n not in models):
                _, start = contents.get(number - 1, (0, 0))
                stop, _ = contents.get(number + 1, (0, 0))
                if number not in found:
                    alike = (
                        (start + len(before), stop - len(behind))
                        for before, behind in known
                        if text.startswith(before, start) and text.endswith(behind, 0, stop)
                    )
                    found[number] = next(alike, None) or self._added(own, text, number)
                if start and stop:
                    known.add((text[start : found[number][0]], text[found[number][1] : stop]))
        return text, [found[number] for number in sorted(found)]

    def _contents(self, own: Turns, text: str) -> dict[int, Range]:
        """Return the range of each user or tool content in the text, by index of the message.

        To locate the contents, the conversation is rendered again with a mark before and after each
        content. If the marks change anything else in the text, the result is empty.
        """
        turns, marked = [*own.turns], []
        for number, turn in enumerate(turns):
            if turn["role"] in ("user", "tool") and (content := turn.get("content", "").strip()):
                inside = turn["content"].replace(content, f"{_OPEN}{content}{_CLOSE}")
                turns[number] = turn | {"content": inside}
                marked.append(number)
        found, ranges = _unmarked(self.tried(replace(own, turns=turns)) or "")
        is_same = found == text and len(ranges) == len(marked)
        return dict(zip(marked, ranges, strict=True)) if is_same else {}

    def _added(self, own: Turns, text: str, number: int) -> Range:
        """Return the range of text that the answer in message `number` adds to its prompt. Raises
        DataError."""
        try:
            prompt = self.write(own, number, prompt=True)
            if not text.startswith(prompt) and not _is_thinking(own.turns[number]):
                less = {"enable_thinking": False, **own.kwargs}
                other = self.write(replace(own, kwargs=less), number, prompt=True)
                prompt = other if text.startswith(other) else prompt
        except DataError as error:
            if number:
                raise
            why = "writes no prompt for an answer that begins a conversation"
            raise self._refusal(own, f"{_CANNOT}: it {why}", why) from error
        if not text.startswith(prompt):
            raise self._refusal(
                own,
                f"{_CANNOT}: the prompt for message {number + 1} is not what precedes the answer:"
                f" {_difference(prompt, text)}",
                "writes other prompts than those before the answers",
            )
        is_last = number + 1 == len(own.turns)
        upto = text if is_last else self.write(own, number + 1)
        # Phi's template ends every text with a token: drop it while another ends the answer.
        while (end := _end_of(upto, self._marks)) and not text.startswith(upto):
            less_one = upto.rstrip().removesuffix(end)
            if _end_of(less_one, self._marks) is None:
                break
            upto = less_one
        if not text.startswith(upto):
            raise self._refusal(
                own,
                f"{_CANNOT}: message {number + 1} is another text once messages follow it:"
                f" {_difference(upto, text)}",
                "writes earlier answers anew",
            )
        return len(prompt), len(upto)

    def _num_ranges(self, own: Turns, num_turns: int, ranges: list[Range]) -> int:
        """Return how many `ranges` are in the first `num_turns` turns. Raises DataError."""
        _, found = _unmarked(self.write(own, num_turns, tags=True)) if num_turns else ("", [])
        if ranges[: len(found)] != found:
            what = f"what is learnt of message {num_turns} changes behind it"
            raise self._refusal(own, f"{_CANNOT}: {what}")
        return len(found)

    def proved(self, own: Turns, shape: TurnShape, text: str, ranges: list[Range]) -> list[str]:
        """Return notes on what the text of a conversation leaves out. Raises CannotBeMaskedError if
        it leaves out part of an answer that is trained on, or of a user or tool message before such
        an answer. `shape`: the form that tool calls have in the text."""
        trained = _trained_turns(own)
        places = dict.fromkeys(range(-1, len(own.turns)), (0, len(text)))
        if ranges and len(ranges) == len(trained):
            places |= zip(trained, ranges, strict=True)
            edges = [0, *chain(*ranges), len(text)]
            for number in places.keys() - {-1, *trained}:
                if own.turns[number]["role"] not in ("system", "developer"):
                    at = 2 * bisect(trained, number)
                    places[number] = edges[at], edges[at + 1]
        remarks, tried = dict[str, None](), Counter[tuple[Any, ...]]()
        for number, path, value in _missing(own, text, places):
            role = own.turns[number]["role"] if number >= 0 else ""
            what = f"{path[0]} of role {role}" if role else "tools"
            kind = (what, number in trained)
            if tried[kind] == _MOST_TRIED:
                continue
            tried[kind] += 1
            if self._writes(own, shape, text, number, path, value):
                if number >= 0:
                    remarks[f"{what} that the template writes in another form"] = None
                continue
            is_asked = role in ("user", "tool", "function") and any(n > number for n in trained)
            if number in trained or is_asked:
                what = f"{path[0]} of message {number + 1} ({str(value).strip()[:_SHOWN_CHARS]!r})"
                raise self._refusal(
                    own, f"{what}, which the chat template leaves out",
                    f"leaves out {path[0]} of some messages",
                    "all that an answer that is learnt says, and what it answers, in the text",
                    "give each call a message of the assistant, with its result behind it"
                    if path[0] == "tool_calls" and path[1]
                    else "set data.chat_template to one that writes it, or take it from the record",
                )  # fmt: skip
            tried[kind] = _MOST_TRIED
            remarks[f"{what} that the template does not write"] = None
        given = {key for turn in own.turns for key in turn if turn[key] not in ("", [], {}, None)}
        for key in sorted(given.difference(_READ, _LINKS)):
            less = [shape({k: v for k, v in turn.items() if k != key}) for turn in own.turns]
            if self.tried(replace(own, turns=less)) == text:
                remarks[f"{key} in a message that the template does not write"] = None
        return [f"conversations with {remark}" for remark in remarks]

    def _writes(
        self,
        own: Turns,
        shape: TurnShape,
        text: str,
        number: int,
        path: tuple[Any, ...],
        value: Any,
    ) -> bool:
        """Return whether the template writes a certain value: whether the text changes, or the
        template fails, when the value is replaced.

        `text`: the conversation's text with the value. `number`: the index of the message that
        holds the value; -1 for the tools. `path`: the keys that lead to the value in the message.
        """
        changed: Any = deepcopy({"tools": own.tools} if number < 0 else own.turns[number])
        place = changed
        for key in path[:-1]:
            place = place[key]
        old = place[path[-1]]
        place[path[-1]] = old.replace(value, _PROBE, 1) if isinstance(old, str) else _PROBE
        turns = [shape(changed if n == number else turn) for n, turn in enumerate(own.turns)]
        tools = changed["tools"] if number < 0 else own.tools
        return self.tried(replace(own, turns=turns, tools=tools)) != text

    def tried(self, own: Turns, *, prompt: bool = False) -> str | None:
        """Return the text of a conversation, or None if the template refuses it."""
        with suppress(DataError):  # it may require what was taken out
            return self.write(own, prompt=prompt)
        return None

    def write(
        self, own: Turns, num_turns: int | None = None, *, prompt: bool = False, tags: bool = False
    ) -> str:
        """Return the text of the first `num_turns` turns, by default of all. Raises DataError.

        `prompt`: whether a generation prompt follows the turns. `tags`: whether a mark is written
        at each generation tag.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._takes_parts is None:
            probe = replace(own, turns=[{"role": "user", "content": _PROBE}])
            found = []
            for self._takes_parts in (False, True):
                found.append(_PROBE in (self.tried(probe) or ""))
            self._takes_parts = found == [False, True]
        turns = own.turns[:num_turns]
        if self._takes_parts:
            turns = [
                turn | {"content": [{"type": "text", "text": turn["content"]}]}
                if turn.get("content") is not None
                else turn
                for turn in turns
            ]
        source = _TAG.sub(_with_mark, self.text) if tags else self.text
        try:
            if DATE in own.kwargs:
                day = date.fromisoformat(str(own.kwargs[DATE]))
                source = _DATE.sub(lambda call: json.dumps(day.strftime(call[2])), source)
            (text,), _ = render_jinja_template(
                conversations=[turns],
                tools=own.tools,
                chat_template=source,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **own.kwargs},
            )
        except Exception as error:  # a template is a program, and may fail in any way
            reason = in_short(error)
            if type(error).__name__ in ("TemplateSyntaxError", "TemplateAssertionError"):
                raise ConfigError(
                    given=f"a chat template, line {vars(error)['lineno']}: {reason}",
                    required="a template of Jinja",
                    source=f"data.chat_template, or the tokenizer {self._tokenizer.name_or_path}",
                    change="correct that line, or set data.chat_template to another template",
                ) from error
            if type(error).__name__ != "TemplateError":  # raise_exception(...) in the template
                reason = f"{type(error).__name__}: {reason}"
            part = "the prompt behind" if prompt else "the conversation up to"
            raise DataError(
                given="a conversation that the chat template of"
                f" {self._tokenizer.name_or_path} refuses, {part} message {len(turns)}: {reason}",
                required="messages in the order that the template expects",
                source=own.origin,
                change="mend or remove the record, or change the template (data.chat_template, or"
                " else the tokenizer's)",
            ) from error
        return str(text)

    def _refusal(
        self,
        own: Turns,
        given: str,
        why: str = "cannot be masked by its tags",
        required: str = "a template with {% generation %} tags, or one whose text for a"
        " conversation begins with its text for every earlier part of it",
        change: str = "set data.chat_template to a template with {% generation %} and"
        " {% endgeneration %} around the answers",
    ) -> CannotBeMaskedError:
        source = f"{own.origin} and the chat template of {self._tokenizer.name_or_path}"
        error = CannotBeMaskedError(given=given, required=required, source=source, change=change)
        error.why = why
        return error


class _Keeping(_Template):
    """A template that keeps the thoughts of every answer that is trained on: each answer is written
    as the template writes it where the conversation ends with it."""

    def by_prefixes(self, own: Turns) -> tuple[str, list[Range]]:
        """Return the text of the conversation, and the ranges of the answers that are trained on.

        The conversation is rendered without thoughts. Then each answer with thoughts is replaced by
        what it adds to its prompt where the conversation ends with it. Raises DataError if that is
        another answer, or if the prompt is another one.

        The first, a middle and the last answer of each kind (`_kinds`) are rendered after all that
        precedes them. The others are rendered after less (`_as_last`) if this shows the same there.
        """
        plain = replace(own, turns=[*map(_unthinking, own.turns)])
        try:
            text, ranges = super().by_prefixes(plain)
        except DataError:
            text, ranges = self._with_opened_thoughts(own, plain)
        places = dict(zip(_trained_turns(own), ranges, strict=True))
        shown: dict[int, tuple[str, str]] = {}
        for group, models in _kinds(own):
            if not _is_thinking(own.turns[group[0]]):
                continue
            shown |= {n: self._shown(own, plain, text[: places[n][0]], n) for n in models}
            short, opened = dict[int, tuple[str, str]](), shown[group[0]][0]
            with suppress(DataError):
                short = {n: (opened, self._said(_as_last(own, n))) for n in group}
            if any(short.get(n) != shown[n] for n in models):
                short = {}
            for n in group:
                if n not in shown:
                    shown[n] = short.get(n) or self._shown(own, plain, text[: places[n][0]], n)
        pieces, found, num_chars, at = [], [], 0, 0
        for number, (start, stop) in places.items():
            opened, said = shown.get(number, ("", text[start:stop]))
            if number in shown and not said.endswith(self.empty.sub("", text[start:stop], count=1)):
                raise self._other_answer(own, number)
            pieces += [text[at:start], opened, said]
            num_chars += start - at + len(opened)
            found.append((num_chars, num_chars + len(said)))
            num_chars, at = num_chars + len(said), stop
        return "".join((*pieces, text[at:])), found

    def _shown(self, own: Turns, plain: Turns, before: str, number: int) -> tuple[str, str]:
        """Return what the prompt for an answer adds to the text before it, and what the answer adds
        to its prompt where the conversation ends with it. Raises DataError."""
        said = self._said(replace(own, turns=own.turns[: number + 1], first=number))
        prompt = super().write(plain, number, prompt=True)
        if not prompt.startswith(before):
            raise self._other_answer(own, number)
        return prompt[len(before) :], said

    def _said(self, own: Turns) -> str:
        """Return what the last answer adds to its prompt. Raises DataError."""
        whole = super().write(own)
        return whole[self._added(own, whole, len(own.turns) - 1)[0] :]

    def _other_answer(self, own: Turns, number: int) -> CannotBeMaskedError:
        return self._refusal(
            own,
            f"{_CANNOT}: message {number + 1} with its thoughts is not what it is"
            " without them, after the thoughts",
            "writes answers with thoughts otherwise",
        )

    def _with_opened_thoughts(self, own: Turns, plain: Turns) -> tuple[str, list[Range]]:
        """Return the text and the ranges of a conversation without thoughts (`plain`) if a prompt
        opens thoughts. All answers that are trained on must have some. Raises DataError."""
        text = super().write(plain)
        silent = replace(plain, kwargs={**own.kwargs, "enable_thinking": False})
        other, ranges = super().by_prefixes(silent)
        more = len(text) - len(other)  # what is written before the first answer may differ
        is_same = text[ranges[0][0] + more :] == other[ranges[0][0] :]
        if not is_same or not all(_is_thinking(own.turns[n]) for n in _trained_turns(own)):
            why = "opens thoughts that an answer lacks"
            raise self._refusal(own, f"{_CANNOT}: its prompt {why}", why)
        return text, [(start + more, stop + more) for start, stop in ranges]

    def write(
        self, own: Turns, num_turns: int | None = None, *, prompt: bool = False, tags: bool = False
    ) -> str:
        is_part = num_turns is not None or prompt or tags
        if is_part or not any(_is_thinking(own.turns[n]) for n in _trained_turns(own)):
            return super().write(own, num_turns, prompt=prompt, tags=tags)
        return self.by_prefixes(own)[0]


TurnShape = Callable[[Turn], Turn]
"""Returns a turn with its calls in another form."""


def _shapes(own: Turns) -> list[TurnShape]:
    has_calls = any(turn.get("tool_calls") for turn in own.turns)
    return [dict, _with_null, _as_openai_has_it] if has_calls else [dict]


def _shaped(own: Turns, shape: TurnShape) -> Turns:
    return replace(own, turns=[shape(turn) for turn in own.turns])


def _with_null(turn: Turn) -> Turn:
    """Return the turn; if it has tool calls and an empty content, the content becomes None."""
    is_silent = turn.get("tool_calls") and not (turn.get("content") or "").strip()
    return {**turn, "content": None} if is_silent else turn


def _as_openai_has_it(turn: Turn) -> Turn:
    """Return a turn with its tool calls in the form of OpenAI's API, which some templates expect.

    The arguments are a string of JSON, and an empty content is None. A turn without tool calls is
    returned unchanged.
    """
    calls = deepcopy(turn.get("tool_calls", ()))
    for function in (call["function"] for call in calls):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return _with_null({**turn, "tool_calls": calls}) if calls else turn


def only_last_answers(own: Turns) -> Turns:
    """Return the conversation, with training limited to the answers after its last user message."""
    asked = [n for n, turn in enumerate(own.turns, start=1) if turn["role"] == "user"]
    return replace(own, first=max([own.first, *asked[-1:]]))


def _short_first(own: Turns) -> list[Turns]:
    """Return the conversation; before it, the conversation without its middle if it is long. What
    fails for the short one is not tried on the long one."""
    for role in ("user", "assistant"):
        edges = [n for n, turn in enumerate(own.turns) if turn["role"] == role]
        if len(edges) > _MANY + 1:
            start, stop = edges[1], edges[-1]
            first = min(own.first, max(start, own.first - (stop - start)))
            return [replace(own, turns=own.turns[:start] + own.turns[stop:], first=first), own]
    return [own]


def _as_last(own: Turns, number: int) -> Turns:
    """Return a conversation that ends with an answer of the given index, after the user message
    before it and, if an answer lies between, this answer and the tool results since."""
    before = own.turns[:number]
    asked = max((n for n, turn in enumerate(before) if turn["role"] == "user"), default=0)
    said = [n for n in range(asked + 1, number) if before[n]["role"] == "assistant"]
    turns = [*before[asked : asked + 1], *before[max(said, default=asked + 1) :], own.turns[number]]
    return replace(own, turns=turns, first=len(turns) - 1)


def _kinds(own: Turns) -> list[tuple[list[int], list[int]]]:
    """Return the indices of the answers that are trained on by kind, and those of the first, a
    middle and the last one of each kind. Two answers are of one kind if their messages, and the
    messages beside them, have the same roles and keys."""
    kinds: dict[Any, list[int]] = {}
    for number in _trained_turns(own):
        beside = own.turns[max(number - 1, 0) : number + 2]
        kind = tuple((turn["role"], _is_thinking(turn), *sorted(turn)) for turn in beside)
        kinds.setdefault((kind, number > 0), []).append(number)
    return [(of, sorted({of[0], of[len(of) // 2], of[-1]})) for of in kinds.values()]


def _trained_turns(own: Turns) -> list[int]:
    return [
        number
        for number, turn in enumerate(own.turns)
        if turn["role"] == "assistant" and number >= own.first and may_be_trained(turn)
    ]


def _is_thinking(turn: Turn) -> bool:
    return any(turn.get(key) for key in _THOUGHTS) or "</think>" in (turn.get("content") or "")


def _unthinking(turn: Turn) -> Turn:
    """Return a turn without thoughts."""
    if turn["role"] != "assistant" or not _is_thinking(turn):
        return turn
    said = (turn.get("content") or "").split("</think>")[-1].lstrip("\n")
    return {key: v for key, v in turn.items() if key not in _THOUGHTS} | {"content": said}


def _first_answer(own: Turns) -> int:
    """Return the index of the first answer to a message."""
    return next((n for n, turn in enumerate(own.turns) if n and turn["role"] == "assistant"), 0)


def _one_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any white space and one of the tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _end_of(text: str, stops: Iterable[str]) -> str | None:
    text = text.rstrip()
    return next((stop for stop in stops if text.endswith(stop)), None)


def _values(turn: Turn) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path of keys, value) for the content and the thoughts of a message, and for the names
    and arguments of its tool calls."""
    thoughts = next((key for key in _THOUGHTS if turn.get(key)), None)
    for key in filter(None, ("content", thoughts)):
        said = turn.get(key) or ""
        pieces = _THINK.split(said) if turn["role"] == "assistant" else [said]
        yield from (((key,), piece) for piece in pieces)
    for number, call in enumerate(turn.get("tool_calls") or ()):
        yield from _of_function(call, ("tool_calls", number), ("name", "arguments"))


def _of_function(
    given: Mapping[str, Any], path: tuple[Any, ...], keys: Iterable[str]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and value of each scalar below `keys` in a tool or tool call (`given`).

    If `given` has a key `function`, `keys` are read from that object instead. `path`: the path of
    `given` in its message, with which each yielded path begins.
    """
    own, path = (given["function"], (*path, "function")) if "function" in given else (given, path)
    for key in keys:
        yield from _leaves(own.get(key), (*path, key))


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (Mapping, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _forms(value: Any) -> Iterator[str]:
    """Yield the forms in which a template may write a value. They are, for a text, the text itself
    and the text with escapes of JSON or Python; for any other value, its JSON and its `str`."""
    if not isinstance(value, str):
        yield from (json.dumps(value), str(value))
        return
    yield (plain := value.strip())
    once = [json.dumps(plain, ensure_ascii=own)[1:-1] for own in (False, True)]
    yield from (*once, repr(plain)[1:-1], *(json.dumps(o, ensure_ascii=False)[1:-1] for o in once))


def _missing(
    own: Turns, text: str, places: Mapping[int, Range]
) -> list[tuple[int, tuple[Any, ...], Any]]:
    """Return the values that a conversation's text leaves out, each as a tuple: index of its
    message (-1: the tools), path of keys, and value.

    A value is left out if none of its forms (`_forms`) is in its message's part of the text, which
    is the range in `places` with the message's index. No two values share characters.
    """
    wanted = [(n, *found) for n, turn in enumerate(own.turns) for found in _values(turn)]
    for number, tool in enumerate(own.tools or ()):
        said = _of_function(tool, ("tools", number), ("name", "description"))
        wanted += [(-1, *found) for found in said]
    wanted = [one for one in wanted if one[2] is not None and str(one[2]).strip()]
    taken, begins, missing = bytearray(len(text)), dict[tuple[str, int], int](), set[int]()
    # Long values first: a short one may also occur inside a long one.
    for one in sorted(wanted, key=lambda one: -len(str(one[2]))):
        start, stop = places[one[0]]
        for form in _forms(one[2]):
            size = len(form)
            at = text.find(form, begins.get((form, start), start), stop)
            while at >= 0 and (taken[at] or taken[at + size - 1]):
                at = text.find(form, at + 1, stop)
            if at >= 0:
                begins[form, start] = at + size
                taken[at : at + size] = b"\1" * size
                break
        else:
            missing.add(id(one))
    return [one for one in wanted if id(one) in missing]


def _parts(text: str, ranges: list[Range]) -> list[str]:
    return [text[start:stop] for start, stop in ranges]


def _with_mark(tag: re.Match[str]) -> str:
    """Return a generation tag, with an expression beside it that writes a mark where the answer
    begins or ends. `tag`: the match of the tag in the template.

    A tag that sets a variable stands between the mark and the answer: templates trim an answer's
    white space only beside a tag, and an expression is no tag.
    """
    before, is_end, behind = tag.groups()
    if is_end:
        return f"{{%{before} set furlong = 0 %}}{{{{ '{_CLOSE}' }}}}{{% endgeneration {behind}%}}"
    return f"{{%{before} generation %}}{{{{ '{_OPEN}' }}}}{{% set furlong = 0 {behind}%}}"


def _unmarked(marked: str) -> tuple[str, list[Range]]:
    """Return the text without its marks, and the range that each pair of marks enclosed."""
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
    """Return the first difference between `part` and the beginning of `whole`, in words."""
    at = num_common(part, whole)
    return f"{part[at : at + _SHOWN_CHARS]!r} became {whole[at : at + _SHOWN_CHARS]!r}"
