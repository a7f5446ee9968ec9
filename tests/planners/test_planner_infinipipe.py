"""InfiniPipe: layers per diagonal against its worked example, brute force and the memory
simulation; plans within their budgets; its mesh, its packing, and the table of its balance."""

from itertools import product
from random import Random
from statistics import mean, pstdev

import numpy as np
import pytest
from helpers.least_layers import least_layers
from helpers.pipeline_plans import num_pipelines
from helpers.shapes import shape_of_values
from helpers.windows import backward_places, windows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from papers.seq1f1b_plan import plan_seq1f1b
from papers.unit_costs import UnitCosts

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError, DataError
from furlong.plan.plan import Forward
from furlong.plan.text import load_plan, parse_chunk, save_plan
from furlong.planners import infinipipe
from furlong.planners.chunks import shard_all
from furlong.planners.infinipipe import (
    MAX_GROWTH,
    Loads,
    SliceWork,
    choose_layers,
    cut,
    cut_and_pack,
    fit_work,
    in_a_row,
    kinds_of,
    loads_of,
    pack_balanced,
    plan_infinipipe,
)
from furlong.planners.question import DoesNotFitError
from furlong.simulate.clock import time_actions

K = 1024
SMALL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512,
}  # fmt: skip
WINDOWED = SMALL | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}


def of_windows(counts, heights, room, *, act, saved, kv_gradient=0, kv_saved=0, again=0):
    """The paper's linear form (Eq. 19): per chunk `act`, `kv_gradient` more where a later chunk
    reads its K,V, `saved` less per layer, there only `saved - kv_saved`. `again`: what the backward
    at the end of a window holds if it recomputes."""
    number, last = sum(counts), len(heights) - 1
    not_tail = ~np.isin(np.arange(number), np.cumsum(counts) - 1)
    places = np.array(backward_places(counts))
    rows, acting, felt = [], [], []
    for stage, height in enumerate(heights):
        found = windows(counts, len(heights), stage)
        for window, chunk in zip(found, np.argsort(places), strict=False):
            alive = np.isin(np.arange(number), list(window))
            row = np.zeros(number + last)
            row[places + last - stage] = alive * (saved - kv_saved * not_tail)
            rows.append((alive @ (act + kv_gradient * not_tail) - room, row))
            acting.append(places[chunk] + last - stage)
            felt.append(height)
    excess, saved_bytes = zip(*rows, strict=True)
    more = np.full(len(rows), float(again))
    saved_bytes = np.array(saved_bytes)
    ones = np.ones(saved_bytes.shape[1], int)
    return Loads(np.array(excess), saved_bytes, more, np.array(acting), np.array(felt), ones)


def worked(counts, room):
    """16 per chunk, per-layer input 1 and two layers, 4 of dK,dV and 2 a layer of K,V."""
    return of_windows(counts, (2, 2), room, act=16, saved=7, kv_gradient=4, kv_saved=2)


def brute_force(loads):
    """The least sum of layers, by trying all."""
    ways = product(range(max(loads.heights) + 1), repeat=loads.saved_bytes.shape[1])
    return min((sum(layers) for layers in ways if loads.fit(np.array(layers))), default=None)


@pytest.mark.parametrize(
    ("counts", "room", "least"),
    [
        ((3, 1), 72, 0), ((3, 1), 55, 3), ((3, 1), 42, 5), ((3, 1), 30, 8), ((3, 1), 24, 10),
        ((3, 1), 23, None), ((3,), 55, 1), ((3,), 42, 3), ((3,), 30, 6), ((1,), 55, 0),
    ],
)  # fmt: skip
def test_worked_example(counts, room, least):
    loads = worked(counts, room)
    exact, greedy = least_layers(loads), choose_layers(loads)
    assert brute_force(loads) == least == (None if exact is None else exact.sum())
    assert (greedy is None) == (least is None) and (greedy is None or loads.fit(greedy))
    if room == 55 and counts == (3, 1):
        assert (loads.excess_bytes + room).tolist() == [72, 56, 56]
        assert loads.fit(np.array([0, 2, 0, 0, 1]))  # the paper's own solution, C2 = 2 and C5 = 1


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda n: sorted(n, reverse=True)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.floats(0.2, 1.0),
    st.integers(0, 9),
)
def test_least_sum_against_brute_force(counts, heights, share, again):
    if (max(heights) + 1) ** (sum(counts) + len(heights) - 1) > 3000:
        counts, heights = counts[:1], heights[:2]
    room = share * 16 * min(sum(counts), len(heights) - 1 + max(counts))
    bytes_of = {"act": 16, "saved": 7, "kv_gradient": 4, "kv_saved": 2, "again": again}
    loads = of_windows(counts, heights, room, **bytes_of)
    least, greedy = brute_force(loads), choose_layers(loads)
    exact = least_layers(loads)
    assert (None if exact is None else exact.sum()) == least
    assert least is None or loads.least_sum <= least + 1e-9
    assert greedy is None or (loads.fit(greedy) and greedy.sum() >= least)


def small_model(config=SMALL, **training):
    return CostModel(shape_of_values(config), Machine.named("A100-80"), Training(**training))


