"""Places in one pool: legal plans that fit, the cost model's seconds, the optimum, the bound."""

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.shapes import shape_of_values
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.fits import fit
from papers.places_bound import lower_bound_s

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError, DataError
from furlong.plan.text import load_plan, save_plan
from furlong.planners.chunks import peak_bytes
from furlong.planners.places import (
    Division,
    PoolBatch,
    Spot,
    plan_of,
    plan_places,
)
from furlong.planners.places import settings as settings_of
from furlong.simulate.clock import time_actions

K = 1024
MODEL = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"), Training(zero_stage=3))
GPT = CostModel(model_shape("GPT-13B"), Machine.named("A800"), Training(zero_stage=3))


def seconds(plan, model=MODEL):
    return time_actions(plan, model.costs(plan)).duration_s


@settings(max_examples=4)
@given(
    st.lists(st.integers(1, 40 * K), min_size=1, max_size=12),
    st.sampled_from((1, 4, 12, 16)),
    st.sampled_from((0, 3)),
)
def test_any_lengths_give_a_legal_plan_that_fits(seq_lens, pool_size, zero_stage):
    model = replace(MODEL, training=replace(MODEL.training, zero_stage=zero_stage))
    budget = 500 * 2**30 if zero_stage == 0 or pool_size == 1 else None
    plan = plan_places(
        seq_lens, model, pool_size=pool_size, budget_bytes=budget, num_changes=5
    )  # fmt: skip
    fit(plan, model, budget)
    assert load_plan(save_plan(plan)) == plan
    assert (plan.sp_size, len(plan.actions)) == (pool_size, 1)
    assert all(plan.kind(chunk) == "packed" for chunk in range(len(plan.chunks)))
    assert seconds(plan, model) >= (1 - 1e-9) * lower_bound_s(
        seq_lens, model, pool_size=pool_size, budget_bytes=budget
    )


