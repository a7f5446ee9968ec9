"""InfiniPipe's sequence processor: mesh, tails, packing; the table of its balance."""

from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.infinipipe import packings

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import DataError
from furlong.planners.chunks import shard
from furlong.planners.infinipipe import (
    EQUAL_TOKENS,
    SliceWork,
    cut,
    cut_and_pack,
    fit_work,
    pack_balanced,
)
from furlong.planners.orders import plan_seq1f1b

K = 1024


def sizes(slices):
    return [piece.num_tokens for piece in slices]


def test_the_worked_mesh():
    # bounds 13.17, 20.84, 26.87, 32
    (group,) = cut_and_pack([32], 4, SliceWork(1, 16))
    assert [sizes(chunk.slices) for chunk in group] == [[13], [8], [6], [5]]


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [
        (13 * K, [8 * K, 4 * K, K]),  # the paper's example: beyond 12K two slices and a remainder
        (12 * K, [8 * K, 4 * K]),
        (14 * K, [8 * K, 4 * K, 2 * K]),
        (8 * K + 1, [8 * K, 1]),
        (8 * K, [8 * K]),
    ],
)
def test_longer_sequences_are_cut_by_the_mesh(seq_len, expected):
    slices = cut(3, seq_len, [8 * K, 4 * K, 2 * K])
    assert sizes(slices) == expected
    assert slices[0].start == 0 and slices[-1].stop == seq_len


def test_the_threshold_of_work_only_grows_over_buckets_with_room():
    # as printed it falls to 5 + 6 = 11 over the bucket that has no room, and the loop never ends
    behind = pack_balanced(
        {7: 4},
        [(9, 5.0), (4, 20.0)],
        SliceWork(0, 1.5),
        most_tokens=10,
        most_work=20.0,
        max_growth=1.3,
    )
    assert behind == [[], [7]]


def test_beyond_its_limit_the_threshold_gives_way_to_a_new_bucket():
    behind = pack_balanced(
        {7: 4},
        [(9, 5.0), (4, 20.0)],
        SliceWork(0, 1.5),
        most_tokens=10,
        most_work=20.0,
        max_growth=1.2,
    )
    assert behind == [[], [], [7]]


def test_a_bucket_is_opened_when_the_emptiest_lacks_room_for_tokens():
    behind = pack_balanced({0: 6, 1: 5, 2: 5}, [], SliceWork(0, 1), most_tokens=10, most_work=10)
    assert behind == [[0], [1, 2]]


def test_low_work_per_token_goes_first():
    # both tails have room; the second has less work per token
    behind = pack_balanced(
        {5: 2}, [(4, 8.0), (4, 4.0)], SliceWork(0, 1), most_tokens=10, most_work=99
    )
    assert behind == [[], [5]]


def test_tails_take_short_sequences_and_groups_run_by_their_number_of_chunks():
    groups = cut_and_pack([2, 20, 3, 12], 2, EQUAL_TOKENS)
    assert [[sizes(chunk.slices) for chunk in group] for group in groups] == [
        [[10], [10]], [[10], [2, 3, 2]],
    ]  # fmt: skip


lengths = st.lists(st.integers(1, 200), min_size=1, max_size=30)
works = st.sampled_from([EQUAL_TOKENS, SliceWork(1, 0), SliceWork(1, 16), SliceWork(1e-9, 1e-6)])


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 12), works)
def test_every_token_once_one_tail_per_chunk_and_no_chunk_above_the_mesh(lens, num_slices, work):
    groups = shard(cut_and_pack(lens, num_slices, work), 2)
    chunks = [chunk for group in groups for chunk in group]
    most_tokens = max(max(sizes(chunk.slices)) for chunk in chunks)
    assert all(chunk.num_tokens <= most_tokens for chunk in chunks)
    assert sum(chunk.num_tokens for chunk in chunks) == sum(lens)
    counts = [len(group) for group in groups]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == min(num_slices, max(lens))
    for group in groups:
        assert len({piece.seq_id for piece in (chunk.slices[0] for chunk in group)}) == 1
        assert all(piece.start == 0 for chunk in group for piece in chunk.slices[1:])
        assert all(len(chunk.slices) == 1 for chunk in group[:-1])
    # the planner checks every plan that it returns
    plan_seq1f1b(lens, groups, stages=(1, 1), sp_size=2)


def test_nothing_to_cut_is_refused():
    with pytest.raises(DataError):
        cut_and_pack([], 2, EQUAL_TOKENS)


MODEL = CostModel(model_shape("GPT-13B"), hardware("A800"))


def test_the_fit_follows_the_cost_model():
    stages = (10,) * 4
    work = fit_work(MODEL, 96 * K, 6, stages=stages, sp_size=8)
    groups = shard(cut_and_pack([96 * K], 6, work), 8)
    plan = plan_seq1f1b([96 * K], groups, stages=stages, sp_size=8)
    cells = MODEL.cell_seconds(plan.chunks, stages, sp_size=8)
    seconds = cells[0].sum(axis=1).tolist()
    assert pstdev(seconds) / mean(seconds) < 0.03
    tokens = [chunk.num_tokens for chunk in plan.chunks]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > 1.5 * tokens[-1]


def spread(values):
    return pstdev(values) / mean(values)


@pytest.mark.parametrize("preset", ["github", "commoncrawl"])
@pytest.mark.parametrize(("context", "num_slices"), [(32 * K, 2), (48 * K, 4), (64 * K, 4)])
def test_table_2_balances_tokens(preset, context, num_slices):
    # the paper: relative deviations of time and tokens 5.9 %, 35.2 % by time alone, 6.2 %, 5.5 %
    # by both, in a setting that it does not state. Here that of tokens falls as it says, that of
    # time does not stay (25 to 33 % as printed): chunks of short sequences are full of tokens
    # before their time is up. A threshold that may not grow freely takes some of that back.
    by_time, printed, ours = packings(preset, context, num_slices, with_split=False)
    assert by_time[0] < 0.11 and by_time[1] > 0.23
    assert printed[1] < 0.6 * by_time[1] and ours[1] < 0.6 * by_time[1]
    assert by_time[0] < ours[0] < printed[0] < 0.35
