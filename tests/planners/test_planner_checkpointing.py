"""Layers recomputed per diagonal: InfiniPipe's worked example, brute force, the greedy beside the
integer program."""

from itertools import product

import numpy as np
import pytest
from helpers.windows import windows
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.planners.infinipipe import PipelineLoads, StageLoad, choose_layers
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
        alive = np.array([[float(k in window) for k in range(number)] for window in found])
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
            if problem.lacking_bytes(layers) <= 0
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
    found = choose_layers(problem, "exact")
    assert brute_force(problem) == least
    assert (None if found is None else sum(found)) == least
    greedy = choose_layers(problem, "adaptive")
    assert (greedy is None) == (least is None)
    for layers in (found, greedy):
        assert layers is None or problem.lacking_bytes(layers) <= 0


def test_worked_example_windows():
    problem = worked((3, 1), 55)
    assert [load.plain_bytes.tolist() for load in problem.loads] == [[72], [56, 56]]
    # the paper's own solution, C2 = 2 and C5 = 1
    assert problem.lacking_bytes((0, 2, 0, 0, 1)) <= 0


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
    found = choose_layers(given_problem, "exact")
    assert (None if found is None else sum(found)) == least
    greedy = choose_layers(given_problem, "adaptive")
    if greedy is not None:
        assert given_problem.lacking_bytes(greedy) <= 0 and sum(greedy) >= least


def test_modes():
    problem = worked((3, 1), 55)
    assert choose_layers(problem, "none") is None
    assert choose_layers(problem, "full") == (2,) * problem.num_diagonals == (2,) * 5
    assert choose_layers(worked((3, 1), 72), "none") == (0,) * 5
    assert choose_layers(worked((3, 1), 72), "full") == (2,) * 5
    assert choose_layers(worked((3, 1), 23), "full") is None


@pytest.mark.parametrize("mode", ["exact", "adaptive"])
def test_a_lower_stage_recomputes_no_more_than_it_has(mode):
    problem = of_windows((4,), (3, 2), 30, act=16, saved=5)
    assert sum(choose_layers(problem, mode)) == brute_force(problem)
