"""FPDT's double buffer: thresholds, slowdowns, and the clock of two buffers."""

import dataclasses

import pytest
from papers import fpdt_chunks
from papers.fpdt_chunks import (
    choose_fpdt_chunk,
    fpdt_forward_slowdown,
    num_kv_loads,
    predicted_stalls,
    smallest_hidden_backward_chunk_tokens,
    smallest_hidden_chunk_tokens,
    smallest_hidden_relay_chunk_tokens,
)

from furlong.cost.machine import hardware
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape


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


def test_loads_of_a_forward():
    assert num_kv_loads(8) == 27
    for num_chunks in range(1, 20):
        fetched = sum(
            fpdt_chunks._fetches(row, block, num_chunks)
            for row in range(num_chunks)
            for block in range(row + 1)
        )
        assert num_kv_loads(num_chunks) == fetched


def test_stalls_of_each_row():
    # twice a full block: row 2 waits half for chunk 0 (loaded beside the half block of row 1's
    # diagonal) and a whole one for chunk 1; its diagonal is there
    assert predicted_stalls(1, 2.0) == [0.0]
    assert predicted_stalls(3, 2.0) == [0.0, 0.0, 1.5 + 1.0]
    assert predicted_stalls(8, 0.5) == [0.0] * 8
    for num_chunks, ratio in ((2, 3.0), (5, 0.8), (8, 4.0)):
        waited = sum(predicted_stalls(num_chunks, ratio))
        assert fpdt_forward_slowdown(num_chunks, ratio) == pytest.approx(
            1 + waited / (num_chunks**2 / 2)
        )


def test_a_walk_of_kv_inside_spares_the_backward_loads_of_grouped_heads():
    # 10 c^2 d of work against 2 (2 + 4) c g d bytes
    assert smallest_hidden_relay_chunk_tokens(200e12, 25e9) == pytest.approx(9_600)
    assert smallest_hidden_relay_chunk_tokens(200e12, 25e9, kv_share=0.25) == pytest.approx(2_400)
    assert smallest_hidden_backward_chunk_tokens(200e12, 25e9) == 8_000


def test_twice_the_threshold_in_seconds():
    # blocks of 2 c0 tokens: the load of one chunk takes half of a full block
    rate, link, width = 200e12, 25e9, 4096
    tokens = 2 * smallest_hidden_chunk_tokens(rate, link)
    load_s, block_s = 2 * tokens * width * 2 / link, 4 * tokens**2 * width / rate
    assert load_s / block_s == pytest.approx(0.5)
    assert predicted_stalls(8, load_s / block_s) == [0.0] * 8


def model_of(name):
    return CostModel(model_shape(name), hardware("H100"))


def with_rates(model, *, attention_flops_per_s, link_bytes_per_s):
    device = model.hardware
    host = dataclasses.replace(device.links.host, bytes_per_s=link_bytes_per_s)
    best = attention_flops_per_s / device.peak_flops_per_s
    rates = {
        name: dataclasses.replace(getattr(device, name), best=best)
        for name in ("attention_forward", "attention_backward")
    }
    links = dataclasses.replace(device.links, host=host)
    return dataclasses.replace(model, hardware=dataclasses.replace(device, links=links, **rates))


@pytest.mark.parametrize(
    ("tera_flops", "giga_bytes", "full", "grouped"),
    # twice c0 of 8K, 32K, 12K and 1.5K tokens, and a quarter of that, to the next power of two
    [
        (200, 25, 2**14, 2**12),
        (200, 6.25, 2**16, 2**14),
        (600, 50, 2**15, 2**13),
        (600, 400, 2**12, 2**10),
    ],
)
def test_chunk_that_hides_its_loads(tera_flops, giga_bytes, full, grouped):
    rates = {"attention_flops_per_s": tera_flops * 1e12, "link_bytes_per_s": giga_bytes * 1e9}
    assert choose_fpdt_chunk(with_rates(model_of("Llama-2-7B"), **rates)) == full
    for sp_size in (1, 2, 8):
        model = with_rates(model_of("Llama-3-8B"), **rates)
        assert choose_fpdt_chunk(model, sp_size) == grouped
    # past 8 ranks a process holds one whole K,V head for ever fewer query heads
    assert choose_fpdt_chunk(with_rates(model_of("Llama-3-8B"), **rates), 32) == full
