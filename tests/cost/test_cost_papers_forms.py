"""The papers' own fitted forms: worked examples and printed numbers."""

import pytest

from furlong.cost import infinipipe, skrull
from furlong.plan.values import Place

# InfiniPipe: two stages of two layers, chunks of equal tokens. Act 16, a layer's input 1, dK,dV 4.
LAYOUT = infinipipe.Layout(
    sp_size=1, pp_size=2, num_layers=4, hidden_size=1, kv_size=1, element_bytes=1
)


def example_bytes(recompute_layers, continues):
    return infinipipe.chunk_bytes(
        LAYOUT, 1, token_bytes=32, recompute_layers=recompute_layers, continues=continues
    )


def test_infinipipes_worked_example():
    """M = 20 - 5 c for a chunk that later ones need, 16 - 7 c for a tail or batched one."""
    assert [example_bytes(c, True) for c in range(3)] == [20, 15, 10]
    assert [example_bytes(c, False) for c in range(3)] == [16, 9, 2]


def test_infinipipes_windows():
    assert [infinipipe.window_chunks(LAYOUT, p, 3, 4) for p in (0, 1)] == [4, 3]
    four = infinipipe.Layout(sp_size=8, pp_size=4, num_layers=40, hidden_size=1, kv_size=1)
    assert [infinipipe.window_chunks(four, p, 2, 100) for p in range(4)] == [5, 4, 3, 2]


def test_infinipipes_chunk_time():
    fit = infinipipe.TimeFit(quadratic_s=1.0, linear_s=16.0, constant_s=2.0)
    # a slice behind its context costs the difference of two prefixes; slices of a mesh cost alike
    parts = [infinipipe.compute_s(fit, LAYOUT, c, (), s) for c, s in ((0, 10), (10, 22))]
    whole = infinipipe.compute_s(fit, LAYOUT, 0, (32,))
    assert sum(parts) - 1 == whole == (32**2 + 16 * 32) / 2 + 1
    hybrid = infinipipe.compute_s(fit, LAYOUT, 10, (3, 4), 5)
    assert hybrid == (15**2 - 10**2 + 9 + 16 + 16 * 12) / 2 + 1


def test_infinipipes_communication_and_recompute():
    grouped = infinipipe.Layout(sp_size=4, pp_size=2, num_layers=8, hidden_size=64, kv_size=16)
    expected = (2 * 80 * 1000 / 4 / 1e6 + 2 * 1e-3) * 8
    assert infinipipe.all_to_all_s(grouped, 1000, 1e6, 1e-3) == pytest.approx(expected)
    assert infinipipe.recompute_s(grouped, 1, 12.0) == 3.0
    logits = infinipipe.activation_bytes(grouped, 10, token_bytes=80, logits_bytes=8)
    assert logits == 10 * (80 / 8 + 8 / 4)


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
    lens, both = (4, 5, 5, 6, 9), Place(0, 2)
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
