"""What is free in the heap goes back to the system, unless the next actions need it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from furlong.plan.passes import Pass
from furlong.runtime.profile import FreedMemory, process_heap

CPU = torch.device("cpu")
FORWARD, RECOMPUTE, BACKWARD = Pass("values"), Pass("graph"), Pass("backward")
MIB = 2**20


ALONE = """
import torch
from furlong.runtime.profile import process_heap
from furlong.runtime.profile import memory_bytes
cpu = torch.device("cpu")
heap = process_heap(cpu)
heap.trim()
other_bytes = heap.resident_bytes - heap.used_bytes
# 64 KiB each, from the heap; what stays between them keeps it from shrinking by itself
pairs = [(torch.ones(2**14), torch.ones(2**8)) for _ in range(1024)]
blocks, stays = (list(tensors) for tensors in zip(*pairs, strict=True))
del pairs
before_bytes = memory_bytes(cpu)
del blocks
print(heap.resident_bytes - heap.used_bytes - other_bytes, memory_bytes(cpu) - before_bytes)
heap.trim()
print(heap.resident_bytes - heap.used_bytes - other_bytes, memory_bytes(cpu) - before_bytes)
assert all(bool((x == 1).all()) for x in stays)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone tells what is free")
def test_free_memory_goes_back() -> None:
    """In a process of its own: blocks of others leave holes of any size."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    (kept, gone), (kept_after, gone_after) = (
        map(int, line.split()) for line in done.stdout.splitlines()
    )
    assert kept > 48 * MIB and gone > -8 * MIB
    assert kept_after < 8 * MIB and gone_after < -48 * MIB


def test_a_device_has_no_heap_of_ours():
    assert process_heap(torch.device("meta")) is None
    FreedMemory(None, [FORWARD]).end(0)


class ScriptedHeap:
    """Blocks in use, and what is free and still resident."""

    def __init__(self):
        self.used_bytes, self.free, self.trims = 100 * MIB, 50 * MIB, 0

    @property
    def resident_bytes(self):
        return 7 * MIB + self.used_bytes + self.free

    def trim(self):
        self.free, self.trims = 0, self.trims + 1

    def act(self, needs, keeps=0, leaks=0):
        """An action that takes `needs` MiB at most, and keeps some of it; `leaks`: holes that the
        next one cannot use."""
        self.free = max(self.free, (needs - keeps) * MIB) + leaks * MIB
        self.used_bytes += keeps * MIB


def trimmed(kinds, acts):
    """Behind which actions the heap was trimmed."""
    heap, found = ScriptedHeap(), []
    freed = FreedMemory(heap, kinds)
    assert heap.trims == 1 and heap.free == 0
    for index, act in enumerate(acts):
        before = heap.trims
        heap.act(**act)
        freed.end(index)
        if heap.trims > before:
            found.append(index)
    return found


def test_each_kind_is_learnt_once_and_then_nothing_is_given_back():
    kinds = [FORWARD] * 6 + [RECOMPUTE, BACKWARD] * 4
    acts = [{"needs": 20}] * 6 + [{"needs": 60, "keeps": 40}, {"needs": 30, "keeps": -40}] * 4
    assert trimmed(kinds, acts) == [5, 6]  # before the first Recompute, and the first Backward


def test_what_no_action_ahead_needs_is_given_back():
    kinds = [FORWARD, RECOMPUTE, BACKWARD, *[FORWARD] * 8]
    acts = [{"needs": 20}, {"needs": 90, "keeps": 50}, {"needs": 60, "keeps": -50}]
    acts += [{"needs": 20}] * 8
    assert trimmed(kinds, acts) == [0, 1, 2]


def test_holes_are_given_back_when_they_exceed_what_is_needed():
    found = trimmed([FORWARD] * 40, [{"needs": 40, "leaks": 2}] * 40)
    # the need is found to be 42 MiB, and six actions leave 52: more than 4 + a tenth above it
    assert found == [5, 11, 17, 23, 29, 35]
