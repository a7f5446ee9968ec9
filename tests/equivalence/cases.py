"""The matrix, every family under every way of cutting and keeping: product and covering array."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gradients import Batch, batch
from tiny_families import FAMILIES

import furlong

_BATCHES = {
    # name: (lengths, tokens without a label per sequence)
    "packed": ([5, 3, 8, 1, 2], [range(2)]),
    "split": ([23], []),
    "hybrid": ([23, 4, 2, 17], []),
    "masked": ([29, 9], [range(21), range(9)]),
    "single tokens": ([1, 12, 1], []),
}
_SIZES = (1, 5, 8, 64)
_NUM_RETAINED = (0, 1, 2, 3)
_KEEPS = ("input", "kv", "attention", "all")
_TIED = (False, True)


@dataclass(frozen=True)
class Case:
    family: str
    batch_name: str
    size: int
    num_retained: int
    keep: str
    tied: bool

    def __str__(self) -> str:
        heads = "tied" if self.tied else "untied"
        return (
            f"{self.family}-{self.batch_name}-size{self.size}-retain{self.num_retained}"
            f"-{self.keep}-{heads}"
        )

    @property
    def options(self) -> furlong.ChunkOptions:
        return furlong.ChunkOptions(
            size=self.size, num_retained=self.num_retained, keep=self.keep,
            hybrid=self.batch_name != "masked",
        )  # fmt: skip

    def sequences(self) -> Batch:
        lens, masked = _BATCHES[self.batch_name]
        return batch(lens, masked=masked)


def product() -> list[Case]:
    dials = (FAMILIES, _BATCHES, _SIZES, _NUM_RETAINED, _KEEPS, _TIED)
    return [Case(*values) for values in itertools.product(*dials)]


def covering_array() -> list[Case]:
    """A few cases that hold every pair of values of any two dials, chosen greedily."""

    def pairs(case: Case) -> set[tuple]:
        values = (
            case.family, case.batch_name, case.size, case.num_retained, case.keep, case.tied,
        )  # fmt: skip
        return set(itertools.combinations(enumerate(values), 2))

    # A stride through the product keeps the greedy choice cheap and still holds every pair.
    candidates = [(case, pairs(case)) for case in product()[::7]]
    missing = set().union(*(pairs(case) for case in product()))
    chosen = []
    while missing:
        case, covered = max(candidates, key=lambda c: len(c[1] & missing))
        if not covered & missing:
            candidates = [(case, pairs(case)) for case in product()]
            continue
        chosen.append(case)
        missing -= covered
    return chosen
