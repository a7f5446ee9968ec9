"""Amounts as people read them, at the borders of their units."""

from __future__ import annotations

import pytest

from furlong.units import count_words, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"),
     (245, "4 min 05 s"), (7380, "2 h 03 min")],
)  # fmt: skip
def test_seconds_in_words(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "token", "0 tokens"),
        (1, "token", "1 token"),
        (2048, "rank", "2,048 ranks"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
    ],
)
def test_a_noun_agrees_with_its_number(number, noun, words):
    assert count_words(number, noun) == words
