"""Adaptive checkpointing: InfiniPipe's worked example, a brute-force reference, uneven stages."""

from itertools import product

import numpy as np
import pytest
from helpers.windows import windows
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.planners.infinipipe import (
    Checkpointing,
    PipelineLoads,
    StageLoad,
    choose_layers,
    group_classes,
    lacking_bytes,
    least_layers,
)
from furlong.planners.orders import backward_places


def of_windows(counts, heights, room, *, act, saved, kv_gradient=0, kv_saved=0, again=0):
    """The paper's linear form (Eq. 19): per chunk `act`, `kv_gradient` more where a later chunk
    reads its K,V, `saved` less per layer, there only `saved - kv_saved`. `again`: what the backward
    at the end of a window holds if it recomputes."""
    tails = np.cumsum(counts) - 1
    number = sum(counts)
    not_tail = np.array([k not in tails for k in range(number)])
    loads = []
    for stage in range(len(heights)):
        found = windows(counts, len(heights), stage)
        alive = np.array([[k in window for k in range(number)] for window in found])
        order = np.argsort(backward_places(counts))
        loads.append(
            StageLoad(
                alive,
                alive @ (act + kv_gradient * not_tail).astype(float),
                order[: len(found)],
                np.full(len(found), float(again)),
                (saved - kv_saved * not_tail).astype(float),
                float(room),
            )
        )
    return PipelineLoads(tuple(counts), tuple(heights), tuple(loads))


def worked(counts, room):
    """16 per chunk, per-layer input 1 and two layers, 4 of dK,dV and 2 a layer of K,V."""
    return of_windows(counts, (2, 2), room, act=16, saved=7, kv_gradient=4, kv_saved=2)


def brute_force(problem):
    """The least sum of layers, by trying all."""
    choices = range(max(problem.heights) + 1)
    return min(
        (
            sum(layers)
            for layers in product(choices, repeat=problem.num_diagonals)
            if max(lacking_bytes(problem, layers)) <= 0
        ),
        default=None,
    )


@pytest.mark.parametrize(
    ("counts", "room", "least"),
    [
        ((3, 1), 72, 0), ((3, 1), 55, 3), ((3, 1), 42, 5), ((3, 1), 30, 8), ((3, 1), 24, 10),
        ((3, 1), 23, None), ((3,), 55, 1), ((3,), 42, 3), ((3,), 30, 6), ((1,), 55, 0),
    ],
)  # fmt: skip
def test_worked_example(counts, room, least):
    problem = worked(counts, room)
    found = choose_layers(problem)
    assert brute_force(problem) == least
    if least is None:
        assert found is None and least_layers(problem) == float("inf")
        return
    assert found.total == found.bound == least
    assert max(lacking_bytes(problem, found.layers)) <= 0
    assert least_layers(problem) <= least


def test_worked_example_windows():
    problem = worked((3, 1), 55)
    assert [load.plain_bytes.tolist() for load in problem.loads] == [[72], [56, 56]]
    # the paper's own solution, C2 = 2 and C5 = 1
    assert max(lacking_bytes(problem, (0, 2, 0, 0, 1))) <= 0


@pytest.mark.parametrize(
    ("room", "stretches", "overhead"),
    # f = 4, b = 8: delta 12, F-hat 2; grouped 12 + 2 * 3, apart 12 + 2 * 1 + 12
    [(72, [(0, 2)], 12), (55, [(0, 2)], 18), (42, [(0, 2)], 22), (30, [(0, 2)], 28)],
)
def test_worked_example_grouping(room, stretches, overhead):
    grouping = group_worked(room, ends_s=12.0, layer_s=2.0)
    assert (list(grouping.stretches), grouping.overhead_s) == (stretches, overhead)
    assert grouping.bound_s == overhead


def group_worked(room, *, ends_s, layer_s):
    counts = (3, 1)
    return group_classes(
        2,
        ends_s=ends_s,
        layer_s=layer_s,
        least=lambda own: least_layers(worked(counts[slice(*own)], room)),
        solve=lambda own: choose_layers(worked(counts[slice(*own)], room)),
    )


def test_sequences_part_where_a_pipeline_costs_less_than_what_it_saves():
    # apart: 2 * 2 + 4 * 1; together: 2 + 4 * 3
    grouping = group_worked(55, ends_s=2.0, layer_s=4.0)
    assert (list(grouping.stretches), grouping.overhead_s) == ([(0, 1), (1, 2)], 8.0)


def test_no_group_fits():
    assert group_worked(15, ends_s=2.0, layer_s=4.0) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=6, max_size=6), st.floats(0.1, 3))
def test_grouping_against_all_groupings(sums, ends_s):
    """Three classes: all cuts of the row, each stretch with a given sum."""
    row = [(a, b) for a in range(3) for b in range(a + 1, 4)]
    totals = dict(zip(row, sums, strict=True))
    asked = []

    def solve(own):
        asked.append(own)
        return Checkpointing((totals[own],), totals[own]) if totals[own] < 6 else None

    grouping = group_classes(
        3, ends_s=ends_s, layer_s=1.0, solve=solve,
        least=lambda own: float("inf") if totals[own] == 6 else totals[own] / 2,
    )  # fmt: skip
    cuts = [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]]
    costs = [
        sum(ends_s + totals[s] for s in found)
        for found in cuts
        if all(totals[s] < 6 for s in found)
    ]
    if not costs:
        assert grouping is None
    else:
        assert grouping.overhead_s == pytest.approx(min(costs))
        assert grouping.bound_s == pytest.approx(min(costs))
    assert len(asked) == len(set(asked))


problems = st.tuples(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda n: sorted(n, reverse=True)),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.floats(0.2, 1.0),
    st.integers(0, 9),
)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_least_sum_against_brute_force(problem):
    counts, heights, share, again = problem
    if (max(heights) + 1) ** (sum(counts) + len(heights) - 1) > 3000:
        counts, heights = counts[:1], heights[:2]
    room = share * 16 * min(sum(counts), len(heights) - 1 + max(counts))
    given_problem = of_windows(
        counts, heights, room, act=16, saved=7, kv_gradient=4, kv_saved=2, again=again
    )
    least = brute_force(given_problem)
    found = choose_layers(given_problem)
    assert (None if found is None else found.total) == least
    if found is not None:
        assert found.bound == least >= least_layers(given_problem)
        loose = choose_layers(given_problem, mip_gap=0.5)
        assert loose.bound <= least <= loose.total


def test_modes():
    problem = worked((3, 1), 55)
    assert choose_layers(problem, mode="none") is None
    full = choose_layers(problem, mode="full")
    assert full.layers == problem.all_layers(max(problem.heights)) == (2,) * 5
    assert (least_layers(problem, "none"), least_layers(problem, "full")) == (float("inf"), 10)
    assert choose_layers(worked((3, 1), 72), mode="none").layers == (0,) * 5
    assert choose_layers(worked((3, 1), 72), mode="full").total == 10


def test_a_lower_stage_recomputes_no_more_than_it_has():
    problem = of_windows((4,), (3, 2), 30, act=16, saved=5)
    found = choose_layers(problem)
    assert found.total == brute_force(problem)
    spread = found.on_stages((4,), (3, 2))
    assert max(spread[0]) <= 3 and max(spread[1]) <= 2


def test_without_nodes_the_answer_still_fits():
    problem = of_windows((6,) * 12, (8,) * 4, 60, act=16, saved=1.9, kv_gradient=1)
    found = choose_layers(problem, max_nodes=0)
    assert max(lacking_bytes(problem, found.layers)) <= 0
    assert 0 <= found.bound <= found.total
