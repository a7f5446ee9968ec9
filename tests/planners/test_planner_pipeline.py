"""State-aware 1F1B: ChunkFlow's figures, exact schedules, and thousands of random instances."""

import random
from itertools import permutations

import pytest
from helpers.nightly import SEED
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow
from papers.published.chunks import packed_groups, padded_groups

from furlong.errors import DataError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Forward, RebuildKV, Recompute, Recv, Reduce, Send
from furlong.plan.text import format_action, format_chunk, load_plan, parse_chunk, save_plan
from furlong.planners.chunks import longest_first, whole_groups
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b
from furlong.simulate.clock import UnitCosts, measure, simulate

FOUR = (1,) * 4

# ChunkFlow's Figures 2, 6 and 7: sequences 0 to 3 of 1, 1, 2 and 4 units on four stages
LENS = (1, 1, 2, 4)
A, C = ("0:0-1 1:0-1",), ("2:0-2",)
D = ("3:0-2", "3:2-4")

# Reconstructed from the printed ratios: the drawings themselves are lost. A line is a stage.
FIGURE_2 = """
F0[0-4] F1[4-6] F2[6-7] F3[7-8] B0[40-48] B1[48-52] B2[52-54] B3[54-56]
F0[4-8] F1[8-10] F2[10-11] B0[32-40] F3[40-41] B1[41-45] B2[45-47] B3[47-49]
F0[8-12] F1[12-14] B0[24-32] F2[32-33] B1[33-37] F3[41-42] B2[42-44] B3[45-47]
F0[12-16] B0[16-24] F1[24-26] B1[26-30] F2[33-34] B2[34-36] F3[42-43] B3[43-45]
"""
FIGURE_6B = """
FA[0-2] FD1[2-4] FD2[4-6] FC[6-8] BA[20-24] BD2[32-36] BD1[36-40] BC[42-46]
FA[2-4] FD1[4-6] FD2[6-8] BA[16-20] FC[20-22] BD2[28-32] BD1[32-36] BC[38-42]
FA[4-6] FD1[6-8] BA[12-16] FD2[16-18] FC[22-24] BD2[24-28] BD1[28-32] BC[34-38]
FA[6-8] BA[8-12] FD1[12-14] FD2[18-20] BD2[20-24] BD1[24-28] FC[28-30] BC[30-34]
"""
FIGURE_6A = """
FA[0-2] FD1[2-4] FD2[4-6] FC[6-8] BA[20-24] BD2[32-36] RD1[42-44] BD1[44-48] BC[48-52]
FA[2-4] FD1[4-6] FD2[6-8] BA[16-20] FC[20-22] BD2[28-32] RD1[36-38] BD1[38-42] BC[42-46]
FA[4-6] FD1[6-8] BA[12-16] FD2[16-18] FC[22-24] BD2[24-28] RD1[30-32] BD1[32-36] BC[36-40]
FA[6-8] BA[8-12] FD1[12-14] FD2[18-20] BD2[20-24] RD1[24-26] BD1[26-30] FC[30-32] BC[32-36]
"""


def groups_of(*texts):
    return [[parse_chunk(chunk) for chunk in group] for group in texts]


def in_order(lens):
    """Every sequence a group of its own, in the order of `lens`."""
    return lens, groups_of(*([f"{i}:0-{n}"] for i, n in enumerate(lens)))


def step(plan, **semantics):
    """(makespan, bubble in per cent) in units."""
    timeline = simulate(plan, UnitCosts(plan), **semantics)
    return timeline.duration_s, round(100 * measure(timeline).bubble_ratio, 2)


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ((4, 2, 1, 1), (56, 57.14)),  # Figure 2; the print has 57.14 %
        ((4, 1, 2, 1), (56, 57.14)),  # the other order that gives it
        ((2, 2, 2, 2), (42, 42.86)),  # equal lengths; the print has 42.8 %
        ((4, 4), (60, 60.0)),  # Figure 7; the print has 60 %
    ],
)
def test_bubbles_of_plain_1f1b(lens, expected):
    assert step(plan_1f1b(*in_order(lens), stages=FOUR)) == expected


