"""The planner for one device: legal plans for any lengths and options, and ChunkFlow's rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.chunkflow_plan import plan_chunkflow

from furlong.errors import DataError
from furlong.plan.check import check
from furlong.plan.liveness import kv_frees
from furlong.plan.plan import ON_DEVICE, Backward, Forward, RebuildKV, Recompute, Reduce
from furlong.plan.text import format_action, format_chunk, load_plan, save_plan
from furlong.planners.options import ChunkOptions

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)
options = st.builds(
    ChunkOptions,
    size=st.integers(1, 40),
    num_retained=st.integers(0, 4),
    keep=st.sampled_from(("input", "kv", "attention", "all")),
    hybrid=st.booleans(),
)


def plan(seq_lens, backward=True, **dials):
    return plan_chunkflow(seq_lens, ChunkOptions(**dials), stages=(2,), backward=backward)


def chunk_texts(plan):
    return [format_chunk(chunk) for chunk in plan.chunks]


@settings(max_examples=150, deadline=None)
@given(lengths, options, st.booleans())
def test_any_lengths_and_options_give_a_legal_plan(seq_lens, options, backward):
    plan = plan_chunkflow(seq_lens, options, stages=(3,), backward=backward)
    check(plan)
    check(load_plan(save_plan(plan)))
    tokens = sorted(
        (piece.seq_id, token)
        for chunk in plan.chunks
        for piece in chunk.slices
        for token in range(piece.start, piece.stop)
    )
    assert tokens == [(seq_id, t) for seq_id, n in enumerate(seq_lens) for t in range(n)]
    assert all(chunk.num_tokens <= options.size for chunk in plan.chunks)
    assert all(piece.start == 0 for chunk in plan.chunks for piece in chunk.slices[1:])
    kinds = [type(action) for action in plan.actions[0]]
    assert kinds.count(Forward) == len(plan.chunks)
    assert kinds.count(Backward) == backward * len(plan.chunks)
    assert kinds.count(Reduce) == backward
    if not options.hybrid:
        assert all(plan.kind(index) != "hybrid" for index in range(len(plan.chunks)))
    _reads_only_live_kv(plan)


def _reads_only_live_kv(plan):
    """Replay the plan, freeing K,V where liveness says so."""
    live = set()
    for action, frees in zip(plan.actions[0], kv_frees(plan, 0), strict=True):
        if isinstance(action, Reduce):
            continue
        for seq_id, position in plan.links[action.chunk]:
            assert live.issuperset(plan.groups[seq_id][:position])
        if isinstance(action, (Forward, RebuildKV)) and plan.continues[action.chunk]:
            live.add(action.chunk)
        live.difference_update(chunk for chunk, _ in frees)
    assert not live


@settings(max_examples=60, deadline=None)
@given(lengths, options)
def test_retains_the_last_chunks_of_a_group_only(seq_lens, options):
    plan = plan_chunkflow(seq_lens, options, stages=(3,))
    recomputed = {a.chunk for a in plan.actions[0] if isinstance(a, Recompute)}
    groups = [*plan.groups.values(), *((i,) for i, own in enumerate(plan.links) if not own)]
    for group in groups:
        num_dropped = 0 if options.keep == "all" else max(0, len(group) - options.num_retained)
        assert recomputed.intersection(group) == set(group[:num_dropped])


def test_tail_shares_its_chunk_with_whole_short_sequences():
    hybrid = plan([10, 2, 3, 1], size=4)
    assert chunk_texts(hybrid) == ["0:0-4", "0:4-8", "0:8-10 1:0-2", "2:0-3 3:0-1"]
    assert [hybrid.kind(index) for index in range(4)] == ["split", "split", "hybrid", "packed"]
    apart = plan([10, 2, 3, 1], size=4, hybrid=False)
    assert chunk_texts(apart) == ["0:0-4", "0:4-8", "0:8-10", "2:0-3 3:0-1", "1:0-2"]


def test_longest_group_first():
    assert chunk_texts(plan([3, 9, 4, 12], size=4, hybrid=False)) == [
        *("3:0-4", "3:4-8", "3:8-12"),
        *("1:0-4", "1:4-8", "1:8-9"),
        "2:0-4",
        "0:0-3",
    ]


def test_chunks_of_chunkflow_figure_6():
    # lengths 1, 1, 2, 4 with ChunkSize 2: two standalone chunks and two dependent ones
    chunks = plan([1, 1, 2, 4], size=2, hybrid=False)
    assert chunk_texts(chunks) == ["3:0-2", "3:2-4", "2:0-2", "0:0-1 1:0-1"]
    # with ChunkSize 4 (Fig. 7): 1 + 1 + 2 and 4
    assert chunk_texts(plan([1, 1, 2, 4], size=4)) == ["3:0-4", "2:0-2 0:0-1 1:0-1"]


def test_evaluation_has_forwards_only():
    actions = [format_action(action) for action in plan([5, 2], size=4, backward=False).actions[0]]
    assert actions == ["F0.0 input", "F1.0 input"]


def test_passes_on_tier_and_layers():
    made = plan([5], size=4)
    assert made.tiers == ON_DEVICE
    assert made.stages == (2,)
    assert made.actions[0][-1] == Reduce(0)


@pytest.mark.parametrize(
    ("seq_lens", "given"), [([], "no sequences"), ([3, 0], "sequence 1 has 0")]
)
def test_nothing_to_train_on_is_refused(seq_lens, given):
    with pytest.raises(DataError, match=given):
        plan(seq_lens, size=4)
