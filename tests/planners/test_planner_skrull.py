"""Skrull end to end: micro-batches, the plan, its memory, and what is refused."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import inf
from statistics import mean

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.whole_sequences import schedule_skrull

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.check import check
from furlong.plan.plan import Place
from furlong.planners.chunks import sequence_work
from furlong.planners.places import TOKENS, PoolBatch, Setting
from furlong.planners.skrull import faster_places, plan_skrull

K = 1024
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("H100"), Training(zero_stage=2))
LARGE = replace(MODEL, shape=model_shape("Qwen2.5-7B"), training=Training(zero_stage=3))
GIB = 2**30


def schedule(seq_lens, **sizes):
    return schedule_skrull(seq_lens, sequence_work(seq_lens, MODEL.shape), **sizes)


def ids_of(batch):
    return {piece.seq_id for piece in batch.slices}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=4, max_size=30),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 100),
)
def test_any_schedule_is_whole_and_fits(seq_lens, dp_size, sp_size, extra):
    bucket_tokens = -(-max(seq_lens) // sp_size) + extra
    found = schedule(seq_lens, dp_size=dp_size, sp_size=sp_size, bucket_tokens=bucket_tokens)
    assert len(found) == dp_size
    ids = [i for replica in found for batch in replica for i in ids_of(batch)]
    assert sorted(ids) == list(range(len(seq_lens)))
    for replica in found:
        own = sum(batch.num_tokens for batch in replica)
        assert -(-own // (bucket_tokens * sp_size)) <= len(replica) <= len(seq_lens)
        for batch in replica:
            for rank in range(sp_size):
                own = [s for s in batch.slices if s.place.first <= rank < s.place.stop]
                held = sum(Fraction(s.num_tokens, s.place.size) for s in own)
                assert held <= bucket_tokens


def test_long_and_short_sequences_are_paired():
    """Every m-th of a replica's sorted sequences, for the smallest m that fits. 210 tokens would go
    into two micro-batches of 105, but 20 + 40 + 60 do not."""
    lens = [10, 20, 30, 40, 50, 60]
    (two,) = schedule(lens, dp_size=1, sp_size=2, bucket_tokens=70)
    (three,) = schedule(lens, dp_size=1, sp_size=3, bucket_tokens=35)
    assert list(map(ids_of, two)) == [{0, 2, 4}, {1, 3, 5}]
    assert list(map(ids_of, three)) == [{0, 3}, {1, 4}, {2, 5}]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60 * K), min_size=1, max_size=12), st.sampled_from((1, 2, 4)))
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, sp_size):
    budget = 40 * GIB
    plan = plan_skrull(seq_lens, MODEL, sp_size=sp_size, budget_bytes=budget)
    check(plan, MODEL.memory(budget))
    assert (plan.sp_size, len(plan.actions)) == (sp_size, 1)
    assert all(plan.kind(chunk) == "packed" for chunk in range(len(plan.chunks)))


def brute_force(lens, rates, sp_size, bucket_tokens):
    """Least seconds of one micro-batch over all ways to place its sequences."""
    places = [*(Place(rank, 1) for rank in range(sp_size)), Place(0, sp_size)]
    ways = list(product(places, repeat=len(lens)))
    return min(seconds(lens, way, rates, bucket_tokens) for way in ways)


def places_of(batch):
    return [piece.place for piece in sorted(batch.slices, key=lambda piece: piece.seq_id)]


def seconds(lens, places, rates, bucket_tokens=inf):
    loads = np.zeros((rates.batch.added.shape[2], 1, rates.batch.pool_size))
    for i, place in enumerate(places):
        added = rates.batch.added[i, 0 if place.size == 1 else -1]
        loads[:, 0, place.first : place.stop] += added[:, None]
    return (
        float(rates.seconds(loads).max(axis=-1).sum())
        if loads[TOKENS].max() <= bucket_tokens
        else inf
    )


def test_places_by_seconds_are_close_to_the_best_of_all():
    """Of random micro-batches; placed by FLOPs alone they take 17 % more than the best on average,
    for launches, latencies and exposed all-to-alls are left out."""
    draw, before, after = random.Random(0), [], []
    while len(after) < 40:
        model, sp_size = draw.choice([MODEL, LARGE]), 2
        lens = sorted(int(2 ** draw.uniform(7, 15.5)) for _ in range(draw.randint(2, 6)))
        bucket_tokens = max(int(sum(lens) * draw.uniform(0.55, 1)), -(-lens[-1] // sp_size))
        sizes = {"sp_size": sp_size, "bucket_tokens": bucket_tokens}
        work = sequence_work(lens, model.shape)
        ((batch, *others),) = schedule_skrull(lens, work, dp_size=1, **sizes)
        if others:
            continue
        rates = Setting(PoolBatch.of(lens, model, sp_size, sizes=(1, 2)), 0, bucket_tokens)
        best_s = brute_force(lens, rates, sp_size, bucket_tokens)
        found = faster_places(batch, rates)
        assert ids_of(found) == ids_of(batch)
        before.append(seconds(lens, places_of(batch), rates) / best_s)
        after.append(seconds(lens, places_of(found), rates, bucket_tokens) / best_s)
    assert max(after) < 1.1 and mean(after) < 1.01 < mean(before)
