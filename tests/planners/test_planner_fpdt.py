"""FPDT's plans and the dial between it and SeCO: order, lives of K,V, memory, chunk sizes."""

from itertools import pairwise

import pytest
from helpers.toy_model import gradient, obey
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.fpdt_plan import plan_fpdt
from papers.seco import plan_seco

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.plan.check import check
from furlong.plan.liveness import kv_frees
from furlong.plan.plan import Backward, Forward, Place, RebuildKV, Reduce, Tiers
from furlong.plan.text import format_action
from furlong.planners.orders import stage_heights
from furlong.simulate.clock import UnitCosts, simulate, time_actions


def texts(plan):
    return [format_action(action) for action in plan.actions[0]]


def test_layer_by_layer_and_back():
    plan = plan_fpdt([5], num_layers=2, chunk_size=2)
    assert plan.stages == (1, 1)
    assert texts(plan) == [
        *("F0.0 input", "F1.0 input", "F2.0 input"),
        *("F0.1 kv", "F1.1 kv", "F2.1 kv"),
        # the last stage turns around on the spot
        *("R2.1", "B2.1", "R1.1", "B1.1", "R0.1", "B0.1", "reduce 1"),
        *("K0.0", "K1.0", "R2.0", "B2.0", "R1.0", "B1.0", "R0.0", "B0.0", "reduce 0"),
    ]


def test_attention_is_kept_without_kv():
    plan = plan_fpdt([4], num_layers=2, chunk_size=2, keep="attention")
    assert texts(plan)[:2] == ["F0.0 attention", "F1.0 attention"]
    assert [type(a) for a in plan.actions[0]].count(RebuildKV) == 1
    frees = kv_frees(plan, 0)
    assert (0, 0) in frees[1]  # the K,V of stage 0 die with its last forward


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_stage_of_all_layers_is_seco(seq_lens, chunk_size, num_layers):
    plan = plan_fpdt(
        seq_lens, num_layers=num_layers, stage_layers=num_layers, chunk_size=chunk_size
    )
    assert plan == plan_seco(seq_lens, num_layers=num_layers, chunk_size=chunk_size)


def test_stages_of_even_height():
    assert stage_heights(32, 1) == (1,) * 32
    assert stage_heights(32, 32) == stage_heights(32, 99) == (32,)
    assert stage_heights(32, 5) == (5, 5, 5, 5, 4, 4, 4)
    with pytest.raises(ValueError, match="no stages"):
        stage_heights(4, 0)


def stages_with_kv(plan):
    """For each action, the (sequence, stage) pairs whose K,V are alive while it runs."""
    alive, found = set(), []
    for action, frees in zip(plan.actions[0], kv_frees(plan, 0), strict=True):
        writes = isinstance(action, RebuildKV) or (
            isinstance(action, Forward) and plan.continues[action.chunk]
        )
        if writes:
            alive.add((action.chunk, action.stage))
        found.append({(plan.links[chunk][0][0], stage) for chunk, stage in alive})
        alive -= set(frees)
    assert not alive
    return found


@pytest.mark.parametrize("keep", ["input", "attention", "kv"])
def test_kv_live_for_one_stage_of_one_sequence_at_a_time(keep):
    plan = plan_fpdt([23, 9, 4], num_layers=6, stage_layers=2, chunk_size=3, keep=keep)
    most = max(map(len, stages_with_kv(plan)))
    assert most == (3 if keep == "kv" else 1)


def test_a_group_ends_before_the_next_begins():
    plan = plan_fpdt([9, 7, 2, 2], num_layers=3, chunk_size=4)
    chunks = [a.chunk for a in plan.actions[0] if isinstance(a, (Forward, Backward))]
    groups = [0, 0, 0, 1, 1, 2]
    assert all(groups[a] <= groups[b] for a, b in pairwise(chunks))
    assert [a for a in plan.actions[0] if isinstance(a, Reduce)] == [Reduce(s) for s in (2, 1, 0)]


@pytest.mark.parametrize("keep", ["input", "kv", "attention", "all"])
@pytest.mark.parametrize("stage_layers", [1, 2, 3, 6])
def test_the_gradient_is_that_of_any_other_plan(keep, stage_layers):
    plan = plan_fpdt(
        [23, 9, 2, 2], num_layers=6, stage_layers=stage_layers, chunk_size=3, keep=keep
    )
    assert obey(plan) == pytest.approx(gradient(plan), rel=1e-12)
    time_actions(plan, UnitCosts(plan))


def test_evaluation():
    plan = plan_fpdt([9], num_layers=2, chunk_size=4, backward=False)
    assert {type(a) for a in plan.actions[0]} == {Forward}
    assert max(map(len, stages_with_kv(plan))) == 1


