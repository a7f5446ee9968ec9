"""FPDT's double buffer: the chunks that hide their loads."""

import dataclasses

import pytest
from papers.fpdt_chunks import (
    choose_fpdt_chunk,
    smallest_hidden_chunk_tokens,
    smallest_hidden_relay_chunk_tokens,
)

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape

pytestmark = pytest.mark.nightly


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


def test_a_walk_of_kv_inside_spares_the_backward_loads_of_grouped_heads():
    # 10 c^2 d of work against 2 (2 + 4) c g d bytes
    assert smallest_hidden_relay_chunk_tokens(200e12, 25e9) == pytest.approx(9_600)
    assert smallest_hidden_relay_chunk_tokens(200e12, 25e9, kv_share=0.25) == pytest.approx(2_400)


def model_of(name):
    return CostModel(model_shape(name), Machine.named("H100"))


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
