"""Skrull's own fitted forms: worked examples and printed numbers."""

from papers import skrull_forms as skrull

from furlong.plan.plan import Place


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
