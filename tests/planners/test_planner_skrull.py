"""Skrull end to end: micro-batches, the plan, its memory, and what is refused."""

from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from papers.whole_sequences import schedule_skrull

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.check import check
from furlong.planners.chunks import by_cost, sequence_work, shard_all
from furlong.planners.skrull import plan_skrull
from furlong.simulate.predict import step_s

K = 1024
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("H100"), Training(zero_stage=2))
LARGE = replace(MODEL, shape=model_shape("Qwen2.5-7B"), training=Training(zero_stage=3))
GIB = 2**30


def schedule(seq_lens, **sizes):
    return schedule_skrull(seq_lens, sequence_work(seq_lens, MODEL.shape), **sizes)


def ids_of(batch):
    return {piece.seq_id for piece in batch.slices}


@settings(max_examples=100)
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


@settings(max_examples=25)
@given(st.lists(st.integers(1, 60 * K), min_size=1, max_size=12), st.sampled_from((1, 2, 4)))
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, sp_size):
    budget = 40 * GIB
    plan = plan_skrull(seq_lens, MODEL, sp_size=sp_size, budget_bytes=budget)
    check(plan, MODEL.memory(budget))
    assert (plan.sp_size, len(plan.actions)) == (sp_size, 1)
    assert all(plan.kind(chunk) == "packed" for chunk in range(len(plan.chunks)))


def test_sequences_stay_local_though_to_share_all_is_predicted_to_be_faster():
    """Algorithm 1 shares what has no room, whatever the seconds of the cost model."""
    lens = sample_lengths("wikipedia", 256)
    training = Training(zero_stage=1, gathers=True, replicas=4)
    cost = replace(LARGE, training=training)
    own = [lens[i] for i in by_cost(sequence_work(lens, cost.shape), 4)[0]]
    plan = plan_skrull(own, cost, sp_size=8, budget_bytes=cost.hardware.budget_bytes)
    sizes = [piece.place.size for chunk in plan.chunks for piece in chunk.slices]
    assert sizes.count(1) > 0.94 * len(sizes)
    all_shared = replace(plan, chunks=tuple(shard_all([plan.chunks], 8)[0]))
    assert step_s(cost, all_shared) < 0.8 * step_s(cost, plan)
