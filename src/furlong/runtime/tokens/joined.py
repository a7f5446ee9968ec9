"""Sequences of a call that begin alike, joined to trees: what they share is computed once.

Equal first tokens at equal positions have equal hidden states. They are compared token by token,
and shared where they make at least a chunk; so are those behind a fork, as agents' traces have
them. What each sequence is, its labels and whatever is computed of its tokens stay its own.

    i  number of a sequence in its call;  `seq_id`  one of a tree, as the plan numbers them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.plan.plan import Slice
from furlong.plan.rows import ChunkRows
from furlong.planners.chunks import Forks
from furlong.runtime.inputs import ShiftedSequence, TreePart

_Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Joined:
    """The sequences of a plan, and where those of the call lie in them."""

    sequences: Sequence[ShiftedSequence]
    """By `seq_id`."""
    forks: Forks = field(default_factory=dict)

    def runs(self, rows: ChunkRows) -> Iterator[tuple[int, range, int]]:
        """(i, its tokens, the row of the first one) of all that lies in a chunk; rows that several
        sequences share come with each."""
        for (seq_id, start, stop), row in rows.runs():
            sequence = self.sequences[seq_id]
            if not sequence.parts:
                yield seq_id, range(start, stop), row
            for part, tokens in sequence.within(start, stop):
                first = part.token + tokens.start - part.start
                yield part.sequence, range(first, first + len(tokens)), row + tokens.start - start

    def members(self, piece: Slice) -> set[int]:
        """The sequences of the call that have tokens in a slice."""
        sequence = self.sequences[piece.seq_id]
        if not sequence.parts:
            return {piece.seq_id}
        return {part.sequence for part, _ in sequence.within(piece.start, piece.stop)}


def join_prompts(sequences: Sequence[ShiftedSequence], least_tokens: int) -> Joined:
    """The sequences of a call, those joined that share their first `least_tokens` or more."""
    if sum(len(sequence.input_ids) > least_tokens for sequence in sequences) < 2:
        return Joined(sequences)
    ids = [sequence.input_ids.cpu().numpy() for sequence in sequences]
    firsts = [sequence.first_position for sequence in sequences]
    order = sorted(range(len(ids)), key=lambda i: (firsts[i], ids[i].astype(">i8").tobytes()))
    alike = [
        _num_alike(ids[i], ids[j]) if firsts[i] == firsts[j] else 0 for i, j in pairwise(order)
    ]
    groups = _groups(range(len(order)), alike, least_tokens)
    if all(len(group) == 1 for group in groups):
        return Joined(sequences)
    joined: list[ShiftedSequence] = []
    forks: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        tree = _Tree(sequences, [order[at] for at in group], order, alike, least_tokens)
        tree.grow(group, 0, 0)
        if tree.forks:
            forks[len(joined)] = tree.forks
        joined.append(tree.sequence())
    return Joined(joined, forks)


class _Tree:
    """The tree of one group of sequences, laid out depth-first."""

    def __init__(
        self, sequences: Sequence[ShiftedSequence], members: Sequence[int], order: Sequence[int],
        alike: Sequence[int], least_tokens: int,
    ) -> None:  # fmt: skip
        """`order`: sequences by their tokens; `alike`: equal first tokens of two neighbours."""
        self.forks: list[tuple[int, int]] = []
        self._sequences, self._order = sequences, order
        self._alike, self._least_tokens = alike, least_tokens
        self._ids: list[Tensor] = []
        self._parts: list[TreePart] = []
        self._num_tokens = 0
        self._labels = [sequences[i].labels for i in members]
        lens = [len(labels) for labels in self._labels]
        starts = np.cumsum([0, *lens])[:-1].tolist()
        self._label_of = dict(zip(members, starts, strict=True))

    def grow(self, group: range, depth: int, parent: int) -> None:
        """Lay out sequences of the order, behind the `depth` tokens that all share, which end at
        token `parent` of the tree."""
        least = depth + self._least_tokens
        for own in _groups(group, self._alike, least):
            stop = len(self._sequences[self._order[own[0]]].input_ids)
            if len(own) > 1:
                stop = min(self._alike[at] for at in own[:-1])
            end = self._lay(own, depth, stop, parent)
            if len(own) > 1:
                self.grow(own, stop, end)

    def sequence(self) -> ShiftedSequence:
        """The tree as one sequence."""
        first = self._sequences[next(iter(self._label_of))].first_position
        return ShiftedSequence(
            torch.cat(self._ids), torch.cat(self._labels), first, tuple(self._parts)
        )

    def _lay(self, own: range, start: int, stop: int, parent: int) -> int:
        """Lay out the tokens [start, stop) that sequences of the order share; their end."""
        if start == stop:  # a sequence that ends where others go on
            return parent
        at, end = self._num_tokens, self._num_tokens + stop - start
        if parent != at:
            self.forks.append((at, parent))
        members = [self._order[number] for number in own]
        self._ids.append(self._sequences[members[0]].input_ids[start:stop])
        self._parts += [TreePart(i, start, at, end, self._label_of[i] + start) for i in members]
        self._num_tokens = end
        return end


def _groups(numbers: range, alike: Sequence[int], least: int) -> list[range]:
    """Runs of consecutive numbers of which neighbours share at least `least` tokens."""
    starts = [numbers.start] + [at + 1 for at in numbers[:-1] if alike[at] < least]
    return [range(a, b) for a, b in pairwise([*starts, numbers.stop])]


def _num_alike(one: _Ids, other: _Ids) -> int:
    """The first tokens that are equal."""
    num_tokens = min(len(one), len(other))
    differ = one[:num_tokens] != other[:num_tokens]
    return int(differ.argmax()) if differ.any() else num_tokens
