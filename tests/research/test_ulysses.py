"""Static groups of whole sequences: data parallel and Ulysses, packed, balanced, under ZeRO-3."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.published.chunks import deal_sequences
from papers.whole_sequences import plan_ulysses, with_zero_3

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Forward, Place
from furlong.simulate.clock import time_actions

pytestmark = pytest.mark.nightly

K = 1024
GIB = 2**30
GPT = with_zero_3(CostModel(model_shape("GPT-7B"), Machine.named("A100-80")))
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"), Training(zero_stage=1))


def seconds(plan, model=MODEL):
    return time_actions(plan, model.costs(plan)).duration_s


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 20 * K), min_size=4, max_size=16),
    st.sampled_from([(MODEL, 1, 30 * GIB), (GPT, 8, None), (GPT, 16, None)]),
    st.integers(1, 4),
    st.sampled_from(("none", "tokens", "flops")),
    st.booleans(),
)
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, setting, dp_size, balance, packed):
    model, sp_size, budget = setting
    layout = {"dp_size": dp_size, "sp_size": sp_size}
    plan = plan_ulysses(
        seq_lens, model, balance=balance, packed=packed, budget_bytes=budget, **layout
    )
    check(plan, model.memory(budget))
    assert (len(plan.actions), plan.sp_size) == (dp_size, sp_size)
    assert {s.place for chunk in plan.chunks for s in chunk.slices} == {Place(0, sp_size)}
    kinds = [plan.kind(chunk) for chunk in range(len(plan.chunks))]
    assert set(kinds) <= {"packed", "dummy"} and (model is GPT or "dummy" not in kinds)
    assert packed or kinds.count("packed") == len(seq_lens)
    dealt = deal_sequences(seq_lens, model.shape, dp_size, balance)
    for own, actions in zip(dealt, plan.actions, strict=True):
        chunks = [plan.chunks[a.chunk] for a in actions if isinstance(a, Forward)]
        assert sorted(s.seq_id for chunk in chunks for s in chunk.slices) == sorted(own)
        assert model is MODEL or len(actions) == len(plan.actions[0])  # in step


def test_balanced_replicas_and_packed_sequences_are_faster():
    lens = sample_lengths("chatqa2", 64, 3, max_seq_len=32 * K)
    plans = [plan_ulysses(lens, MODEL, sp_size=1, dp_size=8, balance=b) for b in ("none", "flops")]
    assert seconds(plans[1]) < 0.95 * seconds(plans[0])
    lens = sample_lengths("wikipedia", 64, 0, max_seq_len=48 * K)
    plans = [plan_ulysses(lens, GPT, dp_size=4, sp_size=8, packed=p) for p in (True, False)]
    assert seconds(plans[0], GPT) < 0.5 * seconds(plans[1], GPT)


def test_recomputes_before_it_refuses():
    def layers(num_tokens, **dials):
        plan = plan_ulysses(
            [num_tokens], MODEL, sp_size=1, dp_size=1, budget_bytes=30 * GIB, **dials
        )
        return plan.actions[0][0].recompute_layers

    assert layers(4 * K) == 0 < layers(100 * K)
    with pytest.raises(ConfigError, match="with 0 of 24 layers recomputed"):
        layers(100 * K, recompute_layers=0)
    with pytest.raises(ConfigError, match="with 24 of 24 layers recomputed"):
        layers(2000 * K)
    with pytest.raises(ConfigError, match="use more devices") as error:
        plan_ulysses([3072 * K] * 4, GPT, dp_size=4, sp_size=8)
    assert error.value.given.startswith("sequence 0 of 3,145,728 tokens, 393,216 on each of 8")
    assert plan_ulysses([3072 * K], GPT, dp_size=1, sp_size=32).chunks
