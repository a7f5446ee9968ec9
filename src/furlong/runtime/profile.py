"""Time and memory of a step: when each action ran, and the bytes in use meanwhile.

Points in time on a device are resolved together at the end of a step, without waiting. On CUDA the
bytes are the caching allocator's; on a CPU the resident set of the process, whose peak Linux keeps
and resets exactly (`/proc/self/clear_refs`). Where the operating system offers no reset, the peak
is that of the process's whole life.

The C library's heap keeps freed memory unless it is told to give it back. Blocks that live longer
lie between those of a graph that is gone, and the next graph does not find room in all of the
holes: what the heap keeps grows with every action. To give all of it back after each one would make
the next begin with page faults, which cost a tenth of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import psutil
import torch

from furlong.cost.memory import SPARE, SPARE_BYTES
from furlong.kv.pools import Pools
from furlong.plan.passes import Pass
from furlong.plan.plan import Action
from furlong.timeline import Record, Timeline

Clock = Callable[[], float]
"""Seconds since any moment."""


class Stopwatch:
    """Marks in the order of the device's work: events on the current stream of a GPU, for which
    `seconds` waits, once; on devices that compute in the calling thread readings of a clock."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._events: list[torch.cuda.Event] = []
        self._read_s: list[float] = []

    def mark(self) -> None:
        """Note the moment at which the device gets here."""
        if self._device.type != "cuda":
            self._read_s.append(self._clock())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Seconds of every mark since the first."""
        if self._events:
            self._events[-1].synchronize()  # type: ignore[no-untyped-call]
            return [self._events[0].elapsed_time(e) / 1e3 for e in self._events]  # type: ignore[no-untyped-call]
        return [read_s - self._read_s[0] for read_s in self._read_s]


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


_RESET_PEAK_RSS = "5"


class MemoryMeter:
    """Most bytes in use during a stretch of work, for one stretch after the other."""

    def __init__(self, device: torch.device, *, exact: bool) -> None:
        """`exact`: reset the device's peak at each begin, which others may be reading; else a
        stretch counts what is in use at its two ends, or a peak that is higher than all before."""
        self._device, self._exact = device, exact
        self._last: tuple[int, int] | None = None
        """In use, and at the peak, when the stretch before ended: the statistics cost some time."""

    def begin(self) -> None:
        if self._exact:
            reset_peak_memory(self._device)
        elif self._last is None:
            self._last = _memory_use(self._device)

    def end(self) -> int:
        """The peak since `begin`."""
        before, (now_bytes, peak_bytes) = self._last, _memory_use(self._device)
        self._last = now_bytes, peak_bytes
        if self._exact or before is None or peak_bytes > before[1]:
            return peak_bytes
        return max(before[0], now_bytes)


def _memory_use(device: torch.device) -> tuple[int, int]:
    """Bytes in use now, and most since the last reset."""
    if device.type != "cuda":
        return memory_bytes(device), peak_memory_bytes(device)
    statistics = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return statistics["current"], statistics["peak"]


def memory_bytes(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak start again from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK_RSS)


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak_bytes = _status_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def file_bytes() -> int:
    """Resident bytes of mapped files: libraries, data sets, weights as they were loaded. They are
    the system's to drop. 0 where it does not tell."""
    return _status_bytes("RssFile") or 0


def give_back_memory(device: torch.device) -> None:
    """Return what is free in this process to the device, or on a CPU to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    """An amount of /proc/self/status."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def _untold(action: Action) -> None:
    """For a caller that asks for nothing."""


class Measuring(TypedDict, total=False):
    """How an executor measures itself."""

    exact_peaks: bool
    """Reset the device's statistics of memory before each action, so that every record holds the
    peak during its own; see `MemoryMeter`."""
    clock: Clock
    """Seconds on devices that compute in the calling thread; default: time.perf_counter."""
    begun: Callable[[Action], None]
    """Told each action before it is carried out."""


class Recorder:
    """Notes actions one after another, without waiting for the device."""

    def __init__(self, pools: Pools, rank: int, **measuring: Unpack[Measuring]) -> None:
        self._pools, self._rank = pools, rank
        self._watch = Stopwatch(pools.arena.device, measuring.get("clock", time.perf_counter))
        self._meter = MemoryMeter(pools.arena.device, exact=measuring.get("exact_peaks", False))
        self._begun = measuring.get("begun", _untold)
        self._noted: list[tuple[Action, int, int]] = []

    def begin(self, action: Action) -> None:
        """An action begins; the first one starts the clock."""
        self._begun(action)
        if not self._noted:
            self._watch.mark()
        self._meter.begin()

    def end(self, action: Action) -> None:
        """The action that began is over."""
        self._noted.append((action, self._meter.end(), self._pools.lower_bytes))
        self._watch.mark()

    def timeline(self) -> Timeline:
        """All that was noted; waits for the device."""
        marks = self._watch.seconds()
        noted = zip(self._noted, marks[:-1], marks[1:], strict=True)
        return Timeline(
            tuple(
                Record(
                    self._rank, "compute", action, start_s, stop_s, device_bytes, offloaded_bytes
                )
                for (action, device_bytes, offloaded_bytes), start_s, stop_s in noted
            )
        )
