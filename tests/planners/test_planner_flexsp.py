"""Groups of different sizes: whole, within memory, and never worse than equal groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.cost.devices.hardware import hardware
from furlong.cost.lengths import sample_lengths
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.errors import ConfigError
from furlong.planners.chunks.micro_batches import fitting_tokens
from furlong.planners.methods import flexsp
from furlong.planners.methods.flexsp import estimate_flexsp
from furlong.planners.methods.ulysses import plan_ulysses, with_zero_3
from furlong.simulate.clock import time_actions

K = 1024
MODEL = with_zero_3(CostModel(model_shape("GPT-7B"), hardware("A100-80")))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 48 * K), min_size=1, max_size=20),
    st.sampled_from((8, 12, 16, 32)),
    st.sampled_from((None, 8)),
)
def test_any_batch_is_divided_whole_and_fits(seq_lens, num_devices, layers):
    found = estimate_flexsp(seq_lens, MODEL, num_devices=num_devices, recompute_layers=layers)
    tokens = fitting_tokens(
        MODEL,
        MODEL.hardware.budget_bytes,
        dp_size=num_devices,
        sp_size=1,
        recompute_layers=found.recompute_layers,
    )
    ids = [i for groups in found.micro_batches for group in groups for i in group.seq_ids]
    assert sorted(ids) == list(range(len(seq_lens)))
    for groups in found.micro_batches:
        assert sum(group.sp_size for group in groups) <= num_devices
        for group in groups:
            assert sum(seq_lens[i] for i in group.seq_ids) <= tokens * group.sp_size
    slowest = [max(group.seconds for group in groups) for groups in found.micro_batches]
    assert found.step_s == pytest.approx(sum(slowest) + found.reduce_s)


@pytest.mark.parametrize("preset", ["wikipedia", "github"])
def test_faster_than_static_groups(preset):
    """FlexSP reports up to 1.33 times DeepSpeed in InfiniPipe's measurements."""
    lens = sample_lengths(preset, 64, 0, max_seq_len=48 * K)
    found = estimate_flexsp(lens, MODEL, num_devices=32)
    static = []
    for sp_size in (8, 16, 32):
        plan = plan_ulysses(lens, MODEL, dp_size=32 // sp_size, sp_size=sp_size, balance="flops")
        static.append(time_actions(plan, MODEL.costs(plan)).duration_s)
    assert found.step_s < min(static)


def test_a_group_costs_what_its_plan_costs():
    """All devices in one group are static Ulysses."""
    lens = [40 * K, 30 * K]
    seconds = flexsp._group_seconds([[0, 1]], lens, MODEL, 8, 8, 0)
    plan = plan_ulysses(
        lens, MODEL, dp_size=1, sp_size=8, recompute_layers=0, budget_bytes=200 * 2**30
    )
    assert len(plan.chunks) == 1
    predicted = time_actions(plan, MODEL.costs(plan)).duration_s
    assert seconds[0] + flexsp._reduce_s(MODEL, 8) == pytest.approx(predicted)


def test_long_sequences_get_large_groups():
    lens = [40 * K, *[2 * K] * 100]
    found = estimate_flexsp(lens, MODEL, num_devices=32)
    sizes = {i: g.sp_size for groups in found.micro_batches for g in groups for i in g.seq_ids}
    assert sizes[0] == 16
    assert sum(sizes[i] <= 4 for i in range(1, 101)) > 60


def test_every_division_is_tried():
    """Binary partitions: 2, 4, 10, 36, 202 of 2, 4, 8, 16, 32 devices."""
    for num_devices, count in ((2, 2), (4, 4), (8, 10), (16, 36), (32, 202)):
        table = flexsp._partitions(num_devices, num_devices)
        assert len(table) == len({tuple(row) for row in table}) == count
        assert {sum(2**e for e in row if e >= 0) for row in table} == {num_devices}
    assert len(flexsp._partitions(256, 256)) == 1828


def test_groups_divide_the_heads():
    """40 heads: no group of more than 8."""
    table = flexsp._partitions(32, flexsp._largest_power_of_two(40))
    assert table.max() == 3
    model = CostModel(model_shape("GPT-13B"), hardware("A800"), Training(zero_stage=3))
    found = estimate_flexsp([60 * K, *[2 * K] * 20], model, num_devices=32)
    assert max(g.sp_size for groups in found.micro_batches for g in groups) <= 8


def test_refuses_what_no_group_holds():
    with pytest.raises(ConfigError, match="on each of 8 devices"):
        estimate_flexsp([8192 * K], MODEL, num_devices=8)
    plain = CostModel(model_shape("GPT-7B"), hardware("A100-80"), Training())
    with pytest.raises(ConfigError, match="at most 0 tokens"):
        estimate_flexsp([K], plain, num_devices=8)
