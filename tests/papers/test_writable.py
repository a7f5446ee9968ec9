"""Which method could have written a plan: its own plans are recognised, combinations are not."""

from dataclasses import replace

import pytest
from papers.writable import writers as writers_of

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.errors import ConfigError
from furlong.plan.values import Chunk, Place, Slice, Tiers
from furlong.planners.chunks.groups import group_chunks, packed_groups
from furlong.planners.chunks.placement import shard, shard_long
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.pipeline import plan_1f1b
from furlong.planners.orders.seq1f1b import plan_seq1f1b
from furlong.planners.search.catalogue import PUBLISHED
from furlong.planners.search.problem import Problem
from furlong.planners.search.search import search

MODEL = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"), Training(zero_stage=1))
LENS = (20_000, 9_000, 3_000, 3_000, 1_000, 1_000, 500, 500)
NAMES = {"1F1B padded": "1F1B", "1F1B packed": "1F1B", "Seq1F1B packed": "Seq1F1B"}
LAYOUTS = ({}, {"dp": 2, "sp": 2}, {"pp": 4}, {"dp": 1, "sp": 2, "pp": 2})


def writers(plan, shape=MODEL.shape):
    return writers_of(plan, shape)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_methods_own_plans_are_recognised(name):
    num_plans = 0
    for sizes in LAYOUTS:
        tiers = ("device", "host")
        batch = Problem(seq_lens=LENS, model=MODEL, num_devices=4, tiers=tiers, **sizes)
        try:
            best = search(batch, {name: PUBLISHED[name]}).best
        except ConfigError:
            continue
        num_plans += 1
        assert NAMES.get(name, name) in writers(best.plan), best.dials
    assert num_plans


def chunked(*, place=shard, stages=(12, 12), sp_size=2, hybrid=False, **dials):
    groups = group_chunks(LENS, ChunkOptions(size=8192, hybrid=hybrid))
    shape = (LENS, MODEL.shape) if place is shard_long else ()
    given = {"num_retained": 2, "keep": "kv"} | dials
    return plan_1f1b(LENS, place(groups, *shape, sp_size), stages=stages, sp_size=sp_size, **given)


def test_chunkflow_in_a_pipeline_is_chunkflows():
    assert writers(chunked()) == ("ChunkFlow",)


@pytest.mark.parametrize(
    "dials",
    [
        {"keep": "attention"},  # remembered attention is nobody's
        {"hybrid": True},  # ChunkFlow never mixes, InfiniPipe never drops
        {"place": shard_long},  # cut sequences beside local ones
        {"tiers": Tiers(kv="host")},  # K,V on the host, chunk-first
        {"keep": "attention", "stages": (24,), "num_retained": 0},
    ],
)
def test_a_combination_is_nobodys(dials):
    assert writers(chunked(**dials)) == ()


def test_seq1f1b_with_local_sequences_is_nobodys():
    groups = group_chunks(LENS, ChunkOptions(size=8192, hybrid=False))
    local = shard_long(groups, LENS, MODEL.shape, 2)
    assert writers(plan_seq1f1b(LENS, local, stages=(12, 12), sp_size=2)) == ()


def test_tails_that_share_chunks_with_short_sequences_are_infinipipes():
    sharded = shard(group_chunks(LENS, ChunkOptions(size=8192)), 2)
    assert writers(plan_seq1f1b(LENS, sharded, stages=(12, 12), sp_size=2)) == ("InfiniPipe",)


def test_whole_sequences_on_one_stage_are_skrulls_however_they_are_placed_and_dealt():
    lens = (3_000,) * 4 + (1_000,) * 4
    groups = packed_groups(lens, 8_000)
    local = plan_seq1f1b(lens, shard_long(groups, lens, MODEL.shape, 2), stages=(24,), sp_size=2)
    static = plan_seq1f1b(lens, shard(groups, 2), stages=(24,), sp_size=2)
    # each sequence on one process of the pool: data parallelism writes that, too
    assert writers(local) == ("Skrull", "FlexSP", "Data parallel")
    assert {"Skrull", "Ulysses"} <= set(writers(static))


def test_what_leaves_the_device_or_is_drawn_is_nobodys():
    groups = shard(packed_groups(LENS, 20_000), 1)
    whole = plan_seq1f1b(LENS, groups, stages=(24,))
    assert "Data parallel" in writers(whole) and "1F1B" in writers(whole)
    assert writers(replace(whole, tiers=Tiers(kv="host"))) == writers(whole)  # no K,V are stored
    assert writers(replace(whole, tiers=Tiers(graphs="disk"))) == ()
    assert writers(replace(whole, sampled=True)) == ()


def test_nested_places_are_nobodys():
    """Disjoint places of different sizes are FlexSP's, and co-residence on two of them no one's."""

    def plan(*places):
        slices = tuple(Slice(i, 0, 512, place) for i, place in enumerate(places))
        return plan_seq1f1b((512,) * len(places), [[Chunk(slices)]], stages=(24,), sp_size=4)

    assert writers(plan(Place(0, 2), Place(2, 1), Place(3, 1))) == ("Skrull", "FlexSP")
    assert writers(plan(Place(0, 4), Place(0, 2), Place(2, 1))) == ()


def test_places_larger_than_the_heads_are_nobodys_but_for_context_parallelism():
    """Ulysses' groups divide the heads, so do those of methods that build on it."""
    four = model_shape("GPT-13B")  # 40 heads
    slices = tuple(Slice(i, 0, 512, Place(2 * i, 2)) for i in range(2))
    plan = plan_seq1f1b((512, 512), [[Chunk(slices)]], stages=(24,), sp_size=4)
    assert {"Skrull", "FlexSP", "Ulysses"} <= set(writers(plan, four))
    odd = replace(four, num_heads=5, num_kv_heads=5)
    assert writers(plan, odd) == ()
    whole = (Slice(0, 0, 512, Place(0, 2)),)
    static = plan_seq1f1b((512,), [[Chunk(whole)]], stages=(24,), sp_size=2)
    assert writers(static, odd) == ("1F1B",)