MODEL = small_model()
GPT = CostModel(model_shape("GPT-13B"), Machine.named("A800"))
lengths = st.lists(st.integers(1, 120), min_size=1, max_size=8) | st.builds(
    lambda n, count: [n] * count, st.integers(40, 120), st.integers(4, 9)
)  # equal ones, whose diagonals are of few kinds
stage_heights = st.sampled_from([(6,), (3, 3), (2, 3, 1)])


def one_pipeline(lens, groups, own, stages, sp_size=1):
    """Of a batch's `own` groups, with nothing recomputed."""
    pipeline = own, [0] * (sum(len(groups[i]) for i in own) + len(stages) - 1)
    return in_a_row(lens, groups, [pipeline], stages, sp_size=sp_size, checked=False)


@settings(max_examples=12)
@example([3], 3, (3, 3), 1, SMALL, Random(3))  # the embedding's gradient is the largest there is
@given(
    lengths, st.integers(1, 5), stage_heights, st.sampled_from([1, 2]),
    st.sampled_from([SMALL, WINDOWED]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_loads_are_what_the_walk_finds(lens, num_slices, stages, sp_size, config, draw):
    """With any layers recomputed, also in two pipelines, one after the other."""
    model = small_model(config, zero_stage=3)
    memory = model.memory(0)  # without room no moment is left out
    groups = shard_all(cut_and_pack(lens, num_slices, SliceWork(1e-3, 1)), sp_size)
    cut = draw.randint(0, len(groups))
    ranges = [own for own in (range(cut), range(cut, len(groups))) if own]
    pipelines, lacking = [], []
    for own in ranges:
        kinds = kinds_of([groups[i] for i in own], len(stages))
        loads = loads_of(one_pipeline(lens, groups, own, stages, sp_size), memory, kinds)
        layers = np.array([draw.randint(0, max(stages)) for _ in loads.saved_bytes[0]])
        lacking.append(loads.lacking_bytes(layers).max())
        pipelines.append((own, layers[kinds].tolist()))
    plan = in_a_row(lens, groups, pipelines, stages, sp_size=sp_size)
    walked = max(max(memory.peak_bytes_of_actions(plan, s)) for s in range(len(stages)))
    # a stage between two pipelines has room for messages of the next one; see _MAX_REPAIRS
    most_tokens = max(chunk.num_tokens for chunk in plan.chunks) / sp_size
    messages = 2 * most_tokens * memory.cell(stages, 0).message * (len(ranges) > 1)
    assert -16 <= walked - max(lacking) <= messages + 16


def budget_between(lens, stages, num_slices, share, sp_size=1):
    """Bytes between what the fullest rank needs with everything and with nothing recomputed."""
    groups = shard_all(cut_and_pack(lens, num_slices, SliceWork(1e-3, 1)), sp_size)
    plan = one_pipeline(lens, groups, range(len(groups)), stages, sp_size)
    loads = loads_of(plan, MODEL.memory(0))
    none, full = (np.full(loads.saved_bytes.shape[1], n) for n in (0, max(stages)))
    high, low = (loads.lacking_bytes(layers).max() for layers in (none, full))
    return int(low + share * (high - low))


@settings(max_examples=12)
@given(lengths, stage_heights, st.floats(0, 1.1), st.sampled_from([1, 2]))
def test_random_batches_and_budgets(lens, stages, share, sp_size):
    budget = budget_between(lens, stages, 3, share)
    try:
        plan = plan_infinipipe(lens, MODEL, budget_bytes=budget, stages=stages, sp_size=sp_size)
    except DoesNotFitError as error:
        # the budget is that of three slices in one pipeline
        assert error.lacking_bytes > 0 and share < 0.2
        return
    memory = MODEL.memory()
    assert all(max(memory.peak_bytes_of_actions(plan, r)) <= budget for r in range(len(stages)))
    assert sum(chunk.num_tokens for chunk in plan.chunks) == sum(lens)
    assert load_plan(save_plan(plan)) == plan


def recomputed_layers(plan):
    return sum(a.recompute_layers for own in plan.actions for a in own if isinstance(a, Forward))


def seconds(plan, model=MODEL):
    return time_actions(plan, model.costs(plan)).duration_s


def test_room_for_everything_recomputes_nothing():
    plan = plan_infinipipe([100, 40, 7], MODEL, stages=(3, 3))
    assert recomputed_layers(plan) == 0 and num_pipelines(plan) == 1
    assert len(plan_infinipipe([1], MODEL, stages=(6,)).chunks) == 1
    with pytest.raises(DataError):
        plan_infinipipe([], MODEL, stages=(6,))
    with pytest.raises(ConfigError, match="take the other plan"):
        plan_infinipipe([100, 40, 7], MODEL, stages=(3, 3), beat_s=seconds(plan))


def test_too_small_a_budget_names_the_rank_and_what_would_be_enough(monkeypatch):
    monkeypatch.setattr(infinipipe, "_MOST_SLICES", 6)
    lens, budget = [4000, 3000, 300], 3 * 2**20
    with pytest.raises(DoesNotFitError, match=r"rank 1 needs .* every layer recomputed") as caught:
        plan_infinipipe(lens, MODEL, stages=(3, 3), budget_bytes=budget)
    assert "which lacks" in caught.value.required and "smaller model" in caught.value.change
    enough = budget + caught.value.lacking_bytes + 16
    plan_infinipipe(lens, MODEL, stages=(3, 3), budget_bytes=enough)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
@pytest.mark.parametrize("stages", [(3, 3), (2, 2, 2)])
def test_the_greedy_is_within_a_hundredth_of_the_integer_program(stages, share, monkeypatch):
    lens = (4000, 3000, 900, 800, 300, 200)
    options = {"budget_bytes": budget_between(lens, stages, 4, share), "stages": stages}
    greedy = plan_infinipipe(lens, MODEL, **options)
    monkeypatch.setattr(infinipipe, "choose_layers", least_layers)
    exact = plan_infinipipe(lens, MODEL, **options)
    assert recomputed_layers(exact) > 0
    assert seconds(greedy) <= 1.01 * seconds(exact)


@pytest.mark.parametrize(
    ("ranges", "layers", "overhead"),
    # the worked example in time: f = 4, b = 8, delta 12, F-hat 2
    [
        ([(0, 2)], [(0, 2, 0, 0, 1)], 12 + 6),
        ([(0, 1), (1, 2)], [(0, 1, 0, 0), (0, 0)], 12 + 2 + 12),
    ],
)
def test_pipelines_run_one_after_the_other(ranges, layers, overhead):
    groups = [
        [parse_chunk(f"0:{start}-{start + 4}") for start in (0, 4, 8)], [parse_chunk("1:0-4")]
    ]  # fmt: skip
    pipelines = [(range(*own), chosen) for own, chosen in zip(ranges, layers, strict=True)]
    plan = in_a_row((12, 4), groups, pipelines, (2, 2))
    assert num_pipelines(plan) == len(ranges)
    assert time_actions(plan, UnitCosts(plan)).duration_s == 12 * 4 + overhead


def sizes(slices):
    return [piece.num_tokens for piece in slices]


EVEN = SliceWork(0, 1)


@pytest.mark.parametrize(
    ("lens", "num_slices", "work", "expected"),
    [
        ([32], 4, SliceWork(1, 16), [[[13], [8], [6], [5]]]),  # bounds 13.17, 20.84, 26.87, 32
        # tails take short sequences, and groups run by their number of chunks
        ([2, 20, 3, 12], 2, EVEN, [[[10], [10]], [[10], [2, 3, 2]]]),
    ],
)
def test_cut_and_packed_by_hand(lens, num_slices, work, expected):
    groups = cut_and_pack(lens, num_slices, work)
    assert [[sizes(chunk.slices) for chunk in group] for group in groups] == expected


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


BEGUN = [(9, 5.0), (4, 20.0)]


@pytest.mark.parametrize(
    ("short", "tails", "work", "most", "growth", "expected"),
    [
        # as printed the threshold falls to 5 + 6 = 11 over the bucket that has no room, and the
        # loop never ends
        ({7: 4}, BEGUN, SliceWork(0, 1.5), (10, 20.0), 1.3, [[], [7]]),
        # beyond its limit it gives way to a new bucket
        ({7: 4}, BEGUN, SliceWork(0, 1.5), (10, 20.0), 1.2, [[], [], [7]]),
        # one is opened where the emptiest lacks room for tokens
        ({0: 6, 1: 5, 2: 5}, [], EVEN, (10, 10), MAX_GROWTH, [[0], [1, 2]]),
        # both tails have room; the second has less work per token
        ({5: 2}, [(4, 8.0), (4, 4.0)], EVEN, (10, 99), MAX_GROWTH, [[], [5]]),
    ],
)
def test_short_sequences_are_packed_by_work_and_tokens(short, tails, work, most, growth, expected):
    tokens, load = most
    behind = pack_balanced(
        short, tails, work, most_tokens=tokens, most_work=load, max_growth=growth
    )
    assert behind == expected


works = st.sampled_from([EVEN, SliceWork(1, 0), SliceWork(1, 16), SliceWork(1e-9, 1e-6)])


@settings(max_examples=100)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(1, 12), works)
def test_every_token_once_one_tail_per_chunk_and_no_chunk_above_the_mesh(lens, num_slices, work):
    groups = shard_all(cut_and_pack(lens, num_slices, work), 2)
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


def test_the_fit_follows_the_cost_model():
    """And equal chunks that are cut by it have equal times."""
    stages = (10,) * 4
    work = fit_work(GPT, 96 * K, 6, stages=stages, sp_size=8)
    groups = shard_all(cut_and_pack([96 * K], 6, work), 8)
    plan = plan_seq1f1b([96 * K], groups, stages=stages, sp_size=8)
    cells = GPT.cell_seconds(plan.chunks, stages, sp_size=8)
    seconds = cells[0].sum(axis=1).tolist()
    assert pstdev(seconds) / mean(seconds) < 0.03
    tokens = [chunk.num_tokens for chunk in plan.chunks]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > 1.5 * tokens[-1]
