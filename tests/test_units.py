"""Amounts as people read them, at the borders of their units."""

from __future__ import annotations

import pytest

from furlong.units import format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"),
     (245, "4 min 05 s"), (7380, "2 h 03 min")],
)  # fmt: skip
def test_seconds_in_words(seconds, text):
    assert format_seconds(seconds) == text