@settings(max_examples=15)
@given(st.data())
def test_a_division_is_charged_what_its_plan_is(data):
    """Loads that are added up are priced as the project's own costs price the plan."""
    layers = data.draw(st.sampled_from((0, 3, 28)))
    model = data.draw(st.sampled_from((MODEL, GPT)))
    seq_lens = data.draw(st.lists(st.integers(1, 8 * K), min_size=1, max_size=8))
    pool_size = data.draw(st.sampled_from((6, 8)))
    batch = PoolBatch.of(seq_lens, model, pool_size)
    budget = 500 * 2**30
    (setting,) = settings_of(batch, budget, [layers])
    division = Division(setting, 2, {})
    for seq_id in range(len(seq_lens)):
        kind = data.draw(st.integers(0, len(batch.sizes) - 1))
        size = batch.sizes[kind]
        first = size * data.draw(st.integers(0, pool_size // size - 1))
        micro_batch = 0 if seq_id == 0 else data.draw(st.integers(0, 1))
        division.put(seq_id, Spot(micro_batch, kind, first))
    plan = plan_of(batch, division.spots, layers, budget)
    filled = division.seconds()[:, : len(plan.chunks)]
    if len(plan.chunks) == 1:
        assert seconds(plan, model) == pytest.approx(filled.max(axis=2).sum())
    else:
        assert seconds(plan, model) == pytest.approx(division.step_s())
    ((norm_s, spot),) = division.moves([0])
    if norm_s < np.inf:  # no division undercuts its norm
        assert spot != division.spots[0]
        before, before_s = dict(division.spots), division.step_s()
        division.put(0, spot)
        assert division.step_s() <= norm_s * (1 + 1e-9)
        division.reset(before)
        assert division.step_s() == pytest.approx(before_s)


def small(num_heads):
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000,
        "num_attention_heads": num_heads, "intermediate_size": 4096,
    }  # fmt: skip
    return CostModel(shape_of_values(config), Machine.named("A100-80"), Training(zero_stage=3))


def optimum_s(batch, found, most):
    """The least step over all settings and all divisions into up to `most` micro-batches."""
    best = float("inf")
    for setting in found:
        for count in range(setting.fewest, most + 1):
            loads = loads_of_all_divisions(batch, count)
            step_s = setting.seconds(loads).max(axis=-1).sum(axis=(0, 2))
            room = setting.held(loads).max(axis=(1, 2)) <= setting.device_tokens
            best = min(best, float(step_s[room].min(initial=float("inf"))))
    return best


def loads_of_all_divisions(batch, count):
    """(F, N, M, W), the first sequence on the first place of each size."""
    loads = np.zeros((batch.added.shape[2], 1, count, batch.pool_size))
    for added in batch.added:
        choices = []
        for kind, size in enumerate(batch.sizes):
            for first in range(0, batch.pool_size if choices_are_free(loads) else size, size):
                for number in range(count if choices_are_free(loads) else 1):
                    one = np.zeros(loads.shape[:1] + loads.shape[2:])
                    one[:, number, first : first + size] = added[kind][:, None]
                    choices.append(one)
        grown = loads[:, :, None] + np.stack(choices, axis=1)[:, None]
        loads = grown.reshape(len(loads), -1, *loads.shape[2:])
    return loads


def choices_are_free(loads):
    """Whether a sequence is there already: up to then all places of a size are alike."""
    return bool(loads.any())


def excess(draw):
    """How much slower the planned step is than the best of all, in a drawn case on four devices;
    with one head or two, places of four gather K,V."""
    model = small(draw.choice((8, 2, 1)))
    tight = draw.random() < 0.5
    lens = [int(2 ** draw.uniform(6, 16)) for _ in range(draw.randint(1, 4 if tight else 6))]
    budget = 80 * 2**30
    if tight:
        # room for all sequences at once, or for a part of them, with nothing recomputed
        least = max(max(lens) / 6, sum(lens) / 8)
        tokens = int(draw.uniform(least, 1.2 * max(least, sum(lens) / 4)))
        budget = peak_bytes(model.memory(), tokens, dp_size=1, sp_size=4, recompute_layers=0)
    batch = PoolBatch.of(lens, model, 4)
    found = settings_of(batch, budget, range(5))
    if not found:
        with pytest.raises(ConfigError):
            plan_places(lens, model, pool_size=4, budget_bytes=budget)
        return None
    # with room for all in one micro-batch, more of them or more work win nothing
    roomy = not tight and found[0].fewest == 1
    best_s = optimum_s(batch, found[:1], 1) if roomy else optimum_s(batch, found, 2)
    best_s = best_s if best_s < float("inf") else optimum_s(batch, found, 3)
    plan = plan_places(lens, model, pool_size=4, budget_bytes=budget)
    bound_s = lower_bound_s(lens, model, pool_size=4, budget_bytes=budget)
    assert bound_s <= best_s * (1 + 1e-9)
    return seconds(plan, model) / best_s - 1


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_near_the_optimum_of_small_cases(count):
    """Within 5 % of the best of all divisions on average, 20 % at worst."""
    draw = random.Random(count)
    found = [one for one in (excess(draw) for _ in range(count)) if one is not None]
    assert len(found) > 0.8 * count
    assert min(found) > -1e-9
    assert np.mean(found) <= 0.05 and max(found) <= 0.2


def test_a_few_sequences_get_about_the_best_of_all_divisions():
    """Eight on four devices, where static groups that are improved get stuck 2.2 % above it."""
    model = CostModel(model_shape("Llama-3.2-1B"), Machine.named("H100"), Training(zero_stage=1))
    lens = [12920, 6548, 14325, 10258, 4827, 5421, 13399, 6679]
    spots = [(0, 1, 2), (0, 0, 3), (0, 2, 0), (0, 0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 0), (0, 0, 2)]
    batch = PoolBatch.of(lens, model, 4)
    best = plan_of(batch, {i: Spot(*spot) for i, spot in enumerate(spots)}, 0, None)
    found = plan_places(lens, model, pool_size=4)
    assert seconds(found, model) <= 1.005 * seconds(best, model)


def test_a_sequence_too_long_for_the_heads_gets_a_larger_place():
    """Half as many tokens on each process, twice as many sequences in a step of equal length."""
    lens, budget = [96 * K, *[2 * K] * 20], 60 * 2**30
    plan = plan_places(lens, GPT, pool_size=16, budget_bytes=budget, num_changes=5)
    sizes = {piece.seq_id: piece.place.size for chunk in plan.chunks for piece in chunk.slices}
    assert sizes[0] == 16 and sorted(sizes.values())[-2] < 16
    fit(plan, GPT, budget)


def test_more_tries_are_never_worse_and_the_same_ones_give_the_same_plan():
    lens = sample_lengths("commoncrawl", 80, 0, max_seq_len=16 * K)
    plans = [plan_places(lens, MODEL, pool_size=8, num_changes=n) for n in (0, 8, 8, 30)]
    steps = [seconds(plan) for plan in plans]
    assert steps == sorted(steps, reverse=True) and steps[-1] < steps[0]
    assert plans[1] == plans[2]


def test_refusals_say_what_would_fit():
    with pytest.raises(ConfigError, match="on each of 8 devices"):
        plan_places([8192 * K], GPT, pool_size=8)
    with pytest.raises(DataError, match="at least one sequence"):
        plan_places([], GPT, pool_size=8)
    assert lower_bound_s([8192 * K], GPT, pool_size=8) == float("inf")
