"""Orders of groups: permutations, never slower than what is listed, close to the best of all."""

import random
from dataclasses import replace
from itertools import permutations
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.published.build import build
from papers.published.catalogue import SEARCHED
from papers.published.dials import Dials
from papers.published.group_order import improve_order, simple_order
from papers.published.problem import Problem
from papers.published.search import search

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.plan.plan import Layout
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_seq1f1b
from furlong.planners.question import fit
from furlong.simulate.clock import UnitCosts, time_actions

MODEL = CostModel(model_shape("Qwen2.5-7B"), hardware("H100"), Training(zero_stage=1))
LENS = [60_000, 31_000, 22_000, 9_000, 7_000, 5_000, 3_000, 2_000, 1_500]

pytestmark = pytest.mark.slow


def random_cases(number, seed=0):
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


def test_close_to_the_best_of_all_orders():
    gains, gaps = [], []
    for case in random_cases(30):
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


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_simple_orders_are_permutations(group_s):
    groups = sorted(range(len(group_s)))
    for wanted in ("as listed", "longest first", "shortest first", "longest inside"):
        assert sorted(simple_order(group_s, wanted)) == groups


def test_simple_orders_of_an_example():
    group_s = [2.0, 5.0, 1.0, 4.0, 3.0]
    assert simple_order(group_s, "longest first") == (1, 3, 4, 0, 2)
    assert simple_order(group_s, "shortest first") == (2, 0, 4, 3, 1)
    assert simple_order(group_s, "longest inside") == (2, 4, 1, 3, 0)


def test_what_does_not_fit_is_not_taken():
    """Shorter where the first group comes late, which only fits in the first half."""
    group_s = [1.0] * 6

    def step_s(order):
        return 10.0 - order.index(0)

    assert improve_order(group_s, step_s, max_tried=64).index(0) == 5
    found = improve_order(group_s, step_s, lambda order: order.index(0) < 3, max_tried=64)
    assert found.index(0) == 2


def test_no_more_orders_are_timed_than_allowed():
    timed = []
    improve_order([3.0, 2.0, 1.0] * 5, lambda order: timed.append(order) or 1.0, max_tried=20)
    assert len(timed) == len(set(timed)) == 20


@pytest.mark.parametrize("walk", ["state-aware", "token-level"])
def test_dials_build_the_same_cells_in_another_order(walk):
    dials = Dials(
        method="any", layout=Layout(pp=4), stages=(7, 7, 7, 7), walk=walk, size=4096,
        num_retained=2, keep="attention",
    )  # fmt: skip
    listed = build(dials, LENS, MODEL)
    budget = fit(listed, MODEL, 2**40)
    seconds = {}
    for order in ("as listed", "longest first", "shortest first", "longest inside", "searched"):
        plan = build(replace(dials, group_order=order), LENS, MODEL, budget)
        assert sorted(map(str, plan.chunks)) == sorted(map(str, listed.chunks))
        assert [len(own) for own in plan.actions] == [len(own) for own in listed.actions]
        seconds[order] = time_actions(plan, MODEL.costs(plan)).duration_s
        if order == "searched":
            assert fit(plan, MODEL, budget) <= budget
    assert seconds["searched"] <= seconds["as listed"]
    assert build(replace(dials, group_order="searched"), LENS, MODEL, budget) == plan


def test_search_improves_the_order_of_its_winner():
    lens = sample_lengths("github", 16, 0, max_seq_len=65536, too_long="truncate")
    problem = Problem(seq_lens=tuple(lens), model=MODEL, num_devices=4, dp=1, sp=1, pp=4)
    found = search(problem, {"ChunkFlow": SEARCHED["ChunkFlow"]})
    listed = min(o.step_s for o in found.others if o.dials.group_order == "as listed")
    assert found.best.dials.group_order == "searched"
    assert "order of groups searched" in str(found.best.dials)
    assert found.best.step_s < listed
    assert fit(found.best.plan, found.best.model, problem.limit_bytes) == found.best.peak_bytes
