"""K,V die right after their last reader: by hand, and against the definition on random plans."""

import pytest
from helpers.counted_work import LINEAR, lines_run
from helpers.plan_texts import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.plan.passes import kv_frees
from furlong.plan.plan import Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.plan.text import parse_chunk
from furlong.planners.options import ChunkOptions


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # chunk 2 has no reader: its K,V live in its graph only
        (
            "F0.0 input, F1.0 input, F2.0 all, K0.0, K1.0, B2.0, R1.0, B1.0, R0.0, B0.0",
            {"F2.0 all": ((0, 0), (1, 0)), "B1.0": ((1, 0),), "B0.0": ((0, 0),)},
        ),
        # cells without a Backward die after their last reader
        (
            "F0.0 kv, F1.0 kv, F2.0 kv, R2.0, B2.0 a2, R0.0, B0.0 a2",
            {"B2.0 a2": ((1, 0),), "B0.0 a2": ((0, 0),)},
        ),
    ],
)
def test_kv_die_right_after_their_last_reader(texts, expected):
    frees = kv_frees(plan_of("0:0-1; 0:1-2; 0:2-3", texts), 0)
    found = zip(texts.split(", "), frees, strict=True)
    assert {text: tuple(sorted(cells)) for text, cells in found if cells} == expected


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


@settings(max_examples=80)
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
