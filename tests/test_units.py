"""Amounts as people read them, at the borders of their units."""

from __future__ import annotations

import pytest

from furlong.units import budget_of, bytes_alike, count_words, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"),
     (245, "4 min 05 s"), (7380, "2 h 03 min"), (534_000, "6.2 days")],
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


@pytest.mark.parametrize("num_bytes", [1, 2**20, 2**30 - 1, 2**30 + 1, 147_891 * 2**20, 2**45 + 7])
def test_a_budget_is_read_as_no_less_than_it_is_for(num_bytes):
    assert num_bytes <= parse_bytes(budget_of(num_bytes)) <= num_bytes + max(2**20, 2**30 // 100)


def test_amounts_beside_each_other_have_one_unit():
    assert bytes_alike([12 * 2**30, 2**20 * 64, 0]) == (["12.0", "0.06", "0.00"], "GiB")
    assert bytes_alike([]) == ([], "B")
