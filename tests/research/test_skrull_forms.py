"""Skrull's own fitted forms: worked examples, printed numbers, and how good its heuristics are."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers import skrull_forms as skrull
from papers.skrull import skrull_h100
from papers.whole_sequences import schedule_skrull

from furlong.plan.plan import Place

pytestmark = pytest.mark.nightly


def test_skrulls_flops():
    assert skrull.quadratic_from_tokens(896, 128) == 4608
    assert skrull.quadratic_from_tokens(3584, 512) == 18432
    ratio = skrull.flops(32768, 896, 128) / skrull.flops(4096, 896, 128)
    assert round(ratio, 2) == 34.35


def test_skrulls_worked_example_of_loads():
    """C=15, N=2, S=[4,5,5,6,9], h=8, h_kv=2; ret = [-1,-1,r0,r1,-1]. By hand, Eq. 13 is
    1344 S + 32 S^2: 5888, 7520, 7520, 9216 and 14688; half of the three distributed ones is 14048.
    """
    fit = skrull.TimeFit(seconds_per_flop=1.0, seconds_per_byte=0.0)
    assert [skrull.flops(s, 8, 2) for s in (4, 5, 6, 9)] == [5888, 7520, 9216, 14688]
    shared = (4, 5, 9)
    assert skrull.rank_s(fit, (5,), shared, 2, 8, 2) == 14048 + 7520
    assert skrull.rank_s(fit, (6,), shared, 2, 8, 2) == 14048 + 9216
    both, lens = Place(0, 2), (4, 5, 5, 6, 9)
    places = (both, both, Place(0, 1), Place(1, 1), both)
    assert skrull.micro_batch_s(fit, lens, places, 2, 8, 2) == 14048 + 9216


def test_skrulls_overlap_and_bucket():
    fit = skrull.TimeFit(
        1.0, seconds_per_byte=1e6, transfer_constant_s=5.0, fixed_s=2.0, threshold_bytes=10
    )
    assert skrull.communication_s(fit, 0) == 0
    assert skrull.communication_s(fit, 9) == 2
    assert skrull.communication_s(fit, 10) == 1e7 + 5
    # a distributed token moves 8 bytes in 2 s, behind 1000 local ones; then half of its 1376 FLOPs
    assert skrull.volume_bytes(1, 2) == 8
    assert skrull.rank_s(fit, (1000,), (1,), 2, 8, 2) == 1344 * 1000 + 32 * 1000**2 + 688
    # two move 16 bytes in 16,000,005 s, and 100 local ones (454,400 FLOPs) hide behind that
    assert skrull.rank_s(fit, (100,), (2,), 2, 8, 2) == 16_000_005 + 1408
    assert skrull.bucket_tokens(80e9, 20e9, 3e6) == 20_000
    assert skrull.bucket_tokens(10e9, 20e9, 3e6) == 0


def test_skrulls_links_are_its_table_3():
    links = skrull_h100().links
    for name in skrull.TABLE_3_US:
        fit = skrull.table_3_fit(name)
        for mb, us in zip(skrull.TABLE_3_MB, skrull.TABLE_3_US[name], strict=True):
            if mb < 16:
                continue
            ours = skrull.communication_s(fit, mb * 1e6) * 1e6
            assert ours == pytest.approx(us, rel=0.12), (name, mb)
            assert links.collective_s(name, mb * 1e6, 8) * 1e6 == pytest.approx(ours, rel=0.01)


def test_skrulls_fit_is_the_known_one():
    known = {"all_gather": (6.35, 92), "all_to_all": (6.68, 60), "reduce_scatter": (6.11, 77),
             "all_reduce": (11.80, 117)}  # fmt: skip
    for name, (us_per_mb, us) in known.items():
        fit = skrull.table_3_fit(name)
        assert fit.seconds_per_byte * 1e12 == pytest.approx(us_per_mb, abs=0.02)
        assert fit.transfer_constant_s * 1e6 == pytest.approx(us, abs=2)


@settings(max_examples=30)
@given(st.lists(st.integers(5, 60), min_size=2, max_size=6), st.integers(1, 2))
def test_the_heuristics_stay_near_the_best_of_all_schedules(lens, dp_size):
    """Eqs. 8 and 11 without communication: then nothing is faster than to share all sequences."""
    work = [skrull.flops(n, 8, 2) for n in lens]
    best = min(
        max(sum(w for w, own in zip(work, dealt, strict=True) if own == r) for r in range(dp_size))
        for dealt in product(range(dp_size), repeat=len(lens))
    ) / 2  # fmt: skip
    fit = skrull.TimeFit(seconds_per_flop=1.0)
    theirs = max(
        sum(
            skrull.micro_batch_s(
                fit, [s.num_tokens for s in b.slices], [s.place for s in b.slices], 2, 8, 2
            )
            for b in own
        )
        for own in schedule_skrull(lens, work, dp_size=dp_size, sp_size=2, bucket_tokens=60)
    )
    # what is local could have been shared by two ranks, and replicas of equal work are within
    # 4/3 - 1/(3 dp) of the best
    assert best * (1 - 1e-6) <= theirs <= 2 * (4 / 3 - 1 / (3 * dp_size)) * best * (1 + 1e-6)
