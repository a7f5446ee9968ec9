"""The search: nothing it leaves out is better than what it finds."""

import random
from dataclasses import replace
from itertools import product

import pytest
from helpers.nightly import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.published.build import build, replica_model
from papers.published.catalogue import (
    PUBLISHED,
    SEARCHED,
    chunkflow,
    combined,
)
from papers.published.chunks import deal_sequences
from papers.published.dials import Dials
from papers.published.problem import Problem
from papers.published.replicas import ReplicaPlans
from papers.published.room import Room, chunk_sizes, retained_numbers, stage_heights
from papers.published.search import search

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Layout
from furlong.plan.text import load_plan, save_plan
from furlong.planners.layouts import cut_layers, layouts, mean_attended_keys
from furlong.planners.orders import join_replicas
from furlong.planners.question import DoesNotFitError, advice, fit
from furlong.simulate.clock import time_actions

GIB = 2**30
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"), Training(zero_stage=1))
LENS = (40_000, 9_000, 3_000, 3_000, 1_000, 700, 500, 300)

pytestmark = pytest.mark.slow


def problem(**changes):
    return Problem(**({"seq_lens": LENS, "model": MODEL, "num_devices": 4} | changes))


def test_the_plan_is_valid_and_its_figures_are_its_own():
    found = search(problem(), {"furlong": combined})
    best = found.best
    check(best.plan, MODEL.memory())
    assert best.plan.seq_lens == LENS
    # no rank can do its work in less, and all ranks one after the other need no more
    costs = MODEL.costs(best.plan)
    works = [
        sum(costs.compute_s(a, rank) for a in own) for rank, own in enumerate(best.plan.actions)
    ]
    assert max(works) <= best.step_s <= sum(works)
    ranks = range(len(best.plan.actions))
    assert best.peak_bytes == max(
        max(MODEL.memory().peak_bytes_of_actions(best.plan, r)) for r in ranks
    )
    assert all(other.step_s >= best.step_s for other in found.others)


@pytest.mark.parametrize("sizes", [{"dp": 1, "sp": 4}, {"dp": 2, "sp": 2}])
def test_a_plan_says_itself_that_its_weights_come_with_every_pass(sizes):
    ours = replace(MODEL, training=Training(zero_stage=1, gathers=True))
    best = search(problem(model=ours, zeros=(3,), **sizes), {"furlong": combined}).best
    saved = load_plan(save_plan(best.plan))
    assert saved.regathers
    # the training of a run, which plans do not choose
    memory = ours.memory()
    assert best.peak_bytes == max(
        max(memory.peak_bytes_of_actions(saved, rank)) for rank in range(len(saved.actions))
    )
    kept = replace(saved, regathers=False)
    assert max(memory.peak_bytes_of_actions(kept, 0)) > best.peak_bytes


def test_no_pipeline_of_ours_gathers_with_every_pass():
    ours = replace(MODEL, training=Training(zero_stage=1, gathers=True))
    asked = problem(model=ours, zeros=(1, 3))
    assert [asked.zeros_of(Layout(1, 2, pp)) for pp in (1, 2)] == [(1, 3), (1,)]
    assert problem(zeros=(1, 3)).zeros_of(Layout(1, 2, 2)) == (1, 3)


def test_on_one_device_a_step_is_the_sum_of_its_actions():
    best = search(problem(num_devices=1), {"furlong": combined}).best
    costs = MODEL.costs(best.plan)
    assert best.step_s == pytest.approx(sum(costs.compute_s(a, 0) for a in best.plan.actions[0]))


@pytest.mark.parametrize("method", [chunkflow, pytest.param(combined, marks=pytest.mark.slow)])
@settings(max_examples=4, deadline=None)
@given(lens=st.lists(st.integers(100, 6_000), min_size=2, max_size=6))
def test_pruning_loses_nothing(method, lens):
    """A plain loop over every rung that the search may take finds no faster one."""
    batch = problem(seq_lens=tuple(lens), num_devices=2)
    best_s = float("inf")
    for room in rooms(batch):
        for ladder in method(room):
            for dials in ladder:
                if dials.size is None:  # micro-batches, whose size the search sets
                    continue
                plan = whole_plan(batch, dials)
                try:
                    fit(plan, MODEL, batch.limit_bytes)
                except DoesNotFitError:
                    continue
                best_s = min(best_s, time_actions(plan, MODEL.costs(plan)).duration_s)
                break
    found = search(batch, {"one": method})
    assert found.best.step_s <= best_s * (1 + 1e-9)


