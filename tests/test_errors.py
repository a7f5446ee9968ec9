"""Texts of other libraries in our messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import furlong
from furlong.errors import first_line, in_short


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("two  blanks", "two  blanks"),
        ("a line\n  and another", "a line and another"),
        ("A sentence of some length. " + "word " * 9, "A sentence of some length. ..."),
        ("One. " + "word " * 9, "One. word word word word word word word ..."),
        ("x" * 50, "x" * 40 + "..."),
    ],
)
def test_a_text_is_cut_behind_a_sentence_or_a_word(text: str, short: str) -> None:
    assert in_short(text, 40) == short


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError"),
        ("no memory\nC++ frames", "no memory"),
        ("one of:\n(1) a file,\n(2) a folder\nmore", "one of: (1) a file, (2) a folder"),
        ("one of:", "one of:"),
    ],
)
def test_the_first_line_of_an_error_has_the_lines_that_it_announces(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line


def test_texts_are_cut_in_one_place() -> None:
    root = Path(furlong.__file__).parent
    cut = re.compile(r"![rs]:\.\d+\}|str\(\w+\)(\.\w+\(\))*\[:\w+\]|\[:\d+\]\}?( ?\.\.\.|!r)")
    places = {
        file.name for file in root.rglob("*.py") if cut.search(file.read_text(encoding="utf-8"))
    }
    # errors of Python alone, and samples of a model, which are no sentences
    assert places <= {"units.py", "timeline.py", "metrics.py", "chat.py"}
