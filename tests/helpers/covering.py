"""Covering arrays: a few rows, instead of the full product of options ("dials"), in which all
values of any two or three dials still occur together. Most faults need no more of them to show.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
"""A value of each dial."""


class Design:
    """Dials, their values, and which values may occur together."""

    def __init__(
        self,
        dials: Mapping[str, Sequence[Any]],
        rules: Mapping[str, Callable[[Row], bool]] | None = None,
        *,
        steering: Sequence[str] = (),
        loose: Iterable[str] = (),
    ) -> None:
        """Create a design.

        `dials`: values by dial, the plainest first. `rules`: by dial, whether other values than the
        first have an effect and are allowed, given a row of the dials in `steering`. `loose`: dials
        that count for two in a tuple.
        """
        self.dials, self._rules, self._loose = dials, rules or {}, set(loose)
        entries = ((dial, value) for dial in dials for value in dials[dial])
        self._bits = {entry: 1 << place for place, entry in enumerate(entries)}
        rows = itertools.product(*(dials[dial] for dial in steering))
        self._steerings = [
            row
            for row in (dict(zip(steering, values, strict=True)) for values in rows)
            if all(row[dial] in self._allowed(dial, row) for dial in row)
        ]

    def _allowed(self, dial: str, row: Row) -> Sequence[Any]:
        values = self.dials[dial]
        return values if dial not in self._rules or self._rules[dial](row) else values[:1]

    def _beside(self, dial: str, others: Sequence[str], strength: int) -> Iterator[tuple[str, ...]]:
        """Yield the groups of other dials that form a tuple with a dial."""
        pairs = itertools.combinations(others, strength - 2)
        if dial in self._loose:
            yield from pairs
            return
        tight = (other for other in others if other not in self._loose)
        yield from itertools.combinations(tight, strength - 1)
        yield from (pair for pair in pairs if not self._loose.isdisjoint(pair))

    def _groups(self, dials: Sequence[str], strength: int) -> Iterator[tuple[str, ...]]:
        """Yield the dials of each tuple."""
        for place, dial in enumerate(dials):
            for others in self._beside(dial, dials[:place], strength):
                yield (*others, dial)

    def tuples_of(self, row: Row, strength: int) -> set[int]:
        """Return the tuples of values in a row, each as an integer with one bit per value."""
        own = {dial: self._bits[dial, row[dial]] for dial in row}
        return {sum(own[d] for d in group) for group in self._groups(list(row), strength)}

    def every_tuple(self, strength: int) -> set[int]:
        """Return all tuples of values that may occur together."""
        found: set[int] = set()
        met = set()
        groups = list(self._groups(list(self.dials), strength))
        for row in self._steerings:
            bits = {
                dial: tuple(
                    self._bits[dial, value]
                    for value in ([row[dial]] if dial in row else self._allowed(dial, row))
                )
                for dial in self.dials
            }
            for values in {tuple(bits[dial] for dial in group) for group in groups} - met:
                met.add(values)
                found.update(map(sum, itertools.product(*values)))
        return found

    def array(self, strength: int, chosen: Iterable[Row] = (), *, num_orders: int = 1) -> list[Row]:
        """Return rows that cover, together with those in `chosen`, every tuple of `strength` dials.

        Each row starts with a missing tuple, and the values of the steering dials that add most
        missing tuples. Every other dial takes the value that adds most, and of equal ones the least
        used. The number of rows depends on the order of the dials: the shortest array of
        `num_orders` is returned.
        """
        missing = self.every_tuple(strength).difference(
            *(self.tuples_of(row, strength) for row in chosen)
        )
        drawn, orders = random.Random(0), [list(self.dials)]
        for _ in range(num_orders - 1):
            orders.append(drawn.sample(orders[0], len(orders[0])))
        return min((self._in_order(dials, set(missing), strength) for dials in orders), key=len)

    def _in_order(self, dials: Sequence[str], missing: set[int], strength: int) -> list[Row]:
        waiting, used, rows = sorted(missing), Counter[int](), []
        while missing:
            while waiting[-1] not in missing:
                waiting.pop()
            row = self._begun(waiting[-1], missing, strength)
            for dial in (d for d in dials if d not in row):
                own = {d: self._bits[d, row[d]] for d in row}
                others = [sum(own[d] for d in g) for g in self._beside(dial, list(own), strength)]
                best = (-1, 0)
                for value in self._allowed(dial, row):
                    bit = self._bits[dial, value]
                    gain = sum(other + bit in missing for other in others), -used[bit]
                    if gain > best:
                        best, row[dial] = gain, value
            used.update(self._bits[entry] for entry in row.items())
            rows.append({dial: row[dial] for dial in self.dials})
            missing -= self.tuples_of(row, strength)
        return rows

    def cases(self, strength: int, *, num_orders: int = 1) -> list[tuple[Any, ...]]:
        """Return the rows of an array as tuples of values, in the order of the dials."""
        return [tuple(row.values()) for row in self.array(strength, num_orders=num_orders)]

    def _begun(self, wanted: int, missing: set[int], strength: int) -> Row:
        """Return a row with the wanted values and the steering values that add most tuples."""
        own = {dial: value for (dial, value), bit in self._bits.items() if bit & wanted}
        rows = (own | row for row in self._steerings if own | row == row | own)
        fitting = [row for row in rows if all(v in self._allowed(d, row) for d, v in own.items())]
        return max(fitting, key=lambda row: len(missing & self.tuples_of(row, strength)))
