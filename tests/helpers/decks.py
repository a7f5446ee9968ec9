"""Random draws of values in which every value occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Deck(Generic[_T]):
    """Values to draw from: a draw takes one of those that were drawn least often."""

    def __init__(self, draw: Random, values: Sequence[_T]) -> None:
        self._draw, self._values = draw, list(values)
        self._used: Counter[int] = Counter()

    def take(self, fits: Callable[[_T], bool] = lambda _: True) -> _T:
        """Draw a value for which `fits` is true."""
        fitting = [index for index, value in enumerate(self._values) if fits(value)]
        least = min(self._used[index] for index in fitting)
        index = self._draw.choice([i for i in fitting if self._used[i] == least])
        self._used[index] += 1
        return self._values[index]