def test_an_sp_group_shards_every_slice():
    plan = plan_fpdt([9, 2], num_layers=2, chunk_size=4, sp_size=4, tiers=Tiers(kv="host"))
    assert {piece.place for chunk in plan.chunks for piece in chunk.slices} == {
        Place(0, plan.sp_size)
    }
    assert (plan.sp_size, plan.tiers) == (4, Tiers(kv="host"))


def model_of(name, device="H100"):
    return CostModel(model_shape(name), hardware(device))


def peak_bytes(model, seq_len, stage_layers, *, chunk_size=4096, **fields):
    """Most bytes beside weights, gradients and optimizer, which no plan changes."""
    num_layers = model.shape.num_layers
    plan = plan_fpdt(
        [seq_len], num_layers=num_layers, stage_layers=stage_layers, chunk_size=chunk_size, **fields
    )
    device = model.memory().curve(plan, 0).device_bytes
    fixed = sum(
        model.memory().curve(plan, 0).peak[p] for p in ("weights", "gradients", "optimizer")
    )
    return max(device) - fixed


@pytest.mark.parametrize("seq_len", [4096, 65_536, 262_144])
def test_one_layer_per_stage_needs_less_than_all_where_kv_are_wide(seq_len):
    # 8B: K,V and float32 dK,dV of a layer take 12,288 bytes per token, its input 8,192
    model = model_of("Llama-3-8B")
    assert peak_bytes(model, seq_len, 1) < peak_bytes(model, seq_len, 32)


def test_the_dial_is_best_between_its_ends():
    # L/h inputs and h layers of K,V: lowest near h = sqrt(32 * 8192 / 12288) = 4.6
    model = model_of("Llama-3-8B")
    peaks = {h: peak_bytes(model, 262_144, h) for h in (1, 2, 4, 8, 16, 32)}
    assert min(peaks, key=peaks.get) == 4
    assert peaks[4] < 0.5 * peaks[1] and peaks[4] < 0.4 * peaks[32]


def test_where_kv_are_narrow_the_ends_cross():
    # 0.5B: input 1,792 bytes per token and layer, K,V with dK,dV 1,536: for long sequences the
    # hidden states of all layers outweigh their K,V, for short ones the graph of all layers does
    model = model_of("Qwen2.5-0.5B")
    num_layers = model.shape.num_layers
    below = {
        seq_len: peak_bytes(model, seq_len, 1, chunk_size=1024)
        < peak_bytes(model, seq_len, num_layers, chunk_size=1024)
        for seq_len in (2**15, 2**18)
    }
    assert below == {2**15: True, 2**18: False}


def test_hidden_states_of_every_chunk_are_counted():
    model = model_of("Llama-3-8B")
    plan = plan_fpdt([65_536], num_layers=32, chunk_size=4096)
    peak = model.memory().curve(plan, 0)
    hidden = 31 * 65_536 * 4096 * 2
    assert peak.peak["activations"] >= hidden
    assert peak.peak["kv"] == pytest.approx(61_440 * 2 * 1024 * 2)  # of one layer, all but the tail
    final = peak.device[-1]
    state = {"weights", "gradients", "optimizer"}
    assert sum(final) == pytest.approx(sum(peak.peak[part] for part in state))


def test_kv_go_to_the_host_and_hidden_states_stay():
    model = model_of("Llama-3-8B")
    here = peak_bytes(model, 131_072, 1)
    there = peak_bytes(model, 131_072, 1, tiers=Tiers(kv="host"))
    assert there < here
    plan = plan_fpdt([131_072], num_layers=32, chunk_size=4096, tiers=Tiers(kv="host"))
    curve = model.memory().curve(plan, 0)
    # one layer's K,V and their gradients, but for those of the newest two segments: one of 8,192
    # tokens, and half of one, since the last chunk stores nothing
    newest = (8192 + 4096) * 2 * 1024 * 4
    assert curve.host.max() == pytest.approx((131_072 - 4096) * 2 * 1024 * (2 + 4) - newest)


def test_layer_first_costs_the_rebuilds():
    model = model_of("Llama-3-8B")
    plan = plan_fpdt([65_536], num_layers=32, chunk_size=4096, stage_layers=4)
    seconds = simulate(plan, model.costs(plan)).seconds_by_kind()
    assert 0 < seconds["K"] < seconds["F"]
    seco = plan_seco([65_536], num_layers=32, chunk_size=4096)
    ratio = time_actions(plan, model.costs(plan)).duration_s
    ratio /= time_actions(seco, model.costs(seco)).duration_s
    assert 1 < ratio < 1.35


def test_the_plans_pass_with_memory():
    model = model_of("Llama-3-8B", "H200")
    plan = plan_fpdt(
        [65_536], num_layers=32, chunk_size=8192, stage_layers=4, tiers=Tiers(kv="host")
    )
    check(plan, model.memory(10**12))
