"""The matrix: every family under every way of cutting, walking, keeping and storing.

An array that covers all pairs of dials for every run of the suite, one that covers all triples for
the long ones, and a sample of the product that is another one every night.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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


_ACTS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "num_retained": lambda c: c["keep"] != "all",
    "inputs": lambda c: 0 < c["stage_layers"] < 3,
    "attention": lambda c: c["keep"] == "attention",
    "graphs": lambda c: c["keep"] == "all" or c["num_retained"] > 0,
}
"""When a dial does anything, by the values of others; a dial that is not here always does."""

_STEERING = ("keep", "num_retained", "stage_layers")
"""The dials that `_ACTS` reads."""

_BITS = {
    entry: 1 << place
    for place, entry in enumerate((dial, value) for dial in DIALS for value in DIALS[dial])
}


def acting(values: Mapping[str, Any]) -> list[str]:
    """The dials that do anything where `_STEERING` has these values."""
    return [dial for dial in DIALS if dial not in _ACTS or _ACTS[dial](values)]


def tuples_of(case: Case, strength: int) -> set[int]:
    """The tuples of `strength` acting entries (dial, value) of a case, each as a set of bits."""
    values = dict(zip(DIALS, astuple(case), strict=True))
    bits = [_BITS[dial, values[dial]] for dial in acting(values)]
    return set(map(sum, itertools.combinations(bits, strength)))


def every_tuple(strength: int) -> set[int]:
    """All tuples of values of `strength` dials that act together."""
    found: set[int] = set()
    for values in map(dict, itertools.product(*map(_entries, _STEERING))):
        bits = [
            [_BITS[dial, values[dial]]] if dial in values else [_BITS[e] for e in _entries(dial)]
            for dial in acting(values)
        ]
        for dials in itertools.combinations(bits, strength):
            found.update(map(sum, itertools.product(*dials)))
    return found


def covering_array(strength: int, chosen: Iterable[Case] = ()) -> list[Case]:
    """A few cases that hold, with those `chosen` already, every tuple of `strength` dials.

    Each case starts with a tuple that is missing still; the dials that say which others act take
    values under which it acts; then every other acting dial takes the value that brings in most
    missing tuples, or the one least used so far.
    """
    missing = every_tuple(strength).difference(*(tuples_of(case, strength) for case in chosen))
    waiting = sorted(missing)
    used: Counter[int] = Counter()
    cases = []
    while missing:
        while waiting[-1] not in missing:
            waiting.pop()
        values = _steered(waiting[-1], missing, strength)
        acts = acting(values)
        for dial in (d for d in DIALS if d not in values):
            held = [_BITS[d, values[d]] for d in acts if d in values]
            others = [sum(c) for c in itertools.combinations(held, strength - 1)]
            best = (-1, 0)
            for value in DIALS[dial]:
                bit = _BITS[dial, value]
                brings = sum(other + bit in missing for other in others) if dial in acts else 0
                if (brings, -used[bit]) > best:
                    best, values[dial] = (brings, -used[bit]), value
        used.update(_BITS[entry] for entry in values.items())
        cases.append(Case(**values))
        missing -= tuples_of(cases[-1], strength)
    return cases


def _entries(dial: str) -> list[tuple[str, Any]]:
    return [(dial, value) for value in DIALS[dial]]


def _steered(wanted: int, missing: set[int], strength: int) -> dict[str, Any]:
    """The wanted entries with those values of the steering dials that bring in most beside them."""
    own = {dial: value for (dial, value), bit in _BITS.items() if bit & wanted}
    best: tuple[int, dict[str, Any]] = (-1, {})
    for steering in map(dict, itertools.product(*map(_entries, _STEERING))):
        values = own | steering
        acts = acting(values)
        if own.items() <= values.items() and own.keys() <= set(acts):
            bits = [_BITS[dial, values[dial]] for dial in acts if dial in values]
            brings = sum(sum(c) in missing for c in itertools.combinations(bits, strength))
            best = max(best, (brings, values), key=lambda b: b[0])
    return best[1]


def sample(num_per_family: int, seed: int = 0) -> list[Case]:
    """Cases drawn from the product of all dials: the same ones for a seed, no two alike."""
    drawn = random.Random(seed)
    found: dict[Case, None] = {}
    for family in FAMILIES:
        want = len(found) + num_per_family
        while len(found) < want:
            values = {dial: drawn.choice(DIALS[dial]) for dial in DIALS}
            found[Case(**values | {"family": family})] = None
    return list(found)
