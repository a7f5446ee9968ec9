"""The test matrix: families of models, chunk sizes, orders, kept tensors and where they are stored.

It has covering arrays (`helpers.covering`): of all pairs of options with all families, and of all
triples with a few different families; and a sample of the full product that changes every night.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import furlong
from furlong.testing import TokenSequences
from helpers.batches import batch
from helpers.covering import Design, Row
from helpers.tiny_families import FAMILIES

_BATCHES = {
    # name: (lengths, tokens without a label per sequence)
    "packed": ([5, 3, 8, 1, 2], [range(2)]),
    "split": ([23], []),
    "hybrid": ([23, 4, 2, 17], []),
    "masked": ([29, 9], [range(21), range(9)]),
    "single tokens": ([1, 12, 1], []),
}
_TARGETS = ("none", "cpu", "disk")


@dataclass(frozen=True)
class Case:
    """One value of each option; an option that is not given has its plainest value."""

    family: str
    batch_name: str
    size: int
    num_retained: int = 0
    keep: str = "kv"
    tied: bool = False
    stage_layers: int = 0
    """Layers of each stage of the layer-first order; 0: chunk-first."""
    recompute_layers: int = 0
    kv: str = "none"
    inputs: str = "none"
    attention: str = "none"
    graphs: str = "none"
    tile_tokens: int = 0
    """Rows of each tile of the loss; 0: furlong's own number."""
    segment_tokens: int = 0
    """Tokens of a segment of K,V; 0: furlong's own number, which is more than a case has."""

    def __str__(self) -> str:
        walk = f"height{self.stage_layers}" if self.stage_layers else "chunk-first"
        offload = "/".join((self.kv, self.inputs, self.attention, self.graphs))
        return (
            f"{self.family}-{self.batch_name}-size{self.size}-{walk}-{self.keep}"
            f"-retain{self.num_retained}-recompute{self.recompute_layers}-{offload}"
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
            offload={
                "kv": self.kv, "inputs": self.inputs, "attention": self.attention,
                "graphs": self.graphs,
            },
        )  # fmt: skip

    @property
    def is_short(self) -> bool:
        """Whether sequences have a third of their tokens, since every token is a chunk."""
        return self.size == 1

    def sequences(self) -> TokenSequences:
        lens, masked = _BATCHES[self.batch_name]
        if self.is_short:
            lens, masked = [-(-n // 3) for n in lens], [range(len(own) // 3) for own in masked]
        return batch(lens, masked=masked)

    @contextmanager
    def small_sizes(self) -> Iterator[None]:
        """Context manager: tiles and segments have the case's sizes, and tensors in graphs are
        offloaded however small they are."""
        sizes: dict[str, Any] = {"furlong.runtime.cell._MIN_BYTES": 1}
        if self.tile_tokens:
            sizes["furlong.runtime.head.tile_tokens"] = lambda *_: self.tile_tokens
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
    "kv": _TARGETS,
    "inputs": _TARGETS,
    "attention": _TARGETS,
    "graphs": _TARGETS,
    "tile_tokens": (0, 3),
    "segment_tokens": (0, 3, 8),
}
assert tuple(DIALS) == tuple(field.name for field in fields(Case))


UNLIKE = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "mixtral")
"""Families of which no two attend, scale or route alike."""

_RULES: Mapping[str, Callable[[Row], bool]] = {
    "num_retained": lambda c: c["keep"] != "all",
    "inputs": lambda c: 0 < c["stage_layers"] < 3,
    "attention": lambda c: c["keep"] == "attention",
    "graphs": lambda c: c["keep"] == "all" or c["num_retained"] > 0,
}
"""When an option has an effect, by the values of others; one without a rule always has."""


def design(families: Iterable[str] = FAMILIES, *, loose: Iterable[str] = ()) -> Design:
    return Design(
        {**DIALS, "family": tuple(families)}, _RULES,
        steering=("keep", "num_retained", "stage_layers"), loose=loose,
    )  # fmt: skip


def covering_array() -> tuple[list[Case], list[Case], list[Case]]:
    """Return three lists of cases: they cover every pair of values of options that have an effect,
    and every family; with these every pair of a family and a value; and every triple with the
    families `UNLIKE`."""
    few = design(loose=["family"]).array(2)
    pairs = design().array(2, few)
    triples = design(UNLIKE).array(3, (r for r in few + pairs if r["family"] in UNLIKE))
    first, second, third = ([Case(**row) for row in rows] for rows in (few, pairs, triples))
    return first, second, third


def sample(num_per_family: int, seed: int = 0) -> list[Case]:
    """Return different cases drawn from the product of all options, the same ones for a seed."""
    drawn = random.Random(seed)
    found: dict[Case, None] = {}
    for family in FAMILIES:
        want = len(found) + num_per_family
        while len(found) < want:
            values = {dial: drawn.choice(DIALS[dial]) for dial in DIALS}
            found[Case(**values | {"family": family})] = None
    return list(found)
