"""Token-level 1F1B: InfiniPipe's places, windows and diagonals with a worked example; slices."""

import random
from itertools import pairwise, product

import pytest
from helpers.nightly import SEED
from helpers.windows import windows
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.plan.plan import Backward, Forward
from furlong.planners.chunks import equal_work_bounds, sliced_groups, split_equal_work, whole_groups
from furlong.planners.orders import (
    backward_places,
    plan_1f1b,
    plan_seq1f1b,
    recompute_on_diagonals,
)
from furlong.simulate.clock import UnitCosts, simulate


def step(plan):
    return simulate(plan, UnitCosts(plan)).duration_s


def equal_groups(counts, num_tokens=1):
    """(lengths, groups): sequences cut into so many chunks of `num_tokens` each."""
    seq_lens = [count * num_tokens for count in counts]
    groups = [
        sliced_groups([seq_len], num_slices=count)[0]
        for seq_len, count in zip(seq_lens, counts, strict=True)
    ]
    return seq_lens, [
        [type(c)(tuple(type(s)(i, s.start, s.stop) for s in c.slices)) for c in group]
        for i, group in enumerate(groups)
    ]


def from_one(places):
    """The paper counts from 1."""
    return {place + 1 for place in places}


def test_worked_example_places_and_windows():
    assert [place + 1 for place in backward_places([3, 1])] == [3, 2, 1, 4]
    assert [from_one(w) for w in windows([3, 1], 2, 0)] == [{1, 2, 3, 4}]
    assert [from_one(w) for w in windows([3, 1], 2, 1)] == [{1, 2, 3}, {1, 2, 4}]


def test_worked_example_diagonals():
    # A1->C4, A2->C3, A3->C2, B1->C5 on stage 1, one less on stage 2
    on_stages = recompute_on_diagonals([1, 2, 3, 4, 5], [3, 1], (5, 5))
    assert on_stages == [[4, 3, 2, 5], [3, 2, 1, 4]]


def window_bytes(layers, counts, num_stages):
    """The worked example's bytes: 16 per chunk, 4 more where a later chunk reads its K,V, 5 less
    per checkpointed layer there and 7 less elsewhere."""
    spread = recompute_on_diagonals(layers, counts, (2,) * num_stages)
    tails = {sum(counts[: i + 1]) - 1 for i in range(len(counts))}
    return [
        [
            sum(
                16 - 7 * spread[stage][k] if k in tails else 20 - 5 * spread[stage][k]
                for k in window
            )
            for window in windows(counts, num_stages, stage)
        ]
        for stage in range(num_stages)
    ]


def best_layers(budget, counts, num_stages=2, most=2):
    """The smallest sum of layers within the budget, by trying all."""
    number = sum(counts) + num_stages - 1
    fits = (
        sum(layers)
        for layers in product(range(most + 1), repeat=number)
        if max(max(row) for row in window_bytes(layers, counts, num_stages)) <= budget
    )
    return min(fits, default=None)


def test_worked_example_optima():
    assert window_bytes([0] * 5, [3, 1], 2) == [[72], [56, 56]]
    assert window_bytes([0, 2, 0, 0, 1], [3, 1], 2)[0] == [51]
    grouped = {55: 3, 42: 5, 30: 8, 24: 10, 23: None}
    assert {budget: best_layers(budget, [3, 1]) for budget in grouped} == grouped
    assert [best_layers(budget, [3]) for budget in (55, 42, 30)] == [1, 3, 6]
    assert best_layers(55, [1]) == 0


def test_worked_example_in_time():
    # f = 4, b = 8, one layer's forward 2: delta = (d_p - 1)(f + b) = 12
    def plan(counts, layers):
        seq_lens, groups = equal_groups(counts, num_tokens=4)
        spread = recompute_on_diagonals(layers, counts, (2, 2))
        return plan_seq1f1b(seq_lens, groups, stages=(2, 2), recompute_layers=spread)

    steady = 12 * 4
    grouped = step(plan([3, 1], [0, 2, 0, 0, 1]))
    # two pipelines, one after the other: another warm-up and cool-down, less recomputation
    split = step(plan([3], [0, 1, 0, 0])) + step(plan([1], [0, 0]))
    assert (grouped - steady, split - steady) == (12 + 6, 12 + 2 + 12)


counts_and_stages = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4)
)


@settings(max_examples=200, deadline=None)
@given(counts_and_stages)
def test_equal_chunks_take_n_plus_stages_minus_one_slots(problem):
    counts, num_stages = problem
    seq_lens, groups = equal_groups(counts)
    plan = plan_seq1f1b(seq_lens, groups, stages=(1,) * num_stages)
    assert step(plan) == (sum(counts) + num_stages - 1) * 3


@settings(max_examples=200, deadline=None)
@given(counts_and_stages)
def test_windows_are_what_a_stage_holds(problem):
    counts, num_stages = problem
    seq_lens, groups = equal_groups(counts)
    plan = plan_seq1f1b(seq_lens, groups, stages=(1,) * num_stages)
    for stage, actions in enumerate(plan.actions):
        held, seen = set(), []
        for action in actions:
            if isinstance(action, Forward):
                held.add(action.chunk)
            elif isinstance(action, Backward):
                seen.append(set(held))
                held.remove(action.chunk)
        found = windows(counts, num_stages, stage)
        assert seen[: len(found)] == found
        # later backwards hold ever fewer of the last window
        assert all(later < found[-1] for later in seen[len(found) :])
        # InfiniPipe's Eq. 7 counts stages from 1
        assert max(map(len, found)) == min(sum(counts), num_stages - stage - 1 + max(counts))


