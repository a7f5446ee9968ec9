"""FPDT's double buffer: thresholds, slowdowns, and the clock of two buffers."""

import pytest

from furlong.cost.streaming import (
    double_buffered_s,
    fpdt_forward_slowdown,
    smallest_hidden_backward_chunk_tokens,
    smallest_hidden_chunk_tokens,
)


@pytest.mark.parametrize(
    ("tera_flops", "giga_bytes", "full", "grouped"),
    [
        (200, 25, 8_000, 2_000),
        (200, 12.5, 16_000, 4_000),
        (200, 6.25, 32_000, 8_000),
        (312, 6.25, 49_920, 12_480),
        (600, 50, 12_000, 3_000),
        (600, 25, 24_000, 6_000),
        (600, 12.5, 48_000, 12_000),
        (600, 400, 1_500, 375),
    ],
)
def test_smallest_chunk_that_hides_its_loads(tera_flops, giga_bytes, full, grouped):
    rate, link = tera_flops * 1e12, giga_bytes * 1e9
    assert smallest_hidden_chunk_tokens(rate, link) == full
    assert smallest_hidden_chunk_tokens(rate, link, kv_share=0.25) == grouped
    assert smallest_hidden_backward_chunk_tokens(rate, link) == full


@pytest.mark.parametrize(
    ("ratio", "slowdown"),
    [(0.0, 1.0), (0.5, 1.0), (0.9, 1.075), (1, 1.094), (1.5, 1.516), (2, 1.938), (4, 3.625)],
)
def test_slowdown_of_a_forward_over_eight_chunks(ratio, slowdown):
    assert fpdt_forward_slowdown(8, ratio) == pytest.approx(slowdown, abs=5e-4)


def test_twice_the_threshold_never_waits():
    for num_chunks in range(1, 20):
        assert fpdt_forward_slowdown(num_chunks, 0.5) == 1.0


def test_two_buffers():
    assert double_buffered_s([], []) == 0
    assert double_buffered_s([1, 1, 1], [0, 0, 0]) == 3
    assert double_buffered_s([2, 2, 2], [1, 1, 1]) == 7  # the first load, then compute
    assert double_buffered_s([1, 1, 1], [2, 2, 2]) == 7  # loads, then the last block
    # block 2 may only load once block 0 has computed and freed its buffer
    assert double_buffered_s([5, 1, 1], [1, 1, 3]) == 10