def rooms(batch):
    lens = batch.seq_lens
    keys, longest = mean_attended_keys(lens), max(lens)
    for layout, balance in product(layouts(2, MODEL.shape), ("none", "tokens", "time")):
        if layout.dp <= len(lens):
            yield Room(
                layout=layout, stages=cut_layers(MODEL.shape, layout.pp, keys), zero=1,
                balance=balance, longest_tokens=longest, heights=stage_heights(24),
                sizes=chunk_sizes(layout, longest, least=1024),
            )  # fmt: skip


def whole_plan(batch, dials):
    dp, lens = dials.layout.dp, batch.seq_lens
    dealt = deal_sequences(lens, MODEL.shape, dp, dials.balance) if dp > 1 else [range(len(lens))]
    model = replica_model(dials, MODEL)
    plans = [build(dials, [lens[i] for i in ids], model) for ids in dealt]
    return plans[0] if dp == 1 else join_replicas(plans, dealt, lens)


def random_problem(seed):
    draw = random.Random(seed)
    num_devices = draw.choice([1, 2, 2, 4, 4, 8])
    count, longest = draw.randint(1, 16), draw.choice([2_000, 20_000, 100_000])
    lens = tuple(draw.randint(50, max(51, int(longest * draw.random() ** 3))) for _ in range(count))
    name = draw.choice(["A100-80", "H100", "RTX4090"])
    training = Training(zero_stage=draw.choice([1, 3]))
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware(name), training)
    return problem(seq_lens=lens, model=model, num_devices=num_devices, tiers=("device", "host"))


@pytest.mark.parametrize("seed", seeds(20, 180))
def test_no_published_method_beats_the_search(seed):
    batch = random_problem(seed)
    ours_s = search(batch, SEARCHED).best.step_s
    for name, method in PUBLISHED.items():
        try:
            own_s = search(batch, {name: method}).best.step_s
        except ConfigError:
            continue
        assert ours_s <= own_s * (1 + 1e-9), name


def test_more_devices_are_never_slower():
    """Four sequences leave four of eight devices idle where sharding them takes longer."""
    model = replace(MODEL, training=replace(MODEL.training, zero_stage=3))
    lens = (900, 800, 700, 600)
    few = {name: PUBLISHED[name] for name in ("Ulysses", "Data parallel")}
    times = [
        search(problem(seq_lens=lens, model=model, num_devices=n), few).best.step_s
        for n in (4, 8, 12)
    ]
    assert times[0] >= times[1] >= times[2]


def test_zero_is_a_dial():
    tight = problem(budget_bytes=12 * GIB, zeros=(1, 3))
    found = search(tight, {"ChunkFlow": chunkflow})
    times = [
        search(replace(tight, zeros=(zero,)), {"ChunkFlow": chunkflow}).best.step_s
        for zero in (1, 3)
    ]
    assert found.best.step_s == min(times)
    assert found.best.model.training.zero_stage == found.best.dials.zero
    assert f"zero {found.best.dials.zero}" in str(found.best.dials)


def test_a_margin_is_left_free():
    whole = search(problem(margin=0.0), {"ChunkFlow": chunkflow}).best
    budget = int(whole.peak_bytes * 1.02)
    for margin in (0.0, 0.1):
        best = search(problem(budget_bytes=budget, margin=margin), {"ChunkFlow": chunkflow}).best
        assert best.peak_bytes <= budget * (1 - margin)


def test_chunks_shrink_where_larger_ones_do_not_fit():
    """SeCO's own case: 16K tokens of an 8B model with LoRA on a card of 24 GB."""
    training = Training(zero_stage=0, lora=Lora(8))
    model = CostModel(model_shape("Llama-3-8B"), hardware("RTX3090"), training)
    seco = {"SeCO": PUBLISHED["SeCO"]}
    best = search(Problem(seq_lens=(16_384,), model=model, margin=0.0), seco).best
    assert best.dials.size < 1024
    fit(best.plan, model)


def test_numbers_of_retained_chunks():
    assert retained_numbers(3) == [0, 1, 2, 3]
    assert {6, 8} < set(retained_numbers(17))  # of the paper
    many = retained_numbers(512)
    assert many[-1] == 512 and len(many) < 50


