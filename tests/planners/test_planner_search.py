"""The search: nothing it leaves out is better than what it finds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.cost.devices.hardware import hardware
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.planners.budget import DoesNotFitError, fit
from furlong.planners.chunks.balance import deal_sequences
from furlong.planners.layout import cut_layers, layouts, mean_attended_keys
from furlong.planners.orders.replicas import join_replicas
from furlong.planners.search.candidates import Room
from furlong.planners.search.catalogue import PUBLISHED, chunkflow, combined
from furlong.planners.search.search import Problem, search
from furlong.simulate.clock import simulate, time_actions

GIB = 2**30
MODEL = CostModel(model_shape("Qwen2.5-0.5B"), hardware("A100-80"), Training(zero_stage=1))
LENS = (40_000, 9_000, 3_000, 3_000, 1_000, 700, 500, 300)


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
    timeline = simulate(best.plan, costs, memory=MODEL.memory())
    assert best.peak_bytes == max(record.device_bytes for record in timeline.records)
    assert all(other.step_s >= best.step_s for other in found.others)


def test_on_one_device_a_step_is_the_sum_of_its_actions():
    best = search(problem(num_devices=1), {"furlong": combined}).best
    costs = MODEL.costs(best.plan)
    assert best.step_s == pytest.approx(sum(costs.compute_s(a, 0) for a in best.plan.actions[0]))


@pytest.mark.parametrize("method", [chunkflow, combined])
@settings(max_examples=8, deadline=None)
@given(lens=st.lists(st.integers(100, 12_000), min_size=2, max_size=6))
def test_pruning_loses_nothing(method, lens):
    """A plain loop over every rung that the search may take finds no faster one."""
    batch = problem(seq_lens=tuple(lens), num_devices=2)
    best_s = float("inf")
    for room in rooms(batch):
        for ladder in method(room):
            for rung in ladder.rungs:
                plan = whole_plan(batch, rung)
                model = replace(MODEL, training=replace(MODEL.training, replicas=1))
                try:
                    fit(plan, model)
                except DoesNotFitError:
                    continue
                best_s = min(best_s, time_actions(plan, model.costs(plan)).duration_s)
                break
    found = search(batch, {"one": method})
    assert found.best.step_s == pytest.approx(best_s)


def rooms(batch):
    keys = mean_attended_keys(batch.seq_lens)
    return [
        Room(layout, cut_layers(MODEL.shape, layout.pp, keys), max(batch.seq_lens))
        for layout in layouts(batch.num_devices, MODEL.shape)
        if layout.dp <= len(batch.seq_lens)
    ]


def whole_plan(batch, candidate):
    dp, lens = candidate.layout.dp, batch.seq_lens
    dealt = (
        deal_sequences(lens, MODEL.shape, dp, candidate.balance) if dp > 1 else [range(len(lens))]
    )
    model = replace(MODEL, training=replace(MODEL.training, replicas=dp))
    if candidate.deals_itself:
        return candidate.build(lens, MODEL)
    plans = [candidate.build([lens[i] for i in ids], model) for ids in dealt]
    return plans[0] if dp == 1 else join_replicas(plans, dealt, lens)


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
    assert str(found.best.candidate.layout) == "dp 2 x sp 1 x pp 2"


def test_a_budget_below_the_weights_names_rank_lack_and_cure():
    with pytest.raises(ConfigError) as error:
        search(problem(budget_bytes=1 * GIB, dp=4), {"furlong": combined})
    text = str(error.value)
    assert "rank 0 needs" in text
    assert "lacks" in text
    assert "shard the state" in text


def test_fewer_sequences_than_replicas():
    with pytest.raises(ConfigError, match="every replica has a sequence"):
        search(problem(seq_lens=(100,), dp=4), {"furlong": combined})
