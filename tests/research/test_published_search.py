"""The search over published methods: nothing it leaves out is better than what it finds."""

import random
from dataclasses import replace
from itertools import permutations, product
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.fits import fit
from papers.published.build import build, replica_model
from papers.published.catalogue import PUBLISHED, chunkflow
from papers.published.chunks import deal_sequences
from papers.published.group_order import improve_order
from papers.published.problem import Problem
from papers.published.replicas import ReplicaPlans
from papers.published.room import Room, chunk_sizes
from papers.published.search import search
from papers.seq1f1b_plan import plan_seq1f1b
from papers.unit_costs import UnitCosts

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import COMPUTING
from furlong.planners.chunks import group_chunks
from furlong.planners.layouts import cut_layers, layouts, mean_attended_keys
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b
from furlong.planners.question import DoesNotFitError
from furlong.simulate.clock import time_actions

MODEL = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"), Training(zero_stage=1))
LENS = (40_000, 9_000, 3_000, 3_000, 1_000, 700, 500, 300)


def problem(**changes):
    return Problem(**({"seq_lens": LENS, "model": MODEL, "num_devices": 4} | changes))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.few(6)
def test_every_method_has_a_valid_plan_with_its_own_figures_or_says_why_not(name):
    try:
        found = search(problem(offload=("none", "cpu")), {name: PUBLISHED[name]})
    except ConfigError as error:
        assert error.given and error.change
        return
    best = found.best
    assert sorted(best.plan.seq_lens) == sorted(LENS) or "padded" in name
    check(best.plan)
    # no rank can do its work in less
    costs = best.model.costs(best.plan)
    works = [
        sum(costs.compute_s(a, rank) for a in own if isinstance(a, COMPUTING))
        for rank, own in enumerate(best.plan.actions)
    ]
    assert max(works) <= best.step_s * (1 + 1e-9)
    assert best.peak_bytes == fit(best.plan, best.model)
    assert all(other.step_s >= best.step_s for other in found.others)


@pytest.mark.nightly
@settings(max_examples=4)
@given(lens=st.lists(st.integers(100, 6_000), min_size=2, max_size=6))
def test_pruning_loses_nothing(lens):
    """A plain loop over every rung that the search may take finds no faster one."""
    batch = problem(seq_lens=tuple(lens), num_devices=2)
    best_s = float("inf")
    for room in rooms(batch):
        for ladder in chunkflow(room):
            for dials in ladder:
                plan = whole_plan(batch, dials)
                try:
                    fit(plan, MODEL, batch.limit_bytes)
                except DoesNotFitError:
                    continue
                best_s = min(best_s, time_actions(plan, MODEL.costs(plan)).duration_s)
                break
    found = search(batch, {"one": chunkflow})
    assert found.best.step_s <= best_s * (1 + 1e-9)


def rooms(batch):
    lens = batch.seq_lens
    keys, longest = mean_attended_keys(lens), max(lens)
    for layout, balance in product(layouts(2, MODEL.shape), ("none", "tokens", "time")):
        if layout.dp <= len(lens):
            yield Room(
                layout=layout, stages=cut_layers(MODEL, layout.pp, keys),
                balance=balance, longest_tokens=longest,
                sizes=chunk_sizes(layout, longest, least=1024),
            )  # fmt: skip


def whole_plan(batch, dials):
    dp, lens = dials.layout.dp, batch.seq_lens
    dealt = deal_sequences(lens, MODEL.shape, dp, dials.balance) if dp > 1 else [range(len(lens))]
    model = replica_model(dials, MODEL)
    plans = [build(dials, [lens[i] for i in ids], model) for ids in dealt]
    return plans[0] if dp == 1 else join_replicas(plans, dealt, lens)


