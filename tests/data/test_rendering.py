"""Templates that do not end or ask for all memory, and what rendering apart costs."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import psutil
import pytest
from tiny_tokenizers import CHATML, byte_tokenizer

from furlong.data import rendering as module
from furlong.data.chat import ChatTemplate, Turns
from furlong.data.formats import Reading, encode
from furlong.data.records import Notes, SourceRecord
from furlong.data.rendering import rendering
from furlong.errors import DataError

TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
TIME, MEMORY = "takes more than 0.3 s", "MemoryError: "
# What only the second conversation, of one message, sets off.
LATER = "{% if messages | length == 1 and not add_generation_prompt %}BOMB{% endif %}" + CHATML
BOMBS = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME,
    ),
    "power": ("{{ 9 ** (9 ** (8 + messages | length)) }}", TIME),
    "text": ("{{ 'x' * 10 ** 10 }}", MEMORY),
    "doubling": (
        "{% set s = namespace(x='x') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}"
        "{% endfor %}", MEMORY,
    ),
    "long text": (
        "{{ 'x' * 2 * 10 ** 7 }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "a text of more than 16 MiB",
    ),
}  # fmt: skip


def record(messages: Any, line: int = 1) -> SourceRecord:
    return SourceRecord({"messages": messages}, 0, line, f"a.jsonl:{line}")


def encode_all(template: str, *conversations: Any) -> list[int]:
    tokenizer = byte_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    records = [record(messages, number) for number, messages in enumerate(conversations, start=1)]
    return [
        len(found.input_ids)
        for _, own in encode(records, tokenizer, Reading("chat"), Notes())
        for found in own
    ]


@pytest.mark.parametrize(
    ("name", "where"), [*((name, "first") for name in BOMBS), ("loops", "later")]
)
@pytest.mark.few(2)
def test_a_template_without_end_is_an_error(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, told = BOMBS[name]
    if told == TIME:
        monkeypatch.setattr(module, "LIMIT_S", 0.3)
        monkeypatch.setattr(module, "_LOOK_S", 0.01)  # it computes, so it does not stand still
        monkeypatch.setattr(module, "_MOST_LOOKS", 3)
    monkeypatch.setattr(module, "LIMIT_BYTES", 2**28)
    template = bomb if where == "first" else LATER.replace("BOMB", bomb)
    before_bytes = psutil.Process().memory_info().rss
    children = psutil.Process().children()
    with pytest.raises(DataError) as caught:
        encode_all(template, TURNS, TURNS[:1])
    assert told in caught.value.given
    assert caught.value.source == f"a.jsonl:{1 if where == 'first' else 2}"
    assert psutil.Process().memory_info().rss - before_bytes < 2**28
    assert psutil.Process().children() == children


def test_what_is_rendered_apart_is_the_same() -> None:
    tokenizer = byte_tokenizer()
    conversations = [Turns(f"a.jsonl:{n}", TURNS * n) for n in range(1, 4)]
    children = psutil.Process().children()
    with rendering(tokenizer) as render:
        apart = [render(one) for one in conversations]
        with pytest.raises(DataError, match="of role 'bot'"):
            render(Turns("x", [{"role": "bot", "content": "x"}]))
        assert render(conversations[1]) == apart[1]
    assert apart == [ChatTemplate(tokenizer).render(one) for one in conversations]
    assert psutil.Process().children() == children


def test_a_process_that_is_killed_is_told() -> None:
    others = set(psutil.Process().children())  # of tests that ran before
    with rendering(byte_tokenizer()) as render:
        (process,) = set(psutil.Process().children()) - others
        process.kill()
        with pytest.raises(DataError, match="ends its process with -9"):
            render(Turns("x", TURNS))


@pytest.mark.parametrize("place", ["__init__", "render"])
def test_a_process_that_waits_for_a_forked_lock_is_given_up(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another thread, which goes on in this process alone; the conversation fills the pipe."""
    held = threading.Lock()
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_MOST_LOOKS", 5)
    monkeypatch.setattr(ChatTemplate, place, lambda *_: held.acquire() and None)
    children = psutil.Process().children()
    long = [{"role": "user", "content": "x" * 2**20}]
    with held, rendering(byte_tokenizer()) as render, pytest.raises(DataError) as caught:
        render(Turns("a.jsonl:1", long))
    assert "stands still" in caught.value.given and caught.value.source == "a.jsonl:1"
    assert psutil.Process().children() == children


def test_nothing_is_said_about_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither Python nor tokenizers, which has used its threads by then, remark on it."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = [encode_all(CHATML, *[TURNS] * 9) for _ in range(2)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 9
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert capfd.readouterr() == ("", "")
