"""Divides the sequences of a batch among pipelines (InfiniPipe, Eqs. 12 to 14).

Pipelines run one after the other. Each costs a warm-up and a cool-down, and sequences of few chunks
beside one of many inherit its wider window, so that more must be recomputed. Sequences of equally
many chunks stay together; the classes are in a row by their number of chunks, a pipeline is a
stretch of that row, and the best cut is a shortest path. An integer program is solved only for
stretches that can still be on it: all others are left at what is already proven of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from furlong.planners.infinipipe.checkpointing import Checkpointing

Stretch = tuple[int, int]
"""A run of classes, [first, stop)."""


@dataclass(frozen=True)
class Grouping:
    stretches: tuple[Stretch, ...]
    chosen: tuple[Checkpointing, ...]
    """Checkpointed layers of each stretch."""
    overhead_s: float
    """Seconds of warm-up, cool-down and recomputation of all pipelines (Eq. 13)."""
    bound_s: float
    """Seconds of overhead that no grouping of these chunks undercuts."""


@dataclass
class _Row:
    """Knowledge of every stretch of a row of classes, and its best paths."""

    num_classes: int
    ends_s: float
    layer_s: float
    least: dict[Stretch, float] = field(default_factory=dict)
    """Lower bounds of the layers that stretches recompute."""
    solved: dict[Stretch, Checkpointing] = field(default_factory=dict)

    def lowest(self) -> tuple[float, list[Stretch]]:
        """The path that is best by lower bounds."""
        return self._path(lambda stretch: self.least.get(stretch, 0.0))

    def known(self) -> tuple[float, list[Stretch]]:
        """The best path of solved stretches."""
        totals = {stretch: found.total for stretch, found in self.solved.items()}
        return self._path(lambda stretch: totals.get(stretch, inf))

    def _path(self, layers: Callable[[Stretch], float]) -> tuple[float, list[Stretch]]:
        best = [0.0] + [inf] * self.num_classes
        starts = [0] * (self.num_classes + 1)
        for stop in range(1, self.num_classes + 1):
            for first in range(stop):
                cost_s = best[first] + self.ends_s + self.layer_s * layers((first, stop))
                if cost_s < best[stop]:
                    best[stop], starts[stop] = cost_s, first
        bounds = [self.num_classes]
        while bounds[-1]:
            bounds.append(starts[bounds[-1]])
        return best[-1], list(pairwise(reversed(bounds)))


def group_classes(
    num_classes: int,
    *,
    ends_s: float,
    layer_s: float,
    least: Callable[[Stretch], float],
    solve: Callable[[Stretch], Checkpointing | None],
    gap: float = 0.0,
) -> Grouping | None:
    """The grouping of least overhead, within `gap` of it, or None if no stretch path is feasible.

    `ends_s`: warm-up and cool-down of a pipeline (delta); `layer_s`: a layer's forward of one chunk
    (F-hat). `least` gives a lower bound of the layers that a stretch must recompute, `solve` the
    layers themselves.
    """
    row = _Row(num_classes, ends_s, layer_s)
    while True:
        bound_s, path = row.lowest()
        if bound_s == inf:
            return None
        known_s, known_path = row.known()
        is_proven = known_s < inf and known_s - bound_s <= gap * known_s
        open_ones = [stretch for stretch in path if stretch not in row.solved]
        if is_proven or not open_ones:  # the solver's own gap may be all that is missing
            chosen = tuple(row.solved[stretch] for stretch in known_path)
            return Grouping(tuple(known_path), chosen, known_s, bound_s)
        if new := [stretch for stretch in path if stretch not in row.least]:
            row.least |= {stretch: least(stretch) for stretch in new}
            continue
        for stretch in open_ones:
            if (found := solve(stretch)) is None:
                row.least[stretch] = inf
            else:
                row.solved[stretch] = found
                row.least[stretch] = max(row.least[stretch], found.bound)