@settings(max_examples=200, deadline=None)
@given(counts_and_stages, st.randoms(use_true_random=False))
def test_recompute_on_diagonals_lengthens_the_step_by_its_sum(problem, draw):
    counts, num_stages = problem
    counts = sorted(counts, reverse=True)
    seq_lens, groups = equal_groups(counts, num_tokens=3)
    layers = [draw.randint(0, 3) for _ in range(sum(counts) + num_stages - 1)]
    stages = (3,) * num_stages
    spread = recompute_on_diagonals(layers, counts, stages)
    plain = plan_seq1f1b(seq_lens, groups, stages=stages)
    again = plan_seq1f1b(seq_lens, groups, stages=stages, recompute_layers=spread)
    # one layer's forward takes 1
    assert step(again) - step(plain) == pytest.approx(sum(layers))


def test_one_cell_of_a_diagonal_costs_as_much_as_all_of_it():
    seq_lens, groups = equal_groups([4, 2], num_tokens=4)
    stages = (1,) * 3
    plain = step(plan_seq1f1b(seq_lens, groups, stages=stages))
    spread = recompute_on_diagonals([0, 0, 0, 1, 0, 0, 0, 0], [4, 2], stages)
    alone = [list(row) for row in spread]
    alone[0] = alone[1] = [0] * 6
    steps = [
        step(plan_seq1f1b(seq_lens, groups, stages=stages, recompute_layers=layers))
        for layers in (spread, alone)
    ]
    assert (plain, steps) == (96, [100, 100])


def test_whole_sequences_give_plain_1f1b():
    seq_lens = (4, 2, 1, 1)
    plans = [
        planner(seq_lens, whole_groups(seq_lens), stages=(1,) * 4)
        for planner in (plan_seq1f1b, plan_1f1b)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("number", [200, pytest.param(3000, marks=pytest.mark.nightly)])
def test_random_slices_are_legal(number):
    draw = random.Random(SEED)
    for _ in range(number):
        seq_lens = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))]
        groups = sliced_groups(
            seq_lens, num_slices=draw.randint(1, 6), quadratic=draw.choice((0, 0.1, 1))
        )
        # the planner checks every plan that it returns
        plan = plan_seq1f1b(seq_lens, groups, stages=(1,) * draw.randint(1, 4))
        assert sorted(plan.seq_lens) == sorted(seq_lens)


def test_bounds_of_the_worked_mesh():
    # InfiniPipe's mesh for a1 = 1, a2 = 16, 32 tokens, 4 slices
    bounds = equal_work_bounds(32, 4, quadratic=1, linear=16)
    assert [round(bound, 2) for bound in bounds] == [13.17, 20.84, 26.87, 32]
    slices = split_equal_work(5, 32, 4, quadratic=1, linear=16)
    assert [(s.seq_id, s.start, s.stop) for s in slices] == [
        (5, 0, 13), (5, 13, 21), (5, 21, 27), (5, 27, 32),
    ]  # fmt: skip


@pytest.mark.parametrize("linear", [0.0, 1.0])
@pytest.mark.parametrize("quadratic", [0.0, 1e-9, 1.0])
def test_bounds_share_the_work(quadratic, linear):
    if not quadratic and not linear:
        with pytest.raises(ValueError, match="no 4 slices"):
            equal_work_bounds(1000, 4, quadratic=0, linear=0)
        return
    bounds = [0.0, *equal_work_bounds(1000, 4, quadratic=quadratic, linear=linear)]
    work = [quadratic * bound**2 + linear * bound for bound in bounds]
    shares = [b - a for a, b in pairwise(work)]
    assert shares == pytest.approx([work[-1] / 4] * 4)
    assert bounds[-1] == pytest.approx(1000)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.floats(0, 10))
def test_slices_tile_a_sequence(seq_len, num_slices, quadratic):
    slices = split_equal_work(0, seq_len, num_slices, quadratic=quadratic)
    assert [s.start for s in slices] == [0, *[s.stop for s in slices[:-1]]]
    assert slices[-1].stop == seq_len
    assert len(slices) == min(num_slices, seq_len)
    assert all(s.num_tokens > 0 for s in slices)


def test_equal_tokens_by_default():
    assert [s.num_tokens for s in split_equal_work(0, 12, 4)] == [3, 3, 3, 3]


def test_equal_work_shortens_the_step_of_a_long_sequence():
    class Quadratic(UnitCosts):
        def compute_s(self, action, rank):
            if not isinstance(action, (Forward, Backward)):
                return 0.0
            piece = plan.chunks[action.chunk].slices[0]
            work = piece.stop**2 - piece.start**2
            return work * (2.0 if isinstance(action, Backward) else 1.0)

    steps = []
    for quadratic, linear in ((0.0, 1.0), (1.0, 0.0)):
        groups = sliced_groups([1000], num_slices=8, quadratic=quadratic, linear=linear)
        plan = plan_seq1f1b([1000], groups, stages=(1,) * 4)
        steps.append(simulate(plan, Quadratic(plan)).duration_s)
    assert steps[1] < 0.85 * steps[0]
