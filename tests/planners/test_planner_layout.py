"""Layouts of devices, cuts of layers into stages, places of slices in an sp group."""

from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from helpers.shapes import with_windows
from hypothesis import given
from hypothesis import strategies as st

from furlong.cost.machine import Efficiency, Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.errors import ConfigError
from furlong.plan.plan import Chunk, Layout, Place, Slice
from furlong.planners.chunks import group_chunks, shard_all, shard_long
from furlong.planners.layouts import cut_layers, layouts, mean_attended_keys
from furlong.planners.options import ChunkOptions

SHAPE = model_shape("Llama-3-8B")  # 32 layers, 32 heads


def test_layouts_multiply_to_the_devices():
    found = layouts(8, SHAPE)
    assert {layout.num_devices for layout in found} == {8}
    assert len(found) == len(set(found)) == 10  # 2^3 over three axes
    assert Layout(2, 2, 2) in found


def test_given_sizes_are_kept():
    assert layouts(16, SHAPE, pp=4) == [Layout(4, 1, 4), Layout(2, 2, 4), Layout(1, 4, 4)]
    assert layouts(16, SHAPE, dp=2, sp=8) == [Layout(2, 8, 1)]


def test_an_sp_group_divides_the_heads_and_a_stage_has_a_layer():
    small = model_shape("Qwen2.5-0.5B")  # 14 heads, 24 layers
    found = layouts(64, small)
    assert {layout.sp for layout in found} == {1, 2}
    assert max(layout.pp for layout in found) == 16
    # where the given sizes leave no other, K,V are gathered in larger groups
    assert layouts(64, small, sp=8, pp=8) == layouts(64, small, dp=1, pp=8) == [Layout(1, 8, 8)]


def test_sizes_that_do_not_multiply_show_the_arithmetic():
    with pytest.raises(ConfigError, match=r"dp 2 x sp 2 x pp 3, = 12 devices") as error:
        layouts(8, SHAPE, dp=2, sp=2, pp=3)
    assert "multiply to 8 devices" in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "required", "change"),
    [
        ({"pp": 30}, "at most the model's 24 layers", "set parallel.pp to 24 or less, or auto"),
        (
            {"sp": 2, "pp": 5},
            "multiply to 8 devices",
            "use 10 devices, or remove parallel, of which dp takes all",
        ),
    ],
)
def test_a_refusal_names_the_size_that_is_wrong(sizes, required, change):
    with pytest.raises(ConfigError) as error:
        layouts(8, model_shape("Qwen2.5-0.5B"), **sizes)
    assert required in error.value.required
    assert error.value.change == change


def test_equal_layers_make_equal_stages_but_for_the_head():
    model = CostModel(SHAPE, Machine.named("H100"))
    assert cut_layers(model, 1) == (32,)
    stages = cut_layers(model, 4)
    assert sum(stages) == 32
    # the head is worth 2.4 layers of so short a context, and nothing beside long attention
    assert stages[-1] < min(stages[:-1])
    assert cut_layers(model, 4, mean_keys=1e7) == (8, 8, 8, 8)


@pytest.mark.parametrize(("num_stages", "card"), [(1, "H100"), (2, "H100"), (3, "A100-80")])
def test_no_cut_has_a_faster_slowest_stage(num_stages, card):
    """Where launches and small calls cost nothing: a head of 151,936 words passes more bytes than
    products take, and windows hide most of what their layers would attend."""
    shape, tokens = with_windows(model_shape("Qwen2.5-0.5B"), (None, *[512] * 23)), 2**14
    machine = replace(Machine.named(card), linear=Efficiency(0.6, 0.0), layer_launch_s=0.0)
    machine = replace(machine, attention_forward=Efficiency(0.5, 0.0))
    model = CostModel(shape, replace(machine, attention_backward=Efficiency(0.4, 0.0)))

    def slowest_s(stages):
        chunk = Chunk((Slice(0, 0, tokens),))
        return model.cell_seconds([chunk], stages).sum(axis=(1, 2)).max()

    cuts = combinations(range(1, shape.num_layers), num_stages - 1)
    bounds = [(0, *stops, shape.num_layers) for stops in cuts]
    best_s = min(slowest_s(tuple(b - a for a, b in pairwise(own))) for own in bounds)
    stages = cut_layers(model, num_stages, mean_attended_keys([tokens]))
    assert slowest_s(stages) == pytest.approx(best_s)


def test_mean_attended_keys_is_of_tokens():
    assert mean_attended_keys((3,)) == 2
    assert mean_attended_keys((1, 1, 1)) == 1


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.sampled_from([1, 2, 4]))
def test_short_sequences_stay_local_where_they_balance(seq_lens, sp_size):
    groups = group_chunks(seq_lens, ChunkOptions(size=128))
    placed = shard_long(groups, seq_lens, SHAPE, sp_size)
    for before, after in zip(chain(*groups), chain(*placed), strict=True):
        assert sorted((s.seq_id, s.start, s.stop) for s in before.slices) == sorted(
            (s.seq_id, s.start, s.stop) for s in after.slices
        )
        if sp_size == 1:
            continue
        whole = [s for s in after.slices if s.num_tokens == seq_lens[s.seq_id]]
        assert all(s.place == Place(0, sp_size) for s in after.slices if s not in whole)
        assert {s.place.size for s in whole} <= {1, sp_size}
        held = [0.0] * sp_size
        for s in whole:
            for process in range(s.place.first, s.place.stop):
                held[process] += s.num_tokens / s.place.size
        assert max(held, default=0) <= -(-sum(s.num_tokens for s in whole) // sp_size)


def test_sharding_everything_is_ulysses():
    groups = shard_all(group_chunks((300, 20), ChunkOptions(size=128)), 4)
    assert {s.place for group in groups for chunk in group for s in chunk.slices} == {Place(0, 4)}
