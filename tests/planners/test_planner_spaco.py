"""SeCO's and SpaCO's plans: their order, their costs in units, and sampling inside other plans."""

import statistics
from itertools import pairwise

import pytest
from helpers.toy_model import gradient, obey
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt
from papers.seco import plan_seco, plan_spaco

from furlong.plan.check import check
from furlong.plan.liveness import kv_frees
from furlong.plan.passes import passes
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Recompute, Slice
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import EXACT, Factors, Sampling, draw_chunks, sample_backwards, sampled
from furlong.simulate.clock import UnitCosts, time_actions


def step(plan):
    return time_actions(plan, UnitCosts(plan)).duration_s


def texts(plan, rank=0):
    return [format_action(action) for action in plan.actions[rank]]


def test_seco_forwards_all_then_recomputes_and_goes_back_from_the_last():
    plan = plan_seco([9], num_layers=2, chunk_size=4)
    assert texts(plan) == [
        *("F0.0 kv", "F1.0 kv", "F2.0 kv"),
        *("R2.0", "B2.0", "R1.0", "B1.0", "R0.0", "B0.0", "reduce 0"),
    ]
    assert [plan.kind(c) for c in range(3)] == ["split"] * 3


def test_seco_costs_a_third_more_than_a_plain_step():
    for seq_len in (16_384, 16_000, 100):
        plain = plan_chunkflow([seq_len], ChunkOptions(size=seq_len), stages=(2,))
        seco = plan_seco([seq_len], num_layers=2, chunk_size=128)
        assert step(seco) / step(plain) == pytest.approx(4 / 3)


def inference(seq_len, chunk_size=128):
    options = ChunkOptions(size=chunk_size)
    return step(plan_chunkflow([seq_len], options, stages=(2,), backward=False))


@pytest.mark.parametrize(("t", "of_seco"), [(8, 0.297), (16, 0.344), (32, 0.4375)])
def test_spaco_costs_one_plus_three_t_over_k_forwards(t, of_seco):
    plan = plan_spaco(
        [16_384], Sampling(chunks=t, rule="fixed", report_loss=True), num_layers=2, chunk_size=128
    )
    assert step(plan) / inference(16_384) == pytest.approx(1 + 3 * t / 128)
    seco = plan_seco([16_384], num_layers=2, chunk_size=128)
    assert step(plan) / step(seco) == pytest.approx((128 + 3 * t) / (4 * 128))
    assert step(plan) / step(seco) == pytest.approx(of_seco, abs=1e-3)


def test_spaco_costs_that_on_average_where_the_number_is_random():
    ratios = [
        step(
            plan_spaco(
                [4096], Sampling(chunks=8, seed=s, report_loss=True), num_layers=2, chunk_size=128
            )
        )
        / inference(4096)
        for s in range(200)
    ]
    assert statistics.fmean(ratios) == pytest.approx(1 + 3 * 8 / 32, abs=0.05)


def test_draws_follow_the_seed_and_the_sequence_alone():
    def plan(seed, seq_lens=(900, 640)):
        sampling = Sampling(chunks=3, seed=seed)
        return plan_spaco(seq_lens, sampling, num_layers=2, chunk_size=16)

    assert plan(1) == plan(1)
    assert plan(1).actions != plan(2).actions
    alone = draw_chunks(plan_seco([900], num_layers=2, chunk_size=16), Sampling(chunks=3))
    both = draw_chunks(plan_seco([900, 640], num_layers=2, chunk_size=16), Sampling(chunks=3))
    assert {c: f for c, f in both.items() if c < 57} == alone  # 57 chunks of sequence 0 come first


def trained(plan):
    return [a for actions in plan.actions for a in actions if isinstance(a, Backward)]


def test_packed_chunks_are_always_trained():
    seq_lens = [40, *[8] * 40]
    plan = plan_spaco(seq_lens, Sampling(rate=0.25), num_layers=1, chunk_size=8)
    packed = {c for c in range(len(plan.chunks)) if plan.kind(c) == "packed"}
    assert {a.chunk for a in trained(plan)} >= packed and len(packed) == 40
    assert {(a.loss_factor, a.relay_factor) for a in trained(plan) if a.chunk in packed} == {(1, 1)}


def test_chunks_with_labels_are_drawn_by_the_rule_for_them():
    plan = plan_seco([64], num_layers=1, chunk_size=8)
    found = sampled(plan, Sampling(rate=0.01, seed=3), labelled={2, 5})
    assert [(a.chunk, a.loss_factor) for a in trained(found)] == [(5, 1), (2, 1)]


def test_kv_that_no_drawn_chunk_reads_die_with_the_forwards():
    plan = plan_seco([5], num_layers=1, chunk_size=1)
    found = sample_backwards(plan, {2: Factors(2, 2)}, report_loss=True)
    assert texts(found) == [
        *("F0.0 kv", "F1.0 kv", "F2.0 kv", "F3.0 kv", "F4.0 kv", "R2.0", "B2.0 a2 c2", "reduce 0")
    ]
    assert freed_at(found) == {3: 4, 0: 6, 1: 6, 2: 6}


def freed_at(plan):
    return {cell[0]: at for at, cells in enumerate(kv_frees(plan, 0)) for cell in cells}


