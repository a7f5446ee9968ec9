"""What a device can hold at a time, and the number of recomputed layers."""

from dataclasses import replace

import pytest
from papers.whole_sequences import fastest_plan, packed_chunks

from furlong.cost.machine import hardware
from furlong.cost.memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError, PlanError
from furlong.plan.check import check
from furlong.plan.plan import Chunk, Forward, Place, Slice
from furlong.planners.chunks import (
    chunk_by_chunk,
    fitting_tokens,
    peak_bytes,
    recompute_choices,
)
from furlong.simulate.clock import time_actions

K = 1024
GIB = 2**30
MODEL = CostModel(model_shape("Llama-3-8B"), hardware("A100-80"), Training(zero_stage=3))


@pytest.mark.parametrize("layers", [0, 8, 32])
@pytest.mark.parametrize("budget", [40 * GIB, 70 * GIB])
@pytest.mark.parametrize(("dp_size", "sp_size"), [(8, 1), (2, 8)])
def test_one_token_more_does_not_fit(layers, budget, dp_size, sp_size):
    """The checker of plans agrees for sharded tokens; local ones need no buffers of an exchange."""
    sizes = {"dp_size": dp_size, "sp_size": sp_size}
    tokens = fitting_tokens(MODEL, budget, recompute_layers=layers, **sizes)
    for placed in ("sharded", "local"):
        for more in (0, 1):
            lens = [(tokens + more) * sp_size] if placed == "sharded" else [tokens + more] * sp_size
            places = [Place(i, sp_size // len(lens)) for i in range(len(lens))]
            lens = lens * dp_size
            chunks = [
                Chunk(
                    tuple(
                        Slice(d * len(lens) // dp_size + i, 0, lens[0], places[i])
                        for i in range(len(lens) // dp_size)
                    )
                )
                for d in range(dp_size)
            ]
            plan = chunk_by_chunk(
                lens,
                [[chunk] for chunk in chunks],
                num_layers=32,
                sp_size=sp_size,
                recompute_layers=layers,
            )
            if more and (placed == "sharded" or sp_size == 1):
                with pytest.raises(PlanError, match="memory stays within the budget"):
                    check(plan, MODEL.memory(budget))
            else:
                check(plan, MODEL.memory(budget))


def test_recomputed_layers_buy_tokens():
    layout = {"dp_size": 4, "sp_size": 8}
    tokens = [
        fitting_tokens(MODEL, 70 * GIB, recompute_layers=layers, **layout) for layers in range(33)
    ]
    # the first one buys nothing: its graph is there again while its backward runs
    assert tokens[1] <= tokens[0]
    assert tokens[1:] == sorted(tokens[1:])
    assert tokens[32] > 4 * tokens[0] > 0
    small = [peak_bytes(MODEL, 4 * K, recompute_layers=n, **layout) for n in (0, 16, 32)]
    assert small == sorted(small, reverse=True)


def test_nothing_fits_beside_the_state():
    assert fitting_tokens(MODEL, GIB, dp_size=1, sp_size=1) == 0


def test_choices_are_none_all_and_some_between():
    assert recompute_choices(32) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert recompute_choices(2) == [0, 1, 2]
    assert recompute_choices(1) == [0, 1]


def test_packs_or_leaves_apart():
    lens = [5, 9, 9, 3]
    texts = [
        [[s.seq_id for s in chunk.slices] for chunk in packed_chunks([3, 0, 1], lens, most)]
        for most in (12, None)
    ]
    assert texts == [[[1, 3], [0]], [[3], [0], [1]]]


def test_takes_the_fastest_number_of_layers():
    lens = [2 * K] * 24

    def deal(tokens):
        return [packed_chunks(range(len(lens)), lens, tokens)]

    def plan(layers):
        return fastest_plan(
            lens, MODEL, deal, dp_size=1, sp_size=1, recompute_layers=layers, budget_bytes=budget
        )

    def seconds(plan):
        return time_actions(plan, MODEL.costs(plan)).duration_s

    budget = 200 * GIB
    best = plan(None)
    times = [seconds(plan(layers)) for layers in recompute_choices(32)]
    assert seconds(best) == min(times)
    assert best.actions[0][0] == Forward(
        0, 0, "all", recompute_choices(32)[times.index(min(times))]
    )
    assert max(times) > 1.1 * min(times)
    budget = 100 * GIB
    with pytest.raises(ConfigError, match="sequence 0 of 2,048 tokens on one device"):
        plan(None)


def test_what_fits_is_counted_once_for_all_batches(monkeypatch):
    walks, walk = [], PlanMemory.walk
    monkeypatch.setattr(PlanMemory, "walk", lambda *args: walks.append(args) or walk(*args))
    sizes = {"dp_size": 1, "sp_size": 8, "recompute_layers": 5}
    first = fitting_tokens(MODEL, 66 * 10**9, **sizes)
    count = len(walks)
    assert fitting_tokens(replace(MODEL, shape=replace(MODEL.shape)), 66 * 10**9, **sizes) == first
    assert len(walks) == count > 0
