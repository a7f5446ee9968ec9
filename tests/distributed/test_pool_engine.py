"""Engine on pools: the gradients of one process, with weights that replicas and pools share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from distributed.layout_cases import Case, check
from helpers.batches import batch
from helpers.placed import plan_of
from helpers.ranks import run_ranks
from helpers.tiny_families import build, config_of

import furlong
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.models.describe import describe
from furlong.plan.plan import Chunk, ChunkPlan, Place, Slice
from furlong.planners.chunks import group_chunks, shard_all, shard_long
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b
from furlong.planners.places import plan_places
from furlong.runtime.distributed.mesh import make_ranks

NESTED_LENS = (21, 2, 11, 6, 9)
NESTED = [
    Chunk((Slice(0, 0, 9, Place(0, 4)), Slice(1, 0, 2, Place(0, 4)), Slice(2, 0, 6, Place(0, 2)),
           Slice(3, 0, 5, Place(2, 2)), Slice(4, 0, 4, Place(0, 1)))),
    Chunk((Slice(0, 9, 21, Place(0, 4)), Slice(2, 6, 11, Place(0, 2)), Slice(3, 5, 6, Place(2, 2)),
           Slice(4, 4, 9, Place(0, 1)))),
]  # fmt: skip
NUM_LAYERS = 3
LENS = (23, 4, 2, 17)


def shape_of(family: str = "llama") -> ModelShape:
    return describe(config_of(family))


def sharded(
    lens: Sequence[int], sp_size: int, *, size: int = 8, num_layers: int = NUM_LAYERS,
    backward: bool = True, short_stay: bool = False,
) -> ChunkPlan:  # fmt: skip
    """Chunks over the pool; `short_stay`: but for short sequences."""
    groups = group_chunks(lens, ChunkOptions(size=size))
    placed = (
        shard_long(groups, lens, shape_of(), sp_size) if short_stay else shard_all(groups, sp_size)
    )
    return plan_1f1b(lens, placed, stages=(num_layers,), sp_size=sp_size, backward=backward)


def on_places(lens: Sequence[int], pool_size: int) -> ChunkPlan:
    """Whole sequences where the planner puts them."""
    model = CostModel(shape_of(), Machine.named("A100-80"))
    return plan_places(lens, model, pool_size=pool_size, num_changes=0)


def on_the_second() -> ChunkPlan:
    """All on one process: the other has no token."""
    pieces = [Slice(0, 0, 9, Place(1, 1)), Slice(0, 9, 14, Place(1, 1))]
    chunks = [Chunk((piece,)) for piece in pieces]
    return plan_of([14], chunks, 2, ChunkOptions(size=9), num_layers=NUM_LAYERS)


def test_pool_of_two():
    """Each process is given the sequences that it reads."""
    cases = {
        "sharded": Case(sharded(LENS, 2)),
        "short ones stay": Case(sharded(LENS, 2, short_stay=True)),
        "places": Case(on_places(LENS, 2)),
        "adapters": Case(sharded(LENS, 2), lora=True),
        "evaluation": Case(sharded(LENS, 2, backward=False)),
        "no token on one": Case(on_the_second()),
        "no label in the last chunk": Case(sharded((21,), 2), masked=(range(9, 21),)),
    }
    check(cases, (1, 2, 1), own_alone=True)


@pytest.mark.slow
def test_pool_of_four():
    two = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    nested = plan_of(
        NESTED_LENS, NESTED, 4, ChunkOptions(size=16, keep="attention"), num_layers=NUM_LAYERS
    )
    check(
        {
            "nested": Case(nested),
            "nested, two heads": Case(nested, settings=two),
            "nested, window": Case(nested, family="mistral"),
            "places": Case(on_places((40, 21, 9, 7, 5, 3, 3), 4)),
        },
        (1, 4, 1),
    )


@pytest.mark.slow
def test_two_pools_of_two():
    lens = (LENS, (9, 31, 3))
    plans = [sharded(own, 2, short_stay=bool(index)) for index, own in enumerate(lens)]
    plan = join_replicas(plans, [range(4), range(4, 7)], [n for own in lens for n in own])
    tied = {"tie_word_embeddings": True}
    check(
        {
            "plain": Case(plan),
            "tied": Case(plan, settings=tied),
            "adapters": Case(plan, lora=True),
            "two steps": Case(plan, num_steps=2),
            "no label on one": Case(plan, masked=tuple(range(n) for n in LENS)),
        },
        (2, 2, 1),
    )


@pytest.mark.slow
def test_a_pool_that_is_no_power_of_two():
    check({"sharded": Case(sharded(LENS, 3))}, (1, 3, 1))


def weighted(rank: int) -> tuple[float, float]:
    """Norms of the gradients of a step, and of the same with a weight of two."""
    engine = furlong.Engine(build("llama"), ranks=make_ranks(1, 2, 1, "cpu"))
    sequences = batch([17])
    plan = engine.plan([17], ChunkOptions(size=8))  # the last chunk has one token
    norms = []
    for weights in (None, [2.0]):
        engine.run(plan, sequences, weights=weights)
        norms.append(engine.clip_gradients(None))
        engine.model.model.zero_grad()
    return norms[0], norms[1]


def test_weights_of_sequences_where_a_process_has_no_token_of_a_chunk() -> None:
    for plain, doubled in run_ranks(weighted, num_ranks=2):
        assert doubled == pytest.approx(2 * plain, rel=1e-12) and plain > 0
