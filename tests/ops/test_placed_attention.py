"""Slices on nested places, attended chunk by chunk, against dense attention of whole sequences."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.covering import Design
from helpers.random_chunks import random_chunks
from helpers.switch import Switch, SwitchExchange
from whole_sequences import H, check

from furlong.errors import UnsupportedModelError
from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore
from furlong.ops.attention import AttentionRule
from furlong.ops.backends.cpu_flash import CPUFlash
from furlong.ops.backends.reference import Reference
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.cell import Cell


def on(first: int, size: int, *slices: tuple[int, int, int]) -> list[Slice]:
    return [Slice(*given, Place(first, size)) for given in slices]


LENS = [26, 2, 12, 6, 9, 7, 3, 1, 8]
CHUNKS = [
    Chunk(tuple(slices)) for slices in (
        [*on(0, 4, (0, 0, 9), (1, 0, 2)), *on(0, 2, (2, 0, 6)), *on(2, 2, (3, 0, 5)),
         *on(0, 1, (4, 0, 4), (5, 0, 7)), *on(3, 1, (6, 0, 3))],
        [*on(0, 4, (0, 9, 21)), *on(0, 2, (2, 6, 11)), *on(2, 2, (3, 5, 6)), *on(0, 1, (4, 4, 9))],
        [*on(0, 4, (0, 21, 26)), *on(0, 2, (2, 11, 12), (7, 0, 1)), *on(1, 1, (8, 0, 8))],
    )
]  # fmt: skip


RULES = {
    "all": AttentionRule(0.4),
    "a window": AttentionRule(0.4, 6),
    "capped, the own token": AttentionRule(0.4, 1, 2.0),
    **{f"blocks of {n}": AttentionRule(0.4, block=n) for n in (1, 4, 7, 30)},
}
EXCHANGES = Design(
    {
        "rule": list(RULES),
        "heads": ((4, 2), (4, 1), (2, 1), (2, 2), (3, 3)),
        "is_saved": (False, True),
        "dtype": (torch.float64, torch.bfloat16),
    }
)


@pytest.mark.parametrize(("rule", "heads", "is_saved", "dtype"), EXCHANGES.cases(2))
@pytest.mark.few(10)
def test_places_give_the_whole_and_all_its_gradients(rule, heads, is_saved, dtype):
    """In 16 bits copies of heads and gathered keys are added up in float32, and what travels is
    rounded once."""
    is_wide = dtype == torch.float64
    check(
        CHUNKS, LENS, RULES[rule], CPUFlash, heads=heads, is_saved=is_saved, with_sinks=is_wide,
        dtype=dtype, bound=1e-12 if is_wide else 4e-2,
    )  # fmt: skip


@pytest.mark.parametrize("sp_size", [3, 6, 8])
def test_random_chunks(sp_size):
    source = random.Random(sp_size)
    for _ in range(4):
        lens, chunks = random_chunks(
            source, sp_size, num_chunks=3, num_sequences=source.randint(1, 9), max_tokens=24
        )
        window = source.choice((None, 5))
        rule = AttentionRule(0.4, window, block=None if window else source.choice((None, 4, 11)))
        heads = source.choice(((4, 2), (2, 2), (6, 2), (12, 3)))
        check(
            chunks, lens, rule, Reference, heads=heads, is_saved=source.random() < 0.5,
            with_sinks=source.random() < 0.5, sp_size=sp_size,
        )  # fmt: skip


def test_heads_that_the_config_does_not_name_are_refused():
    """Rows were divided for four key-value heads, the layer has three."""
    rows = rows_of(Chunk(tuple(on(0, 4, (0, 0, 8)))), 0, sp_size=4, q_heads=4, kv_heads=4)
    arena = Arena(torch.device("cpu"))
    cell = Cell(
        rows, {}, KVStore(arena, {}), Reference(), DevicePool(arena), range(1),
        exchange=SwitchExchange(Switch(4), 0),
    )  # fmt: skip
    q, k, v = torch.ones(6, 2, H), torch.ones(3, 2, H), torch.ones(3, 2, H)
    with pytest.raises(UnsupportedModelError, match="6 query and 3 key-value heads"):
        cell.attend(Pass("values"), 0, q, k, v, AttentionRule(1.0), None)
