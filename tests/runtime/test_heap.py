"""What is free in the heap goes back to the system, if it is much."""

from __future__ import annotations

import sys

import pytest
import torch

from furlong.runtime.heap import ProcessHeap
from furlong.runtime.memory import memory_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone tells what is free")
def test_free_memory_goes_back_above_a_bound():
    heap = ProcessHeap(CPU)
    heap.trim(0)
    # 64 KiB each, from the heap; what stays between them keeps it from shrinking by itself
    pairs = [(torch.ones(2**14), torch.ones(2**8)) for _ in range(1024)]
    blocks, stays = (list(tensors) for tensors in zip(*pairs, strict=True))
    del pairs
    before_bytes = memory_bytes(CPU)
    del blocks
    assert heap.free_bytes > 48 * 2**20
    heap.trim(above_bytes=2**40)
    assert memory_bytes(CPU) > before_bytes - 2**23, "below the bound nothing is given back"
    heap.trim(above_bytes=2**20)
    assert memory_bytes(CPU) < before_bytes - 48 * 2**20
    assert all(bool((x == 1).all()) for x in stays)


def test_a_device_has_no_heap_of_ours():
    heap = ProcessHeap(torch.device("meta"))
    heap.trim(0)
    assert heap.free_bytes == 0