def test_figure_2_is_longest_first():
    assert step(plan_1f1b(LENS, whole_groups(LENS), stages=FOUR)) == (56, 57.14)


@pytest.mark.parametrize(
    ("groups", "num_retained", "recompute", "expected"),
    [
        ((A, D, C), 2, "lazy", (46, 47.83)),  # Figure 6b; the print has 47.8 %
        ((A, D, C), 1, "lazy", (52, 53.85)),  # Figure 6a; the print has 54.1 %
    ],
)
def test_bubbles_of_figure_6(groups, num_retained, recompute, expected):
    plan = plan_1f1b(
        LENS, groups_of(*groups), stages=FOUR, num_retained=num_retained, recompute=recompute
    )
    assert step(plan) == expected


@pytest.mark.parametrize("order", list(permutations((A, C, D))))
@pytest.mark.parametrize(("num_retained", "shortest"), [(2, 42), (1, 44)])
def test_orders_of_figure_6_against_a_bound(order, num_retained, shortest):
    """By hand: a rank works 24 units on the four chunks of two tokens, and 2 more where D1 is
    recomputed; the last one waits 3 x 2 for its first forward, and 3 x 4 follow its last backward.
    """
    assert shortest == 24 + 2 * (num_retained == 1) + 3 * 2 + 3 * 4
    took = {}
    for recompute in ("lazy", "eager"):
        plan = plan_1f1b(
            LENS, groups_of(*order), stages=FOUR, num_retained=num_retained, recompute=recompute
        )
        took[recompute], bubble = step(plan)
        assert took[recompute] >= shortest
        assert bubble == round(100 * (1 - 24 / took[recompute]), 2)
    assert took["eager"] <= took["lazy"]
    if order == (D, C, A):  # longest first, then as few tokens as may be behind: nothing is shorter
        assert took["eager"] == shortest


def test_figure_6a_within_the_print():
    plan = plan_1f1b(LENS, groups_of(A, D, C), stages=FOUR, recompute="lazy")
    assert abs(step(plan)[1] - 54.1) < 0.3


def test_chunkflows_own_chunks_longest_first_beat_the_printed_schedules():
    options = ChunkOptions(size=2, num_retained=1, keep="kv", hybrid=False)
    assert step(plan_chunkflow(LENS, options, stages=FOUR)) == (44, 45.45)
    options = ChunkOptions(size=2, num_retained=2, keep="kv", hybrid=False)
    assert step(plan_chunkflow(LENS, options, stages=FOUR)) == (42, 42.86)
    options = ChunkOptions(size=4, num_retained=1, keep="kv")
    assert step(plan_chunkflow(LENS, options, stages=FOUR)) == (60, 60.0)


def test_recompute_is_no_useful_work():
    plan = plan_1f1b(LENS, groups_of(D, C, A), stages=FOUR)
    figures = measure(simulate(plan, UnitCosts(plan)))
    assert round(100 * figures.bubble_ratio, 2) == 45.45
    assert round(100 * figures.idle_ratio, 1) == 40.9


def schedule(plan, names, rank):
    """A rank's cells with their times, as the figures write them: "FA[0-2] BA[20-24]"."""
    timeline = simulate(plan, UnitCosts(plan))
    cells = [r for r in timeline.records if r.rank == rank and r.lane == "compute"]
    return " ".join(
        f"{r.text[0]}{names[int(r.text[1:].split('.')[0])]}[{r.start_s:g}-{r.stop_s:g}]"
        for r in sorted(cells, key=lambda r: r.start_s)
    )