def test_what_no_drawn_chunk_reads_is_not_computed_unless_its_loss_is_reported():
    plan = plan_seco([6], num_layers=1, chunk_size=1)
    found = sample_backwards(plan, {1: EXACT, 3: Factors(2, 2)})
    assert texts(found) == [
        *("F0.0 kv", "F1.0 kv", "F2.0 kv", "F3.0 kv", "R3.0", "B3.0 a2 c2", "R1.0", "B1.0"),
        "reduce 0",
    ]
    # chunk 2 is read by chunk 3 alone, chunk 3 by nobody
    assert freed_at(found) == {2: 5, 0: 7, 1: 7}
    assert [what.computes for what in passes(found, 0)[:4]] == [
        "to last kv", "to last kv", "to last kv", "nothing",
    ]  # fmt: skip
    whole = passes(sample_backwards(plan, {3: Factors(2, 2)}, report_loss=True), 0)
    assert [what.computes for what in whole[:6]] == [
        "values", "values", "values", "to last kv", "values", "values",
    ]  # fmt: skip


def test_graphs_of_the_last_drawn_chunks_are_retained():
    for order in ("chunk-first", "layer-first"):
        options = ChunkOptions(size=2, num_retained=2, keep="attention", order=order)
        whole = plan_on_device([16], options, num_layers=2)
        found = sample_backwards(whole, dict.fromkeys((0, 2, 5), Factors(2, 2)))
        last = len(whole.stages) - 1
        kept = {
            a.chunk: a.keep for a in found.actions[0] if isinstance(a, Forward) and a.stage == last
        }
        assert [c for c, keep in kept.items() if keep == "all"] == [2, 5], order
        again = {a.chunk for a in found.actions[0] if isinstance(a, Recompute) and a.stage == last}
        assert again == {0} and kept.keys() == set(range(6))
        assert obey(found) == pytest.approx(gradient(found), rel=1e-12)


def test_where_nothing_is_drawn_the_smallest_chunk_carries_a_gradient_of_zeros():
    plan = sample_backwards(plan_seco([9, 2], num_layers=1, chunk_size=4), {})
    assert [format_action(a) for a in trained(plan)] == ["B2.0 a0 c0"]
    assert plan.sampled and obey(plan) == gradient(plan) == [0]
    assert load_plan(save_plan(plan)) == plan


def test_every_data_parallel_rank_and_every_stage_has_something_to_reduce():
    chunks = [Chunk((Slice(i, 0, 4),)) for i in range(4)]
    actions = tuple(
        tuple(a for c in own for a in (Forward(c, 0, "all"), Backward(c, 0)))
        for own in ((0, 1), (2, 3))
    )
    plan = ChunkPlan((4,) * 4, tuple(chunks), (1,), actions)
    check(plan)
    sampled = sample_backwards(plan, {1: Factors(4, 1)})
    assert [(a.chunk, a.loss_factor) for a in trained(sampled)] == [(1, 4), (2, 0)]
    pipeline = plan_chunkflow([9, 3], ChunkOptions(size=2), stages=(1, 1, 1))
    assert [len(trained(sample_backwards(pipeline, {}))), len(pipeline.stages)] == [3, 3]


WHOLE = {
    "chunkflow": plan_chunkflow([23, 9, 2, 2], ChunkOptions(size=3), stages=(2,)),
    "keeps inputs": plan_chunkflow(
        [23, 9, 2, 2], ChunkOptions(size=3, keep="input", num_retained=2), stages=(2,)
    ),
    "pipeline": plan_chunkflow([23, 9, 2], ChunkOptions(size=3), stages=(1, 1, 1)),
    "pipeline of inputs": plan_chunkflow(
        [23, 9, 2], ChunkOptions(size=3, keep="input"), stages=(2, 1), recompute="lazy"
    ),
    "layer-first": plan_fpdt([23, 9, 2], num_layers=4, stage_layers=2, chunk_size=3),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("rule", ["unbiased", "fixed", "paper"])
@pytest.mark.parametrize("report_loss", [False, True], ids=["estimated", "reported"])
def test_sampling_inside_any_plan(name, rule, report_loss):
    whole = WHOLE[name]
    for seed in range(20):
        drawn = draw_chunks(whole, Sampling(rate=0.3, rule=rule, seed=seed))
        plan = sample_backwards(whole, drawn, report_loss=report_loss)
        assert obey(plan) == pytest.approx(gradient(plan), rel=1e-12)
        assert step(plan) <= step(whole)
        computed = [a.chunk for a in plan.actions[0] if isinstance(a, (Recompute, Backward))]
        assert set(computed) <= set(drawn) | {a.chunk for a in trained(plan) if not a.loss_factor}


@pytest.mark.parametrize("name", WHOLE)
def test_a_draw_of_everything_gives_the_whole_gradient(name):
    whole = WHOLE[name]
    plan = sample_backwards(whole, {chunk: Factors() for chunk in range(len(whole.chunks))})
    assert plan.actions == whole.actions
    assert not plan.report_loss  # nobody's loss is missing
    assert obey(plan) == pytest.approx(gradient(whole), rel=1e-12)


def test_unbiased_draws_are_exact_on_average_through_the_whole_plan():
    # every draw of one sequence of five chunks, its gradient weighted by its probability
    whole, q = plan_fpdt([10], num_layers=3, chunk_size=2), 0.4
    mean = [0.0, 0.0, 0.0]
    for bits in range(2**5):
        drawn = [c for c in range(5) if bits >> c & 1]
        plan = sample_backwards(whole, dict.fromkeys(drawn, Factors(1 / q, 1 / q)))
        probability = q ** len(drawn) * (1 - q) ** (5 - len(drawn))
        mean = [m + probability * g for m, g in zip(mean, obey(plan), strict=True)]
    assert mean == pytest.approx(gradient(whole), rel=1e-12)


def test_backwards_of_a_spaco_plan_descend():
    plan = plan_spaco([400], Sampling(chunks=12), num_layers=1, chunk_size=8)
    chunks = [a.chunk for a in trained(plan)]
    assert all(a > b for a, b in pairwise(chunks)) and plan.sampled
