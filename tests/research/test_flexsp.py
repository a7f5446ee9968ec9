"""Groups of different sizes, disjoint: whole, within memory, and never worse than equal groups."""

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.fits import fit
from papers.published import flexsp
from papers.published.flexsp import plan_flexsp
from papers.published.hybrid_cp import plan_hybrid_cp
from papers.whole_sequences import plan_ulysses, with_zero_3

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.planners.places import PoolBatch, Setting
from furlong.simulate.clock import time_actions

pytestmark = pytest.mark.nightly

K = 1024
MODEL = with_zero_3(CostModel(model_shape("GPT-7B"), Machine.named("A100-80")))


def seconds(plan):
    return time_actions(plan, MODEL.costs(plan)).duration_s


def sizes_of(plan):
    return {piece.seq_id: piece.place.size for chunk in plan.chunks for piece in chunk.slices}


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 48 * K), min_size=1, max_size=20),
    st.sampled_from((8, 12, 16, 32)),
    st.sampled_from((None, 8)),
)
def test_any_batch_is_divided_over_disjoint_places_and_fits(seq_lens, num_devices, layers):
    plan = plan_flexsp(seq_lens, MODEL, pool_size=num_devices, recompute_layers=layers)
    fit(plan, MODEL)
    assert (plan.sp_size, len(plan.actions)) == (num_devices, 1)
    for chunk in plan.chunks:
        places = {piece.place for piece in chunk.slices}
        processes = [p for place in places for p in range(place.first, place.stop)]
        assert len(processes) == len(set(processes))


def test_faster_than_static_groups():
    """FlexSP reports up to 1.33 times DeepSpeed in InfiniPipe's measurements."""
    lens = sample_lengths("wikipedia", 64, 0, max_seq_len=48 * K)
    static = [
        plan_ulysses(lens, MODEL, dp_size=32 // n, sp_size=n, balance="flops") for n in (8, 16, 32)
    ]
    assert seconds(plan_flexsp(lens, MODEL, pool_size=32)) < min(map(seconds, static))


def test_every_division_is_tried():
    """Binary partitions: 2, 4, 10, 36, 202 of 2, 4, 8, 16, 32 devices."""
    for num_devices, count in ((2, 2), (4, 4), (8, 10), (16, 36), (32, 202)):
        table = flexsp._partitions(num_devices)
        assert len(table) == len({tuple(row) for row in table}) == count
        assert {sum(2**e for e in row if e >= 0) for row in table} == {num_devices}
    assert len(flexsp._partitions(256)) == 1828


def test_hybrid_cp_shares_a_sequence_by_its_length():
    """Among the next power of two of length / N devices, for the N whose step is shortest."""
    lens = (*sample_lengths("github", 64, 0, max_seq_len=48 * K), 5, 1)
    plan = plan_hybrid_cp(lens, MODEL, pool_size=32)
    fit(plan, MODEL)
    sizes = sizes_of(plan)
    low = max(n / sizes[i] for i, n in enumerate(lens))
    high = min((2 * n / sizes[i] for i, n in enumerate(lens) if sizes[i] > 1))
    assert len(set(sizes.values())) > 2 and low < high
    steps_s = [hybrid_cp_s(lens, max(lens) / 2 ** (step / 4)) for step in range(21)]
    assert seconds(plan) == pytest.approx(min(steps_s))
    assert hybrid_cp_s(lens, max(lens) / 32) > 1.02 * min(steps_s)
    with pytest.raises(ConfigError, match="on each of 8 devices"):
        plan_hybrid_cp([8192 * K], MODEL, pool_size=8)


def hybrid_cp_s(lens, tokens_per_device):
    """Seconds in one micro-batch: the largest group first, where all its devices are free first."""
    batch = PoolBatch.of(lens, MODEL, 32)
    rates, busy_s, loads = Setting(batch, 0), np.zeros(32), np.zeros((batch.added.shape[2], 32))
    kinds = [max(0, ceil(log2(n / tokens_per_device))) for n in lens]
    for i in sorted(range(len(lens)), key=lambda i: (-kinds[i], -rates.alone_s[i, kinds[i]])):
        size = 2 ** kinds[i]
        first = size * int(busy_s.reshape(-1, size).max(axis=1).argmin())
        busy_s[first : first + size] += rates.alone_s[i, kinds[i]]
        loads[:, first : first + size] += batch.added[i, kinds[i]][:, None]
    return float(rates.seconds(loads).max(axis=1).sum())


def test_refuses_what_no_group_holds():
    with pytest.raises(ConfigError, match="on each of 8 devices"):
        plan_flexsp([8192 * K], MODEL, pool_size=8)
    plain = CostModel(model_shape("GPT-7B"), Machine.named("A100-80"), Training())
    with pytest.raises(ConfigError, match="at most 0 tokens"):
        plan_flexsp([K], plain, pool_size=8)