@pytest.mark.parametrize(
    ("plan", "names", "expected"),
    [
        (plan_1f1b(*in_order((4, 2, 1, 1)), stages=FOUR), "0123", FIGURE_2),
        (
            plan_1f1b(LENS, groups_of(A, D, C), stages=FOUR, num_retained=2, recompute="lazy"),
            ["A", "D1", "D2", "C"],
            FIGURE_6B,
        ),
        (
            plan_1f1b(LENS, groups_of(A, D, C), stages=FOUR, num_retained=1, recompute="lazy"),
            ["A", "D1", "D2", "C"],
            FIGURE_6A,
        ),
    ],
)
def test_exact_schedules(plan, names, expected):
    assert [schedule(plan, names, rank) for rank in range(4)] == expected.split("\n")[1:-1]


@pytest.mark.parametrize(("num_retained", "expected"), [(2, [4, 3, 3, 2]), (1, [3, 2, 2, 1])])
def test_graphs_held_in_figure_6(num_retained, expected):
    plan = plan_1f1b(LENS, groups_of(A, D, C), stages=FOUR, num_retained=num_retained)
    assert most_graphs(plan) == expected


def most_graphs(plan):
    """For each rank, the most graphs it holds at once."""
    most = []
    for actions in plan.actions:
        held, highest = 0, 0
        for action in actions:
            held += isinstance(action, Recompute)
            held += isinstance(action, Forward) and action.keep == "all"
            highest = max(highest, held)
            held -= isinstance(action, Backward)
        most.append(highest)
    return most


def random_instances(number, seed=0):
    draw = random.Random(seed)
    for _ in range(number):
        seq_lens = [draw.choice((1, 2, 3, 8, 30)) for _ in range(draw.randint(1, 7))]
        options = ChunkOptions(
            size=draw.randint(1, 9),
            num_retained=draw.randint(0, 3),
            keep=draw.choice(("input", "kv", "attention", "all")),
            hybrid=draw.random() < 0.5,
        )
        yield seq_lens, options, (2,) * draw.randint(1, 5)


@pytest.mark.parametrize("number", [200, pytest.param(3000, marks=pytest.mark.nightly)])
def test_random_instances_are_legal_and_within_their_bounds(number):
    for seq_lens, options, stages in random_instances(number, SEED):
        steps = {}
        for recompute in ("lazy", "eager"):
            # the planner checks every plan that it returns
            plan = plan_chunkflow(seq_lens, options, stages=stages, recompute=recompute)
            steps[recompute] = step(plan)[0]
            if options.keep != "all":
                ahead = range(len(stages) - 1, -1, -1)
                most = [count + max(1, options.num_retained) for count in ahead]
                assert all(a <= b for a, b in zip(most_graphs(plan), most, strict=True))
        assert steps["eager"] <= steps["lazy"]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_plans_survive_their_text_and_list_every_cell(seed):
    ((seq_lens, options, stages),) = random_instances(1, seed)
    plan = plan_chunkflow(seq_lens, options, stages=stages)
    assert load_plan(save_plan(plan)) == plan
    check(plan)
    for rank, actions in enumerate(plan.actions):
        assert actions[-1] == Reduce(rank)
        for kind in (Forward, Backward):
            assert sorted(a.chunk for a in actions if isinstance(a, kind)) == list(
                range(len(plan.chunks))
            )
        for kind, payload, there in (
            (Send, "activation", rank < len(stages) - 1),
            (Recv, "activation", rank > 0),
            (Send, "gradient", rank > 0),
            (Recv, "gradient", rank < len(stages) - 1),
        ):
            found = [a for a in actions if isinstance(a, kind) and a.payload == payload]
            assert len(found) == there * len(plan.chunks)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_any_order_of_groups_is_legal(seed, shuffled):
    ((seq_lens, options, stages),) = random_instances(1, seed)
    groups = whole_groups(seq_lens)
    shuffled.shuffle(groups)
    plan_1f1b(seq_lens, groups, stages=stages, num_retained=options.num_retained)


