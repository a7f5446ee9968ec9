"""The matrix: every family under every way of cutting, walking, keeping and storing.

A covering array for every run of the suite, a sample and one family's product for the long ones.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any
from unittest.mock import patch

import furlong
from helpers.gradients import Batch, batch
from helpers.tiny_families import FAMILIES

_BATCHES = {
    # name: (lengths, tokens without a label per sequence)
    "packed": ([5, 3, 8, 1, 2], [range(2)]),
    "split": ([23], []),
    "hybrid": ([23, 4, 2, 17], []),
    "masked": ([29, 9], [range(21), range(9)]),
    "single tokens": ([1, 12, 1], []),
}
_TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Case:
    """One value of each dial; a dial that is not given has its plainest value."""

    family: str
    batch_name: str
    size: int
    num_retained: int = 0
    keep: str = "kv"
    tied: bool = False
    stage_layers: int = 0
    """Layers of each stage of the layer-first order; 0: chunk-first."""
    recompute_layers: int = 0
    kv: str = "device"
    inputs: str = "device"
    attention: str = "device"
    graphs: str = "device"
    tile_tokens: int = 0
    """Rows of each tile of the loss; 0: as many as furlong takes."""
    segment_tokens: int = 0
    """Tokens of a segment of K,V; 0: as many as furlong takes, which is more than there are."""

    def __str__(self) -> str:
        walk = f"height{self.stage_layers}" if self.stage_layers else "chunk-first"
        tiers = "/".join((self.kv, self.inputs, self.attention, self.graphs))
        return (
            f"{self.family}-{self.batch_name}-size{self.size}-{walk}-{self.keep}"
            f"-retain{self.num_retained}-recompute{self.recompute_layers}-{tiers}"
            f"-tile{self.tile_tokens}-segment{self.segment_tokens}"
            f"-{'tied' if self.tied else 'untied'}"
        )

    @property
    def options(self) -> furlong.ChunkOptions:
        return furlong.ChunkOptions(
            size=self.size, num_retained=self.num_retained, keep=self.keep,
            hybrid=self.batch_name != "masked",
            order="layer-first" if self.stage_layers else "chunk-first",
            stage_layers=self.stage_layers or None, recompute_layers=self.recompute_layers,
            tier={
                "kv": self.kv, "inputs": self.inputs, "attention": self.attention,
                "graphs": self.graphs,
            },
        )  # fmt: skip

    def sequences(self) -> Batch:
        lens, masked = _BATCHES[self.batch_name]
        return batch(lens, masked=masked)

    @contextmanager
    def small_sizes(self) -> Iterator[None]:
        """Within it tiles and segments have the case's sizes, and graphs leave nothing behind as
        too small."""
        sizes: dict[str, Any] = {"furlong.runtime.memory.saved_graphs._MIN_BYTES": 1}
        if self.tile_tokens:
            sizes["furlong.runtime.cells.loss_head.tile_tokens"] = lambda *_: self.tile_tokens
        if self.segment_tokens:
            sizes["furlong.kv.store.segment_tokens"] = lambda *_: self.segment_tokens
        with ExitStack() as stack:
            for name, size in sizes.items():
                stack.enter_context(patch(name, size))
            yield


DIALS: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "batch_name": tuple(_BATCHES),
    "size": (1, 5, 8, 64),
    "num_retained": (0, 1, 2, 3),
    "keep": ("input", "kv", "attention", "all"),
    "tied": (False, True),
    "stage_layers": (0, 1, 2, 3),
    "recompute_layers": (0, 1, 3),
    "kv": _TIERS,
    "inputs": _TIERS,
    "attention": _TIERS,
    "graphs": _TIERS,
    "tile_tokens": (0, 3),
    "segment_tokens": (0, 3, 8),
}
assert tuple(DIALS) == tuple(field.name for field in fields(Case))


def every_pair() -> set[tuple]:
    """All pairs of values of two dials, each as ((dial, value), (dial, value))."""
    values = [[(dial, value) for value in DIALS[dial]] for dial in DIALS]
    return {pair for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b)}


def pairs_of(case: Case) -> set[tuple]:
    return set(itertools.combinations(zip(DIALS, astuple(case), strict=True), 2))


def covering_array() -> list[Case]:
    """A few cases that hold every pair of values of any two dials.

    Each case starts with a pair that is missing still; then every other dial takes the value that
    brings in most missing pairs, or the one least used so far.
    """
    missing = dict.fromkeys(sorted(every_pair(), key=str))
    used: Counter[tuple] = Counter()
    places = list(DIALS)

    def brings(entry: tuple, chosen: Mapping[str, Any]) -> int:
        pairs = (
            sorted((entry, other), key=lambda e: places.index(e[0])) for other in chosen.items()
        )
        return sum(tuple(pair) in missing for pair in pairs)

    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for dial in (d for d in places if d not in chosen):
            entries = [(dial, value) for value in DIALS[dial]]
            best = max(entries, key=lambda e: (brings(e, chosen), -used[e]))
            chosen[dial] = best[1]
        used.update(chosen.items())
        cases.append(Case(**chosen))
        for pair in pairs_of(cases[-1]):
            missing.pop(pair, None)
    return cases


def sample(num_per_family: int) -> list[Case]:
    """Cases drawn from the product of all dials: the same ones in every run, no two alike."""
    drawn = random.Random(0)
    found: dict[Case, None] = {}
    for family in FAMILIES:
        want = len(found) + num_per_family
        while len(found) < want:
            values = {dial: drawn.choice(DIALS[dial]) for dial in DIALS}
            found[Case(**values | {"family": family})] = None
    return list(found)


def product_of_one_family() -> list[Case]:
    """Mistral, whose window is shorter than its sequences: all ways to walk, keep and store."""
    dials = ("num_retained", "keep", "stage_layers", "recompute_layers")
    cases = []
    for values in itertools.product(*(DIALS[dial] for dial in dials)):
        own = dict(zip(dials, values, strict=True))
        for tier in _TIERS:
            tiers = dict.fromkeys(("kv", "inputs", "attention", "graphs"), tier)
            cases.append(Case("mistral", "hybrid", 5, **own, **tiers, segment_tokens=3))
    return cases
