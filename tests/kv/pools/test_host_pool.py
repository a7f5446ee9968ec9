"""The host pool's memory: slabs that are reused, and what happens without pinned memory."""

import logging

import pytest
import torch

from furlong.kv.pools.host import HostPool, _HostPlaces, pinned_memory

CPU = torch.device("cpu")


def test_memory_is_reused():
    pool = HostPool(CPU)
    for _ in range(10):
        handles = [pool.put(torch.ones(2**20)) for _ in range(10)]
        for handle in handles:
            pool.drop(handle)
    assert sum(memory.numel() for memory, _ in pool._places.slabs) == 2**26
    pool.close()


def test_a_large_tensor_gets_a_slab_with_little_waste():
    places = _HostPlaces(CPU)
    size = 33 * 2**20
    for _ in range(14):
        places.take(size)
    assert [memory.numel() for memory, _ in places.slabs] == [2**28, 2**28]
    assert 1.2 * 14 * size > 2 * 2**28


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory exists here")
def test_refused_pinned_memory_is_told_once_and_done_without(caplog):
    places = _HostPlaces(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            places.take(2**26)
        places.take(2**30)
    (record,) = caplog.records
    assert "refuses 256 MiB of pinned host memory" in record.getMessage()
    assert "pageable memory is used instead" in record.getMessage()
    assert pinned_memory(1) is None
