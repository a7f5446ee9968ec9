"""Static Ulysses: every slice sharded, packed, under ZeRO-3."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.whole_sequences import plan_skrull, plan_ulysses, with_zero_3

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Place
from furlong.simulate.clock import time_actions

K = 1024
MODEL = with_zero_3(CostModel(model_shape("GPT-7B"), hardware("A100-80")))


def seconds(plan, model=MODEL):
    return time_actions(plan, model.costs(plan)).duration_s


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 48 * K), min_size=2, max_size=16),
    st.integers(1, 2),
    st.sampled_from((8, 16)),
    st.booleans(),
)
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, dp_size, sp_size, packed):
    plan = plan_ulysses(seq_lens, MODEL, dp_size=dp_size, sp_size=sp_size, packed=packed)
    check(plan, MODEL.memory())
    assert plan.sp_size == sp_size
    assert {s.place for chunk in plan.chunks for s in chunk.slices} == {Place(0, sp_size)}
    kinds = [plan.kind(chunk) for chunk in range(len(plan.chunks))]
    assert set(kinds) <= {"packed", "dummy"}
    assert packed or kinds.count("packed") == len(seq_lens)
    assert len({len(actions) for actions in plan.actions}) == 1  # in step


def test_one_device_is_plain():
    plan = plan_ulysses([100, 200], MODEL, dp_size=2, sp_size=1, budget_bytes=200 * 2**30)
    assert {s.place for chunk in plan.chunks for s in chunk.slices} == {Place(0, 1)}


def test_packing_is_worth_more_where_sequences_are_short():
    lens = sample_lengths("wikipedia", 64, 0, max_seq_len=48 * K)
    plans = [plan_ulysses(lens, MODEL, dp_size=4, sp_size=8, packed=p) for p in (True, False)]
    assert seconds(plans[0]) < 0.5 * seconds(plans[1])


def test_larger_groups_hold_longer_sequences():
    with pytest.raises(ConfigError, match="spread a sequence over") as error:
        plan_ulysses([3072 * K] * 4, MODEL, dp_size=4, sp_size=8)
    assert error.value.given.startswith("sequence 0 of 3,145,728 tokens, 393,216 on each of 8")
    assert plan_ulysses([3072 * K], MODEL, dp_size=1, sp_size=32).chunks


def test_skrull_beats_one_sequence_at_a_time():
    """What Skrull was compared with: DeepSpeed, here one sequence per micro-batch."""
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("H100"))
    lens = sample_lengths("wikipedia", 64, 0, max_seq_len=200 * K)
    theirs = plan_ulysses(lens, model, dp_size=4, sp_size=8, packed=False)
    ours = plan_skrull(lens, model, dp_size=4, sp_size=8)
    assert seconds(ours, model) < 0.5 * seconds(theirs, model)