@pytest.mark.nightly
def test_chunks_shrink_where_larger_ones_do_not_fit():
    """SeCO's own case: 16K tokens of an 8B model with LoRA on a card of 24 GB."""
    training = Training(zero_stage=0, lora=Lora(8))
    model = CostModel(model_shape("Llama-3-8B"), Machine.named("RTX3090"), training)
    seco = {"SeCO": PUBLISHED["SeCO"]}
    best = search(Problem(seq_lens=(16_384,), model=model, margin=0.0), seco).best
    assert best.dials.size < 1024
    fit(best.plan, model)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget_bytes": 2**30}, "needs .* with one token: .*weights"),
        ({"seq_lens": (100,), "dp": 4}, "every replica has a sequence"),
    ],
)
def test_where_nothing_fits_the_nearest_is_told(changes, words):
    with pytest.raises(ConfigError, match=words):
        search(problem(**changes), {"ChunkFlow": chunkflow})


@pytest.mark.nightly
def test_every_method_deals_by_the_time_of_its_plans():
    """Launches take time, too, and attention is slower in short calls."""
    training = Training(zero_stage=3, lora=Lora(16))
    model = CostModel(model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"), training)
    lens = sample_lengths("lmsys-skrull", 128, 1)
    batch = problem(seq_lens=lens, model=model, num_devices=8)
    for name in ("Data parallel", "ChunkFlow"):
        best = search(batch, {name: PUBLISHED[name]}).best
        flops = ReplicaPlans(batch.seq_lens, model, batch.limit_bytes).plan_whole(best.dials)
        assert best.dials.balance == "time" and best.step_s < flops.step_s


def random_groups(number, seed=0):
    """Stages, lengths, 3 to 5 groups of chunks of 4 tokens, retained chunks (None: token-level)."""
    draw, found = random.Random(seed), []
    while len(found) < number:
        lens = [draw.choice([draw.randint(1, 4), draw.randint(4, 24)]) for _ in range(6)]
        groups = group_chunks(lens, ChunkOptions(size=4, hybrid=draw.random() < 0.5))
        if 3 <= len(groups) <= 5:
            found.append((draw.choice([2, 3, 4]), lens, groups, draw.choice([1, 2, None])))
    return found


def units(case, order):
    num_stages, lens, groups, num_retained = case
    listed, stages = [groups[i] for i in order], (2,) * num_stages
    if num_retained is None:
        plan = plan_seq1f1b(lens, listed, stages=stages)
    else:
        plan = plan_1f1b(lens, listed, stages=stages, num_retained=num_retained)
    return time_actions(plan, UnitCosts(plan)).duration_s


@pytest.mark.nightly
def test_the_order_of_groups_is_close_to_the_best_of_all():
    gains, gaps = [], []
    for case in random_groups(12):
        groups = case[2]
        work = [sum(chunk.num_tokens for chunk in group) for group in groups]
        found = improve_order(work, lambda order, case=case: units(case, order), max_tried=64)
        step, listed = units(case, found), units(case, range(len(groups)))
        best = min(units(case, order) for order in permutations(range(len(groups))))
        assert best <= step <= listed
        gains.append(listed / step)
        gaps.append(step / best)
    assert mean(gaps) < 1.005 and max(gaps) < 1.05
    assert mean(gains) > 1.005 and max(gains) > 1.05


@pytest.mark.nightly
def test_an_order_that_does_not_fit_is_not_taken():
    """Shorter where the first group comes late, which only fits in the first half."""
    timed = []

    def step_s(order):
        timed.append(order)
        return 10.0 - order.index(0)

    assert improve_order([1.0] * 6, step_s, max_tried=64).index(0) == 5
    assert improve_order([1.0] * 6, step_s, lambda o: o.index(0) < 3, max_tried=64).index(0) == 2
    timed.clear()
    improve_order([3.0, 2.0, 1.0] * 5, step_s, max_tried=20)
    assert len(timed) == len(set(timed)) == 20


@pytest.mark.nightly
def test_the_search_improves_the_order_of_its_winner():
    lens = tuple(min(n, 65536) for n in sample_lengths("github", 16, 0))
    model = replace(MODEL, shape=model_shape("Qwen2.5-7B"), hardware=Machine.named("H100"))
    found = search(problem(seq_lens=lens, model=model, dp=1, sp=1, pp=4), {"one": chunkflow})
    listed = min(o.step_s for o in found.others if o.dials.group_order == "as listed")
    assert found.best.dials.group_order == "searched" and found.best.step_s < listed
