"""Prompts with several answers, as one sequence that branches or as one sequence per answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.planners.chunks import Forks


@dataclass(frozen=True)
class Forked:
    """A tree of segments of tokens, depth-first; `parents`: the segment that each one continues."""

    lens: Sequence[int]
    parents: Sequence[int | None]
    seed: int = 0
    ids: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        ids = [torch.randint(3, 96, (n,), generator=generator) for n in self.lens]
        object.__setattr__(self, "ids", ids)

    @property
    def starts(self) -> list[int]:
        return [sum(self.lens[:i]) for i in range(len(self.lens))]

    def forks(self) -> list[tuple[int, int]]:
        """Return (start of a branch, end of its parent) of each branch, as planners take them."""
        ends = [start + n for start, n in zip(self.starts, self.lens, strict=True)]
        return [
            (start, ends[parent])
            for start, parent in zip(self.starts, self.parents, strict=True)
            if parent is not None and ends[parent] != start
        ]

    def joined(self) -> dict[str, Tensor]:
        """Return all tokens as one sequence, with labels for all but the first segment."""
        ids = torch.cat(self.ids)
        labels = ids.clone()
        labels[: self.lens[0]] = -100
        return {"input_ids": ids, "labels": labels}

    def alone(self) -> list[dict[str, Tensor]]:
        """Return a sequence for each segment after the first: its path, with labels for it only."""
        found = []
        for number in range(1, len(self.lens)):
            path: list[int] = [number]
            while (parent := self.parents[path[0]]) is not None:
                path.insert(0, parent)
            ids = torch.cat([self.ids[i] for i in path])
            labels = ids.clone()
            labels[: -self.lens[number]] = -100
            found.append({"input_ids": ids, "labels": labels})
        return found

    def answers(self) -> list[dict[str, Tensor]]:
        """Return a sequence for each leaf, with labels for all but the first segment."""
        last = set(range(len(self.lens))) - set(self.parents)
        found = []
        for sequence in (self.alone()[number - 1] for number in sorted(last)):
            labels = sequence["input_ids"].clone()
            labels[: self.lens[0]] = -100
            found.append({"input_ids": sequence["input_ids"], "labels": labels})
        return found


def forks_of(*forked: Forked) -> Forks:
    return {i: tree.forks() for i, tree in enumerate(forked) if tree.forks()}


PAIR = Forked((75, 37, 21), (None, 0, 0))
FOUR = Forked((75, 5, 37, 18, 11), (None, 0, 0, 0, 0))
ONE = Forked((75, 30), (None, 0))
NESTED = Forked((40, 23, 9, 31, 17, 6), (None, 0, 1, 1, 0, 4), seed=3)
"""Six segments, three paths: other segments continue the second and the fifth."""
