"""K,V die right after their last reader: by hand, and against the definition on random plans."""

import pytest
from helpers.counted_work import LINEAR, lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.plan.liveness import kv_frees
from furlong.plan.plan import Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.plan.text import format_action, parse_action, parse_chunk
from furlong.planners.options import ChunkOptions


def one_sequence(num_chunks, texts, stages=(1,)):
    return ChunkPlan(
        seq_lens=(num_chunks,),
        chunks=tuple(parse_chunk(f"0:{i}-{i + 1}") for i in range(num_chunks)),
        stages=stages,
        actions=(tuple(map(parse_action, texts.split(", "))),),
    )


def frees_by_action(plan):
    frees = kv_frees(plan, 0)
    assert len(frees) == len(plan.actions[0])
    return [
        (format_action(action), tuple(sorted(cells)))
        for action, cells in zip(plan.actions[0], frees, strict=True)
        if cells
    ]


def test_kept_kv_die_with_their_own_backward():
    plan = one_sequence(3, "F0.0 kv, F1.0 kv, F2.0 all, B2.0, R1.0, B1.0, R0.0, B0.0")
    # chunk 2 has no reader: its K,V live in its graph only
    assert frees_by_action(plan) == [("B1.0", ((1, 0),)), ("B0.0", ((0, 0),))]


def test_kv_of_cells_that_keep_their_input_die_after_the_last_forward():
    plan = one_sequence(
        3, "F0.0 input, F1.0 input, F2.0 all, K0.0, K1.0, B2.0, R1.0, B1.0, R0.0, B0.0"
    )
    assert frees_by_action(plan) == [
        ("F2.0 all", ((0, 0), (1, 0))),
        ("B1.0", ((1, 0),)),
        ("B0.0", ((0, 0),)),
    ]


def test_evaluation_frees_after_the_last_forward():
    plan = one_sequence(3, "F0.0 input, F1.0 input, F2.0 input")
    assert frees_by_action(plan) == [("F2.0 input", ((0, 0), (1, 0)))]


def test_cells_without_a_backward_die_after_their_last_reader():
    plan = one_sequence(4, "F0.0 kv, F1.0 kv, F2.0 kv, F3.0 kv, R3.0, B3.0 a2, R1.0, B1.0 a2")
    assert frees_by_action(plan) == [("B3.0 a2", ((2, 0),)), ("B1.0 a2", ((0, 0), (1, 0)))]


def test_layer_first_frees_each_stage_by_itself():
    plan = one_sequence(
        2,
        "F0.0 input, F1.0 input, F0.1 input, F1.1 input, K0.1, R1.1, B1.1, R0.1, B0.1, "
        "K0.0, R1.0, B1.0, R0.0, B0.0",
        stages=(1, 1),
    )
    assert frees_by_action(plan) == [
        ("F1.0 input", ((0, 0),)),
        ("F1.1 input", ((0, 1),)),
        ("B0.1", ((0, 1),)),
        ("B0.0", ((0, 0),)),
    ]


def test_a_rebuild_nobody_reads_dies_at_once():
    plan = one_sequence(2, "F0.0 input, F1.0 all, B1.0, K0.0")
    assert frees_by_action(plan) == [("B1.0", ((0, 0),)), ("K0.0", ((0, 0),))]


def naive_frees(plan, rank):
    """The definition: for each producer look at every later action."""
    actions = plan.actions[rank]
    frees = [set() for _ in actions]
    for born, producer in enumerate(actions):
        cell = (producer.chunk, producer.stage)
        if isinstance(producer, Forward) and not plan.continues[producer.chunk]:
            continue
        if not isinstance(producer, (Forward, RebuildKV)):
            continue
        last = born
        for index in range(born + 1, len(actions)):
            action = actions[index]
            if isinstance(action, (Forward, RebuildKV)) and cell == (action.chunk, action.stage):
                break
            own = isinstance(action, (Recompute, Backward)) and action.chunk == producer.chunk
            later = any(
                producer.chunk in group[: group.index(action.chunk)]
                for group in plan.groups.values()
                if action.chunk in group
            )
            if action.stage == producer.stage and (own or later):
                last = index
        frees[last].add(cell)
    return frees


@st.composite
def any_walks(draw):
    """Actions in any order, legal or not: liveness is defined for all."""
    chunks = "0:0-1", "0:1-2", "0:2-3 2:0-1", "1:0-1", "1:1-2"
    stage = st.integers(0, 1)
    others = st.one_of(
        st.builds(RebuildKV, st.sampled_from((0, 1, 3)), stage),
        st.builds(Recompute, st.integers(0, 4), stage),
        st.builds(Backward, st.integers(0, 4), stage),
    )
    forwards = [Forward(c, s, "kv") for c in range(5) for s in range(2)]
    actions = draw(st.permutations(forwards + draw(st.lists(others, max_size=12))))
    return ChunkPlan((3, 2, 1), tuple(map(parse_chunk, chunks)), (1, 1), (tuple(actions),))


@settings(max_examples=200, deadline=None)
@given(any_walks())
def test_liveness_equals_its_definition(plan):
    for action, cells, expected in zip(
        plan.actions[0], kv_frees(plan, 0), naive_frees(plan, 0), strict=True
    ):
        assert len(set(cells)) == len(cells)
        assert set(cells) == expected, action


@pytest.mark.parametrize("keep", ["kv", "input"])
def test_the_work_grows_like_the_length_of_a_group(keep):
    work = []
    for num_tokens in (1000, 2000):
        plan = plan_chunkflow([num_tokens], ChunkOptions(size=4, keep=keep), stages=(1,))
        work.append(lines_run(lambda plan=plan: kv_frees(plan, 0)))
    assert work[0] > 1000 and work[1] < LINEAR * work[0]
