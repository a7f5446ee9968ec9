"""Time and memory of a step: when each action ran, and the bytes in use meanwhile.

Points in time on a device are resolved together at the end of a step, without waiting. On CUDA the
bytes are the caching allocator's; on a CPU the resident set of the process, whose peak Linux keeps
and resets exactly (`/proc/self/clear_refs`). Where the operating system offers no reset, the peak
is that of the process's whole life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import psutil
import torch

from furlong.cost.machine import Machine, free_ram_budget_bytes, this_cpu
from furlong.cost.memory import MAPPED_BYTES, SMALL_MAPPED_BYTES, SPARE_BYTES
from furlong.kv.pools import Pools
from furlong.ops.backends.select import Kind, fastest
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


_M_MMAP_THRESHOLD = -3
"""glibc's number of that option."""


class ProcessHeap:
    """The C library's heap of a CPU's process, while a step runs.

    It keeps what is free between blocks that live longer, such as saved attention outputs, and that
    would grow with every action. So large blocks come from the system and go back to it at once,
    for the life of the process, from 2 MiB on: each costs page faults. In a step that offloads, and
    under adapters, whose small blocks live between those of a graph so that glibc's memalign does
    not use these again, from 128 KiB on (`maps_small`; under adapters 93 MiB for 156, and a fourth
    more CPU seconds, at 512 tokens of 512 numbers). Whenever a step has grown by 4 MiB beyond the
    most that it held with nothing free, what is free of the rest goes back too. Settings of the
    user's own stay. Where each action is measured all is kept: page faults of one would be seconds
    of the next.
    """

    def __init__(
        self, device: torch.device, *, maps_small: bool, is_measured: bool = False
    ) -> None:
        given = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
        is_ours = not given and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "")
        is_ours &= device.type == "cpu" and not is_measured
        self._device = device if is_ours else None
        if self._device is not None:
            mapped_bytes = SMALL_MAPPED_BYTES if maps_small else MAPPED_BYTES
            with contextlib.suppress(OSError, AttributeError):  # not every C library has it
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
            self._most_bytes = memory_bytes(self._device)

    def end(self) -> None:
        """An action is over."""
        if self._device is None or memory_bytes(self._device) <= self._most_bytes + SPARE_BYTES:
            return
        give_back_memory(self._device)
        self._most_bytes = max(self._most_bytes, memory_bytes(self._device))


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
        self._begun = measuring.get("begun", lambda _: None)
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


def machine_of(device: torch.device) -> Machine:
    """Return the machine of a device of this process, as far as no calibration has measured it; it
    has all of the free RAM to itself."""
    if device.type != "cuda":
        return this_cpu()
    total_bytes = torch.cuda.mem_get_info(device)[1]
    found = Machine.of_card(torch.cuda.get_device_name(device), total_bytes)
    found = found.attended_by(fastest(Kind(device, torch.bfloat16, 128)))
    links = replace(found.links, devices_per_node=1)
    return replace(found, links=links, host_bytes=free_ram_budget_bytes())