def texts(plan, rank):
    return ", ".join(map(format_action, plan.actions[rank]))


def test_a_gradient_is_received_before_or_after_the_recompute():
    lazy = plan_1f1b((4,), groups_of(("0:0-2", "0:2-4")), stages=(1, 1), recompute="lazy")
    assert texts(lazy, 0) == (
        "F0.0 kv, send activation 0.0 to 1, F1.0 all, send activation 1.0 to 1, "
        "recv gradient 1.1 from 1, B1.0, recv gradient 0.1 from 1, R0.0, B0.0, reduce 0"
    )
    eager = plan_1f1b((4,), groups_of(("0:0-2", "0:2-4")), stages=(1, 1), recompute="eager")
    assert texts(eager, 0).endswith("B1.0, R0.0, recv gradient 0.1 from 1, B0.0, reduce 0")
    assert (
        texts(eager, 1)
        == texts(lazy, 1)
        == (
            "recv activation 0.0 from 0, F0.1 kv, recv activation 1.0 from 0, F1.1 all, "
            "B1.1, send gradient 1.1 to 0, R0.1, B0.1, send gradient 0.1 to 0, reduce 1"
        )
    )


def test_evaluation_has_forwards_and_activations_only():
    plan = plan_chunkflow([3, 9], ChunkOptions(size=4), stages=(1, 1), backward=False)
    kinds = {type(action) for actions in plan.actions for action in actions}
    assert kinds == {Forward, Send, Recv}


def test_one_stage_sends_nothing():
    plan = plan_1f1b((4,), groups_of(("0:0-2", "0:2-4")), stages=(3,))
    assert texts(plan, 0) == "F0.0 kv, F1.0 all, B1.0, R0.0, B0.0, reduce 0"


def test_padded_sequences_are_as_long_as_the_longest():
    padded, groups = padded_groups([1, 4, 2])
    assert padded == (4, 4, 4)
    plan = plan_1f1b(padded, groups, stages=FOUR)
    assert step(plan)[0] == 6 * 12  # m + P - 1 slots of a forward and a backward
    assert padded_groups([1, 4], pad_to=8)[0] == (8, 8)
    with pytest.raises(DataError, match="padded to 3"):
        padded_groups([1, 4], pad_to=3)


def test_packed_sequences_stay_whole():
    groups = packed_groups([1, 5, 2, 6, 3], 6)
    assert [[format_chunk(chunk) for chunk in group] for group in groups] == [
        ["3:0-6"], ["4:0-3 2:0-2 0:0-1"], ["1:0-5"],
    ]  # fmt: skip
    plan_1f1b([1, 5, 2, 6, 3], groups, stages=(1, 1))
    with pytest.raises(DataError, match="sequence 3 has 6 tokens"):
        packed_groups([1, 5, 2, 6, 3], 5)


def test_longest_first_is_stable():
    groups = groups_of(["0:0-2"], ["1:0-3"], ["2:0-2"])
    assert longest_first(groups) == groups_of(["1:0-3"], ["0:0-2"], ["2:0-2"])


@pytest.mark.parametrize("seq_lens", [[], [3, 0]])
def test_nothing_to_train_on_is_refused(seq_lens):
    with pytest.raises(DataError):
        plan_chunkflow(seq_lens, ChunkOptions(size=4), stages=(1, 1))
    with pytest.raises(DataError):
        whole_groups(seq_lens)


def test_keys_that_nobody_reads_are_not_built_again():
    """A group of chunks of whole sequences, and of pieces: chunk 1 alone is read by a later one."""
    groups = groups_of(("0:0-3", "1:0-4", "1:4-8"))
    plan = plan_1f1b((3, 8), groups, stages=(1, 1), keep="input", num_retained=0)
    rebuilt = [[a.chunk for a in own if isinstance(a, RebuildKV)] for own in plan.actions]
    assert rebuilt == [[1], [1]]