def test_equal_dials_have_equal_chunks():
    dials = Dials(method="ChunkFlow", stages=(24,), size=2048, num_retained=1, keep="kv")
    other = replace(dials, method="SeCO", num_retained=0)
    assert dials != other and dials.chunks_only() == other.chunks_only()
    assert dials.chunks_only() != replace(dials, size=4096).chunks_only()
    assert dials.agree({"size": 2048, "keep": "kv", "order": "chunk-first"}, strict=True)
    assert not dials.agree({"keep": "attention"}, strict=False)
    assert dials.agree({"stage_layers": 2}, strict=False)
    assert not dials.agree({"stage_layers": 2}, strict=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_method_plans_the_batch_or_says_why_not(name):
    try:
        found = search(problem(tiers=("device", "host")), {name: PUBLISHED[name]})
    except ConfigError as error:
        assert error.given and error.change
        return
    assert sorted(found.best.plan.seq_lens) == sorted(LENS) or "padded" in name
    check(found.best.plan, MODEL.memory())


def test_a_search_over_all_is_no_slower_than_one_over_some():
    some = {"ChunkFlow": chunkflow, "furlong": combined}
    alone = [search(problem(), {name: method}).best.step_s for name, method in some.items()]
    assert search(problem(), some).best.step_s == min(alone)


def test_given_sizes_are_obeyed():
    found = search(problem(dp=2, sp=1, pp=2), {"furlong": combined})
    assert str(found.best.dials.layout) == "dp 2 x sp 1 x pp 2"


def test_a_budget_below_the_weights_names_rank_lack_and_cure():
    with pytest.raises(ConfigError) as error:
        search(problem(budget_bytes=1 * GIB, dp=4), {"furlong": combined})
    text = str(error.value)
    assert "rank 0 needs" in text
    assert "lacks" in text
    assert "shard all of the state (ZeRO-3)" in text


def test_layouts_whose_state_does_not_fit_are_left_out_before_chunks_are_cut(monkeypatch):
    """A model of 671 billion parameters has thousands of ways that cannot fit."""

    def cut(self, dials):
        raise AssertionError(f"chunks are cut of {dials}")

    monkeypatch.setattr(ReplicaPlans, "busiest_chunks", cut)
    with pytest.raises(ConfigError, match=r"needs .* with one token: .*weights"):
        search(problem(budget_bytes=1 * GIB), {"furlong": combined})


def test_advice_names_no_way_that_was_tried_or_is_not_there():
    sharded = Training(zero_stage=3, lora=Lora(8))
    assert advice("buffers", sharded, num_devices=64) == "use smaller chunks (chunks.size)"
    tried = advice("buffers", sharded, num_devices=64, all_sizes=True)
    assert tried == "use more devices, or use a smaller model"
    assert "larger sp or pp" in advice("kv", sharded, num_devices=2, all_sizes=True)
    alone = advice("kv_gradients", sharded, all_sizes=True)
    assert "sp or pp" not in alone and "several devices" in alone and "data.max_seq_len" in alone


def test_fewer_sequences_than_replicas():
    with pytest.raises(ConfigError, match="every replica has a sequence"):
        search(problem(seq_lens=(100,), dp=4), {"furlong": combined})


@pytest.mark.parametrize(
    "name", ["furlong", "Skrull", "Ulysses", "1F1B packed", "FlexSP", "Hybrid CP"]
)
def test_sp_groups_may_be_larger_than_the_heads_allow(name):
    """14 heads on four devices: two inner groups of two, though a group of two would divide them.
    InfiniPipe runs Ulysses so, and Megatron-LM's context parallelism has no such limit."""
    batch = problem(seq_lens=(200_000, 3_000))
    found = search(batch, {name: SEARCHED[name]})
    assert found.best.dials.layout.sp == 4
    if name == "furlong":  # where sizes are given, chunks have larger groups, too
        tried = search(replace(batch, sp=4, dp=1, pp=1), {name: SEARCHED[name]}).trials
        assert any(trial.dials.cut in ("tokens", "time") for trial in tried)
    fit(found.best.plan, found.best.model, batch.limit_bytes)


def test_every_method_deals_by_the_time_of_its_plans():
    """Launches take time, too, and attention is slower in short calls."""
    training = Training(zero_stage=3, lora=Lora(16))
    model = CostModel(model_shape("Qwen2.5-0.5B"), hardware("H100"), training)
    lens = sample_lengths("lmsys-skrull", 128, 1)
    batch = problem(seq_lens=lens, model=model, num_devices=8)
    for name in ("Data parallel", "ChunkFlow"):
        best = search(batch, {name: PUBLISHED[name]}).best
        flops = ReplicaPlans(batch.seq_lens, model, batch.limit_bytes).plan_whole(best.dials)
        assert best.dials.balance == "time" and best.step_s < flops.step_s
