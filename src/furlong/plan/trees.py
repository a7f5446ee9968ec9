"""Sequences that branch: one prompt with several answers, laid out as one sequence.

    tokens      0          75       92       110         a prompt, then two answers to it
    pieces      [ prompt  )[ one   )[ two    )           two goes on from token 75: its parent

A piece sees its path: its parent, the parent of that, and so on; positions go on along it. Pieces
are laid out depth-first, so that those behind a piece, all that see it, are consecutive too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Bounds = tuple[int, int, int]
"""A slice: its first token, the one behind its last, and the one behind what it goes on from."""


@dataclass(frozen=True)
class Tree:
    """Pieces of one sequence, numbered depth-first; a plain sequence is a line of them."""

    parents: tuple[int, ...]
    """The piece that each one goes on from, an earlier one; -1 for the first."""

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each piece, the number behind that of the last one which sees it."""
        ends = list(range(1, len(self.parents) + 1))
        for piece in reversed(range(1, len(self.parents))):
            parent = self.parents[piece]
            ends[parent] = max(ends[parent], ends[piece])
        return tuple(ends)

    @cached_property
    def continued(self) -> tuple[bool, ...]:
        """Whether any piece goes on from each one."""
        followed = set(self.parents)
        return tuple(piece in followed for piece in range(len(self.parents)))

    def path(self, piece: int) -> list[int]:
        """The pieces that a piece sees, from the first one on."""
        found = []
        while (piece := self.parents[piece]) >= 0:
            found.append(piece)
        return found[::-1]

    def stops(self, lens: Sequence[int]) -> list[int]:
        """The position behind each piece, where a piece has one slice of so many tokens."""
        found: list[int] = []
        for parent, n in zip(self.parents, lens, strict=True):
            found.append(n + (found[parent] if parent >= 0 else 0))
        return found

    def sees(self, piece: int, earlier: int) -> bool:
        """Whether `earlier` lies on the path of a piece."""
        return earlier < piece < self.ends[earlier]


def tree_of(group: Sequence[Sequence[Bounds]]) -> Tree:
    """The tree of a sequence's slices, by chunk; those that share a chunk go on from one piece.

    Raises KeyError where a slice goes on from a token at which no earlier one ends.
    """
    by_stop, parents = {0: -1}, []
    for number, slices in enumerate(group):
        parents.append(by_stop[slices[0][2]])
        by_stop |= {stop: number for _, stop, _ in slices}
    return Tree(tuple(parents))


def positions_behind(slices: Iterable[Bounds]) -> dict[int, int]:
    """The position of the token behind each slice of a sequence, by that token."""
    found = {0: 0}
    for start, stop, before in sorted(slices):
        found[stop] = found[before] + stop - start
    return found
