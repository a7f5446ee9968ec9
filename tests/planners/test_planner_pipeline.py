"""Pipelines: state-aware 1F1B, InfiniPipe's windows and diagonals in token-level 1F1B, frozen
stages, and thousands of random instances."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from helpers.nightly import SEED
from helpers.pipeline_plans import groups_of, in_order, most_graphs, step
from helpers.windows import windows
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow, recomputed_late
from papers.published.chunks import whole_groups
from papers.seq1f1b_plan import plan_seq1f1b

from furlong.errors import ConfigError, PlanError
from furlong.plan.check import check
from furlong.plan.plan import Backward, Chunk, Forward, RebuildKV, Recv, Send, Slice
from furlong.plan.text import format_action, load_plan, save_plan
from furlong.planners.chunks import group_chunks, split_equal_work
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, plan_1f1b, plan_replica, recompute_on_diagonals

FOUR = (1,) * 4


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


@pytest.mark.parametrize("number", [100, pytest.param(3000, marks=pytest.mark.nightly)])
def test_random_instances_are_legal_and_within_their_bounds(number):
    shuffled = random.Random(SEED)
    for seq_lens, options, stages in random_instances(number, SEED):
        groups = whole_groups(seq_lens)
        shuffled.shuffle(groups)
        plan_1f1b(seq_lens, groups, stages=stages, num_retained=options.num_retained)
        plan = plan_chunkflow(seq_lens, options, stages=stages)  # checks it
        late = recomputed_late(plan)
        check(late)
        assert step(plan)[0] <= step(late)[0]
        for one in (plan, late) if options.keep != "all" else ():
            ahead = range(len(stages) - 1, -1, -1)
            most = [count + max(1, options.num_retained) for count in ahead]
            assert all(a <= b for a, b in zip(most_graphs(one), most, strict=True))


def texts(plan, rank):
    return ", ".join(map(format_action, plan.actions[rank]))


def test_a_gradient_is_received_before_or_after_the_recompute():
    eager = plan_1f1b((4,), groups_of(("0:0-2", "0:2-4")), stages=(1, 1))
    lazy = recomputed_late(eager)
    assert texts(lazy, 0) == (
        "F0.0 kv, send activation 0.0 to 1, F1.0 all, send activation 1.0 to 1, "
        "recv gradient 1.1 from 1, B1.0, recv gradient 0.1 from 1, R0.0, B0.0, reduce 0"
    )
    assert texts(eager, 0).endswith("B1.0, R0.0, recv gradient 0.1 from 1, B0.0, reduce 0")
    assert texts(eager, 1) == texts(lazy, 1)
    assert texts(eager, 1) == (
        "recv activation 0.0 from 0, F0.1 kv, recv activation 1.0 from 0, F1.1 all, "
        "B1.1, send gradient 1.1 to 0, R0.1, B0.1, send gradient 0.1 to 0, reduce 1"
    )


def test_evaluation_has_forwards_and_activations_only():
    plan = plan_chunkflow([3, 9], ChunkOptions(size=4), stages=(1, 1), backward=False)
    kinds = {type(action) for actions in plan.actions for action in actions}
    assert kinds == {Forward, Send, Recv}


def test_keys_that_nobody_reads_are_not_built_again():
    """A group of chunks of whole sequences, and of pieces: chunk 1 alone is read by a later one."""
    groups = groups_of(("0:0-3", "1:0-4", "1:4-8"))
    plan = plan_1f1b((3, 8), groups, stages=(1, 1), keep="input", num_retained=0)
    rebuilt = [[a.chunk for a in own if isinstance(a, RebuildKV)] for own in plan.actions]
    assert rebuilt == [[1], [1]]


def equal_groups(counts, num_tokens=1):
    """(lengths, groups): sequences cut into so many chunks of `num_tokens` each."""
    return [count * num_tokens for count in counts], [
        [Chunk((Slice(i, k * num_tokens, (k + 1) * num_tokens),)) for k in range(count)]
        for i, count in enumerate(counts)
    ]


def test_worked_example_diagonals():
    # A1->C4, A2->C3, A3->C2, B1->C5 on stage 1, one less on stage 2
    on_stages = recompute_on_diagonals([1, 2, 3, 4, 5], [3, 1], (5, 5))
    assert on_stages == [[4, 3, 2, 5], [3, 2, 1, 4]]


counts_and_stages = st.tuples(
    st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4)
)


@settings(max_examples=60)
@given(counts_and_stages)
def test_windows_are_what_a_stage_holds(problem):
    counts, num_stages = problem
    seq_lens, groups = equal_groups(counts)
    plan = plan_seq1f1b(seq_lens, groups, stages=(1,) * num_stages)
    assert step(plan)[0] == (sum(counts) + num_stages - 1) * 3
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


@settings(max_examples=60)
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
    assert step(again)[0] - step(plain)[0] == pytest.approx(sum(layers))


def test_whole_sequences_give_plain_1f1b():
    lens, groups = in_order((4, 2, 1, 1))
    assert plan_seq1f1b(lens, groups, stages=FOUR) == plan_1f1b(lens, groups, stages=FOUR)


@pytest.mark.parametrize("quadratic", [0.0, 1e-9, 1.0])
def test_slices_share_the_work(quadratic):
    """But for a token at each end."""
    linear = 1.0
    stops = [s.stop for s in split_equal_work(0, 10**6, 4, quadratic=quadratic, linear=linear)]
    work = [quadratic * stop**2 + linear * stop for stop in (0, *stops)]
    shares = [b - a for a, b in pairwise(work)]
    assert shares == pytest.approx([work[-1] / 4] * 4, rel=2e-5) and stops[-1] == 10**6


@settings(max_examples=200)
@given(st.integers(1, 60), st.integers(1, 12), st.floats(0, 10), st.sampled_from((1, 4)))
def test_slices_tile_a_sequence(seq_len, num_slices, quadratic, step):
    """At multiples of what a kernel takes, where there are as many of it as slices."""
    slices = split_equal_work(0, seq_len, num_slices, quadratic=quadratic, step=step)
    if seq_len >= step * num_slices:
        assert all(s.start % step == 0 for s in slices)
    assert [s.start for s in slices] == [0, *[s.stop for s in slices[:-1]]]
    assert slices[-1].stop == seq_len
    assert len(slices) == min(num_slices, seq_len)
    assert all(s.num_tokens > 0 for s in slices)
    sizes = [s.num_tokens for s in split_equal_work(0, seq_len, num_slices)]
    assert max(sizes) - min(sizes) <= 1, "equal tokens by default"


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_stages_only_run_forward(frozen):
    """No gradient goes to them, they reduce nothing, and the trained ones are as ever."""
    lens, stages = [20, 5, 3], (1, 1, 1)
    groups = group_chunks(lens, ChunkOptions(size=8))
    for make in (plan_1f1b, plan_seq1f1b):
        plan = make(lens, groups, stages=stages, frozen_stages=frozen)
        whole = make(lens, groups, stages=stages)
        for stage, actions in enumerate(plan.actions):
            kinds = {type(action) for action in actions}
            if stage < frozen:
                assert kinds <= {Forward, Send, Recv}
            assert not any(isinstance(a, Recv) and a.payload == "gradient" and a.stage <= frozen
                           for a in actions)  # fmt: skip
            computing = [a for a in actions if not isinstance(a, (Send, Recv))]
            if stage >= frozen:
                own = whole.actions[stage]
                assert computing == [a for a in own if not isinstance(a, (Send, Recv))]


def test_only_a_frozen_rank_may_be_without_a_reduce():
    lens = [20, 5]
    plan = plan_1f1b(
        lens, group_chunks(lens, ChunkOptions(size=8)), stages=(1, 1, 1), frozen_stages=1
    )
    check(plan)
    for rank in (1, 2):
        actions = [*plan.actions]
        actions[rank] = actions[rank][:-1]
        with pytest.raises(PlanError, match="no Reduce of stage"):
            check(replace(plan, actions=tuple(actions)))
    idle = replace(plan, actions=(*plan.actions, ()))
    with pytest.raises(PlanError, match="rank 3 has none"):
        check(idle)


def test_passes_of_a_pipeline_that_gather_weights_leave_replicas_to_themselves():
    options = ChunkOptions(size=4, reshard=True)
    make = partial(plan_replica, options=options, num_layers=2, sp_size=2)
    lens = [[23, 4], [5]]
    plans = [make(own, stages=(1, 1)) for own in lens]
    joined = join_kept(plans, [[0, 1], [2]], [23, 4, 5], 3)  # of which one has no sequence
    assert joined.regathers and joined.replicated
    assert load_plan(save_plan(joined)) == joined
    with pytest.raises(PlanError, match="in one order"):
        check(replace(joined, replicated=False))
    with pytest.raises(ConfigError) as error:
        make([8])
    assert "reshard" in error.value.change
