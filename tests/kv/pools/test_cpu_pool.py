"""The host pool's memory: slabs that are reused, and what happens without pinned memory."""

import logging

import pytest
import torch

from furlong.kv.pools import CpuPool, pinned_memory

CPU = torch.device("cpu")


def test_memory_is_reused():
    pool = CpuPool(CPU)
    for _ in range(10):
        handles = [pool.put(torch.ones(2**20)) for _ in range(10)]
        for handle in handles:
            pool.drop(handle)
    assert sum(memory.numel() for memory, _ in pool.slabs) == 2**26
    pool.close()


def test_a_large_tensor_gets_a_slab_with_little_waste():
    pool = CpuPool(CPU)
    size = 33 * 2**20
    for _ in range(14):
        pool._take_place(size)
    assert [memory.numel() for memory, _ in pool.slabs] == [2**28, 2**28]
    assert 1.2 * 14 * size > 2 * 2**28


def test_what_is_reserved_is_taken_once_and_suffices(monkeypatch):
    """59 MB records, 41 GiB of them, as 7B has of 128K tokens."""
    pinned = []

    def pin(num_bytes):
        pinned.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr("furlong.kv.pools.pinned_memory", pin)
    monkeypatch.setattr("furlong.kv.pools.StreamLane", lambda device: None)
    pool, record = CpuPool(torch.device("cuda")), 58_720_256 + 917_504
    total = 41 * 2**30 // record * record
    for _ in range(2):
        pool.reserve(total, None)
    assert total < sum(pinned) < 1.04 * total and max(pinned) == 2**32
    slabs = len(pinned)
    for _ in range(total // record):
        pool._take_place(record)
    assert len(pinned) == slabs == len(pool.slabs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory exists here")
def test_refused_pinned_memory_is_told_once_and_done_without(caplog, monkeypatch):
    monkeypatch.setattr("furlong.kv.pools.StreamLane", lambda device: None)
    pool = CpuPool(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pool._take_place(2**26)
        pool._take_place(2**30)
    (record,) = caplog.records
    assert "refuses 256 MiB of pinned CPU memory" in record.getMessage()
    assert "pageable memory is used instead" in record.getMessage()
    assert pinned_memory(1) is None
