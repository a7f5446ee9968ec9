"""The C library's heap, which keeps freed memory unless it is told to give it back.

Blocks that live longer lie between those of a graph that is gone, and the next graph does not find
room in all of the holes: what the heap keeps grows with every action. To give all of it back after
each one would make the next begin with page faults, which cost a tenth of a step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from furlong.cost.memory import SPARE, SPARE_BYTES
from furlong.plan.passes import Pass

_STATM = Path("/proc/self/statm")
_NUM_AHEAD = 4
"""Actions whose needs are looked at: graphs of a Recompute are freed by the Backward behind it."""


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


class ProcessHeap:
    """glibc's heap of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.mallinfo2.restype = _Mallinfo2
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks in use."""
        info = self._library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    @property
    def resident_bytes(self) -> int:
        """Private memory of the process, of which the heap is a part."""
        _, resident, shared, *_ = map(int, _STATM.read_bytes().split())
        return (resident - shared) * self._page_bytes

    def trim(self) -> None:
        """Give back what is free."""
        self._library.malloc_trim(0)


def process_heap(device: torch.device) -> ProcessHeap | None:
    """This process's heap, if it is glibc's and the device is a CPU."""
    if device.type != "cpu" or sys.platform != "linux":
        return None
    return ProcessHeap() if hasattr(ctypes.CDLL(None), "mallinfo2") else None


class FreedMemory:
    """Gives back, between the actions of a step, what the heap keeps beyond the next ones' needs.

    What an action needs is what the heap has grown by and keeps at its end, if everything free had
    been given back before it. Actions of a kind need alike: of each kind that is found out once,
    and again whenever chance has it.
    """

    def __init__(self, heap: ProcessHeap | None, passes: Sequence[Pass]) -> None:
        """`heap`: None where all is kept, for time; `passes`: of each action of the step."""
        self._heap, self._kinds = heap, passes
        self._needs: dict[Pass, int] = {}
        self._is_trimmed, self._used_bytes, self._other_bytes = False, 0, 0
        if heap is not None:
            self._trim(heap)

    def end(self, index: int) -> None:
        """Action `index` is over."""
        heap = self._heap
        if heap is None:
            return
        used_bytes = heap.used_bytes
        kept_bytes = heap.resident_bytes - used_bytes - self._other_bytes
        if self._is_trimmed:
            kind, grown_bytes = self._kinds[index], max(0, used_bytes - self._used_bytes)
            self._needs[kind] = max(self._needs.get(kind, 0), kept_bytes + grown_bytes)
            self._is_trimmed = False
        ahead = self._kinds[index + 1 : index + 1 + _NUM_AHEAD]
        if not ahead:
            return
        needed_bytes = max(self._needs.get(kind, 0) for kind in ahead)
        if ahead[0] not in self._needs or kept_bytes > (1 + SPARE) * needed_bytes + SPARE_BYTES:
            self._trim(heap)

    def _trim(self, heap: ProcessHeap) -> None:
        heap.trim()
        self._is_trimmed = True
        self._used_bytes = heap.used_bytes
        # of Python, of staging buffers, and holes too small to be given back
        self._other_bytes = heap.resident_bytes - self._used_bytes
