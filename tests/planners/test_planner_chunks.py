"""Groups of chunks: cut, packed, dealt, placed; and how many tokens a device can hold at a time."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from helpers.counted_work import LINEAR, lines_run
from helpers.shapes import with_windows
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.skrull_forms import flops

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError, DataError, PlanError
from furlong.plan.check import check
from furlong.plan.plan import Chunk, Place, Slice
from furlong.plan.text import format_chunk
from furlong.planners.chunks import (
    by_cost,
    chunk_by_chunk,
    fitting_tokens,
    group_chunks,
    pack,
    peak_bytes,
    place_by_load,
    recompute_choices,
    sequence_work,
)
from furlong.planners.options import ChunkOptions

K = 1024
GIB = 2**30
MODEL = CostModel(model_shape("Llama-3-8B"), Machine.named("A100-80"), Training(zero_stage=3))


def texts(seq_lens, **options):
    groups = group_chunks(seq_lens, ChunkOptions(**options))
    return [" | ".join(map(format_chunk, group)) for group in groups]


@pytest.mark.parametrize(
    ("seq_lens", "options", "expected"),
    [
        # a tail shares its chunk with whole short sequences, or does not
        ([10, 2, 3, 1], {"size": 4}, ["0:0-4 | 0:4-8 | 0:8-10 1:0-2", "2:0-3 3:0-1"]),
        ([10, 2, 3, 1], {"size": 4, "hybrid": False},
         ["0:0-4 | 0:4-8 | 0:8-10", "2:0-3 3:0-1", "1:0-2"]),
        # the group of most tokens first, equal ones in their order
        ([3, 9, 4, 12, 4], {"size": 4, "hybrid": False},
         ["3:0-4 | 3:4-8 | 3:8-12", "1:0-4 | 1:4-8 | 1:8-9", "2:0-4", "4:0-4", "0:0-3"]),
        # ChunkFlow's Figures 6 and 7
        ([1, 1, 2, 4], {"size": 2, "hybrid": False}, ["3:0-2 | 3:2-4", "2:0-2", "0:0-1 1:0-1"]),
        ([1, 1, 2, 4], {"size": 4}, ["3:0-4", "2:0-2 0:0-1 1:0-1"]),
    ],
)  # fmt: skip
def test_groups_by_hand(seq_lens, options, expected):
    assert texts(seq_lens, **options) == expected


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda: texts([]), "no sequences"),
        (lambda: texts([3, 0]), "sequence 1 has 0"),
        *((lambda n=n: pack({7: n}, 4), f"sequence 7 has {n} tokens") for n in (0, -1, 5)),
    ],
)
def test_what_cannot_be_grouped_is_refused(made, given):
    with pytest.raises(DataError, match=given):
        made()


def number(seq_lens):
    return dict(enumerate(seq_lens))


@st.composite
def problems(draw):
    size = draw(st.integers(1, 60))
    lens = draw(st.lists(st.integers(1, size), max_size=30))
    taken = draw(st.lists(st.integers(1, size), max_size=4))
    return size, lens, taken


def naive_pack(seq_lens, size, taken):
    """Best fit decreasing by looking at every bin; only the free spaces are comparable."""
    free = [size - tokens for tokens in taken]
    for seq_len in sorted(seq_lens, reverse=True):
        fitting = [space for space in free if space >= seq_len]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else size) - seq_len)
    return sorted(free)


@settings(max_examples=200)
@given(problems())
def test_bins_hold_every_sequence_once_and_no_more_than_fits(problem):
    size, lens, taken = problem
    bins = pack(number(lens), size, taken=taken)
    assert sorted(seq_id for seq_ids in bins for seq_id in seq_ids) == list(range(len(lens)))
    loads = [sum(lens[seq_id] for seq_id in seq_ids) for seq_ids in bins]
    for index, tokens in enumerate(taken):
        loads[index] += tokens
    assert all(0 < load <= size for load in loads)
    assert sorted(size - load for load in loads) == naive_pack(lens, size, taken)


def test_the_fullest_bin_that_has_room_is_filled():
    assert pack(number([6, 3, 2]), 8) == [[0, 2], [1]]


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_the_work_of_packing_grows_like_the_number_of_sequences(size):
    draw = random.Random(0)
    work = []
    for num_sequences in (2000, 4000):
        seq_lens = number([draw.randint(1, size) for _ in range(num_sequences)])
        work.append(lines_run(lambda seq_lens=seq_lens: pack(seq_lens, size)))
    assert work[0] > 2000 and work[1] < LINEAR * work[0]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), max_size=7), st.integers(0, 3))
def test_the_slowest_replica_is_within_four_thirds_of_the_best(costs, dp_size):
    if not 1 <= dp_size <= len(costs):
        with pytest.raises(ConfigError, match=f"dp {dp_size} for a global batch"):
            by_cost(costs, dp_size)
        return
    replicas = by_cost(costs, dp_size)
    assert len(replicas) == dp_size and all(replicas)
    assert sorted(i for own in replicas for i in own) == list(range(len(costs)))
    best = min(
        max(sum(c for c, d in zip(costs, dealt, strict=True) if d == r) for r in range(dp_size))
        for dealt in product(range(dp_size), repeat=len(costs))
    )
    slowest = max(sum(costs[i] for i in own) for own in replicas)
    assert best <= slowest <= (4 / 3 - 1 / (3 * dp_size)) * best


def test_work_counts_attention_within_windows():
    shape = model_shape("Qwen2.5-0.5B")
    lens = [32768, *[4096] * 8]
    matrices = 24 * shape.layers[0].matrices + shape.embedding_parameters
    scores = 2 * 24 * shape.q_size  # two products; of n^2 pairs a mask leaves half and the diagonal
    work = sequence_work(lens, shape)
    assert work == [2 * matrices * n + scores * n * (n + 1) for n in lens]
    # as many tokens in the long one as in all short ones, and more than twice the work
    assert work[0] > 2 * sum(work[1:]) and len(by_cost(work, 3)[0]) == 1
    windowed = with_windows(shape, (1024,) * 12 + (None,) * 12)
    unseen = sum(range(32768 - 1024 + 1))
    assert work[0] - sequence_work([32768], windowed)[0] == 12 * 4 * shape.q_size * unseen


FIRST, SECOND, BOTH = Place(0, 1), Place(1, 1), Place(0, 2)


def work_of(seq_lens):
    return [flops(seq_len, 8, 2) for seq_len in seq_lens]


def place(seq_lens, bucket_tokens, sp_size):
    work = work_of(seq_lens)
    return place_by_load(seq_lens, work, bucket_tokens=bucket_tokens, sp_size=sp_size)


@pytest.mark.parametrize(
    ("lens", "bucket_tokens", "places"),
    [
        ([4, 5, 5, 6, 9], 15, [BOTH, BOTH, FIRST, SECOND, BOTH]),  # two are rolled back
        ([2, 3, 4, 5, 6, 12], 20, [FIRST, SECOND] * 3),
        ([0, 0], 0, [FIRST] * 2),
    ],
)
def test_places_by_hand(lens, bucket_tokens, places):
    assert place(lens, bucket_tokens, 2) == places


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=14), st.integers(1, 60), st.integers(1, 8))
def test_places_are_found_exactly_where_all_tokens_fit(seq_lens, bucket_tokens, sp_size):
    places = place(seq_lens, bucket_tokens, sp_size)
    assert (places is not None) == (sum(seq_lens) <= sp_size * bucket_tokens)
    for rank in range(sp_size if places else 0):
        own = zip(seq_lens, places, strict=True)
        held = sum(Fraction(n, p.size) for n, p in own if p.first <= rank < p.stop)
        assert held <= bucket_tokens


@pytest.mark.parametrize(
    ("layers", "budget", "dp_size", "sp_size"),
    [(0, 40 * GIB, 2, 8), (0, 70 * GIB, 8, 1), (8, 40 * GIB, 8, 1), (32, 70 * GIB, 2, 8)],
)
def test_one_token_more_does_not_fit(layers, budget, dp_size, sp_size):
    """The checker of plans agrees for sharded tokens; local ones need no more."""
    sizes = {"sp_size": sp_size, "recompute_layers": layers}
    tokens = fitting_tokens(MODEL.memory(budget), dp_size=dp_size, **sizes)

    def check_on(size, num_tokens):
        """Each device holds so many tokens at a time, of slices on `size` processes each, twice."""
        num_places = sp_size // size
        lens = [num_tokens * size] * num_places * dp_size * 2
        pieces = [Slice(i, 0, n, Place(i % num_places * size, size)) for i, n in enumerate(lens)]
        batches = [tuple(pieces[i : i + num_places]) for i in range(0, len(lens), num_places)]
        chunks = [Chunk(own) for own in batches]
        replicas = [chunks[i : i + 2] for i in range(0, len(chunks), 2)]
        plan = chunk_by_chunk(lens, replicas, num_layers=32, **sizes)
        check(replace(plan, regathers=True), MODEL.memory(budget))

    check_on(sp_size, tokens)
    check_on(1, tokens)
    with pytest.raises(PlanError, match="memory stays within the budget"):
        check_on(sp_size, tokens + 1)


def test_the_only_micro_batch_of_a_step_fits_as_well():
    """It adds its gradients up at once, beside which the next layer makes its own."""
    model = replace(MODEL, training=Training(zero_stage=1, gathers=True, lora=Lora(rank=16)))
    memory, layers = model.memory(30 * GIB), {"num_layers": 32, "recompute_layers": 8}
    tokens = 4 * fitting_tokens(memory, dp_size=1, sp_size=4, recompute_layers=8)
    for count in (1, 2):
        chunks = [Chunk((Slice(i, 0, tokens, Place(0, 4)),)) for i in range(count)]
        check(chunk_by_chunk([tokens] * count, [chunks], sp_size=4, **layers), memory)


def test_recomputed_layers_buy_tokens():
    layout = {"dp_size": 4, "sp_size": 8}
    tokens = [
        fitting_tokens(MODEL.memory(70 * GIB), recompute_layers=n, **layout) for n in range(33)
    ]
    # not the first one: its graph is there again while its backward runs, and so is the loss
    assert tokens[1:] == sorted(tokens[1:]) and tokens[32] > 4 * tokens[0] > 0
    small = [peak_bytes(MODEL.memory(), 4 * K, recompute_layers=n, **layout) for n in (0, 16, 32)]
    assert small == sorted(small, reverse=True)
    assert fitting_tokens(MODEL.memory(GIB), dp_size=1, sp_size=1) == 0  # beside the state
    assert recompute_choices(32) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert (recompute_choices(2), recompute_choices(1)) == ([0, 1, 2], [0, 1])
