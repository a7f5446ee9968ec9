"""Packed data parallelism: legal plans of any lengths, and what balancing is worth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.published.chunks import deal_sequences
from papers.whole_sequences import plan_ulysses

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Forward
from furlong.simulate.clock import time_actions

K = 1024
GIB = 2**30
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"), Training(zero_stage=1))


def seconds(plan):
    return time_actions(plan, MODEL.costs(plan)).duration_s


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 20 * K), min_size=4, max_size=20),
    st.integers(1, 4),
    st.sampled_from(("none", "tokens", "flops")),
    st.booleans(),
)
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, dp_size, balance, packed):
    budget = 30 * GIB
    plan = plan_ulysses(
        seq_lens,
        MODEL,
        sp_size=1,
        dp_size=dp_size,
        balance=balance,
        packed=packed,
        budget_bytes=budget,
    )
    check(plan, MODEL.memory(budget))
    assert len(plan.actions) == dp_size
    assert plan.sp_size == 1
    assert all(plan.kind(chunk) == "packed" for chunk in range(len(plan.chunks)))
    if not packed:
        assert len(plan.chunks) == len(seq_lens)


def test_balanced_replicas_are_faster():
    lens = sample_lengths("chatqa2", 64, 3, max_seq_len=32 * K)
    plans = {
        b: plan_ulysses(lens, MODEL, sp_size=1, dp_size=8, balance=b) for b in ("none", "flops")
    }
    assert seconds(plans["flops"]) < 0.95 * seconds(plans["none"])


@pytest.mark.parametrize("balance", ["tokens", "flops"])
def test_replicas_hold_what_the_balance_says(balance):
    lens = sample_lengths("chatqa2", 40, 3, max_seq_len=32 * K)
    plan = plan_ulysses(lens, MODEL, sp_size=1, dp_size=4, balance=balance)
    dealt = deal_sequences(lens, MODEL.shape, 4, balance)
    for own, actions in zip(dealt, plan.actions, strict=True):
        chunks = [a.chunk for a in actions if isinstance(a, Forward)]
        assert sorted(s.seq_id for c in chunks for s in plan.chunks[c].slices) == sorted(own)


def test_recomputes_before_it_refuses():
    def layers(num_tokens, **dials):
        plan = plan_ulysses(
            [num_tokens], MODEL, sp_size=1, dp_size=1, budget_bytes=30 * GIB, **dials
        )
        return plan.actions[0][0].recompute_layers

    assert layers(4 * K) == 0
    assert layers(100 * K) > 0
    with pytest.raises(ConfigError, match="with 0 of 24 layers recomputed"):
        layers(100 * K, recompute_layers=0)
    with pytest.raises(ConfigError, match="with 24 of 24 layers recomputed"):
        layers(2000 * K)
