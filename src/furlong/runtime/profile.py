"""Time and memory of a step: when each action ran, and its peak bytes.

CUDA events are read together at the end of a step, so no action waits. Bytes are those of CUDA's
caching allocator; on a CPU the process's resident set, whose peak Linux tracks and resets
(`/proc/self/clear_refs`). On systems without a reset, it is the peak of the process's lifetime.
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
from furlong.ops.backends.select import CallKind, fastest
from furlong.plan.plan import Action
from furlong.timeline import Record, Timeline

ReadClock = Callable[[], float]
"""Returns seconds since an arbitrary moment."""


class Stopwatch:
    """Records time stamps in the order of the device's work. On CUDA they are events on the current
    stream, and `seconds` waits for them. On a CPU they are readings of a clock."""

    def __init__(self, device: torch.device, clock: ReadClock) -> None:
        self._device, self._clock = device, clock
        self._events: list[torch.cuda.Event] = []
        self._read_s: list[float] = []

    def mark(self) -> None:
        """Record the time at which the device reaches this point."""
        if self._device.type != "cuda":
            self._read_s.append(self._clock())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds from the first mark to each mark."""
        if self._events:
            self._events[-1].synchronize()  # type: ignore[no-untyped-call]
            return [self._events[0].elapsed_time(e) / 1e3 for e in self._events]  # type: ignore[no-untyped-call]
        return [read_s - self._read_s[0] for read_s in self._read_s]


_M_MMAP_THRESHOLD = -3
"""glibc's constant for mallopt."""


class ProcessHeap:
    """Limits the fragmentation of glibc's heap during steps on a CPU.

    malloc keeps free blocks between longer-lived blocks, such as saved attention outputs, so the
    heap would grow with every action. Therefore blocks from 2 MiB on are mapped one by one, in the
    whole process. They go back to the system when freed, at the price of page faults. Free memory
    is trimmed when the process holds 4 MiB more than at the start of the step or after the previous
    trim.

    `maps_small` lowers the limit to 128 KiB, for a step that offloads and for a model with
    adapters. Otherwise small blocks of adapters would lie between the blocks of a graph, and
    memalign would not reuse the graph's (93 instead of 156 MiB for 1/4 more CPU seconds, at 512
    tokens of hidden size 512).

    Nothing is done if the user has set malloc's limits, or if actions are measured: page faults
    would count as later seconds.
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
        """Trim the heap after an action, if it has grown."""
        if self._device is None or memory_bytes(self._device) <= self._most_bytes + SPARE_BYTES:
            return
        give_back_memory(self._device)
        self._most_bytes = max(self._most_bytes, memory_bytes(self._device))


_RESET_PEAK_RSS = "5"


class MemoryMeter:
    """Measures the peak bytes of consecutive stretches of work."""

    def __init__(self, device: torch.device, *, exact: bool) -> None:
        """`exact`: `begin` resets the device's peak, although other code may read that peak. `end`
        then returns the peak since `begin`.

        Otherwise no peak is reset. If the overall peak has risen since the previous `end`, `end`
        returns the overall peak; if not, it returns the bytes in use at the previous `end` or now,
        whichever is more."""
        self._device, self._exact = device, exact
        self._last: tuple[int, int] | None = None
        """(use, peak) in bytes at the end of the last stretch; kept, as reading takes time."""

    def begin(self) -> None:
        if self._exact:
            reset_peak_memory(self._device)
        elif self._last is None:
            self._last = _memory_use(self._device)

    def end(self) -> int:
        """Return the peak bytes since `begin`."""
        before, (now_bytes, peak_bytes) = self._last, _memory_use(self._device)
        self._last = now_bytes, peak_bytes
        if self._exact or before is None or peak_bytes > before[1]:
            return peak_bytes
        return max(before[0], now_bytes)


def _memory_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes in use now, and their peak since the last reset."""
    if device.type != "cuda":
        return memory_bytes(device), peak_memory_bytes(device)
    statistics = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return statistics["current"], statistics["peak"]


def memory_bytes(device: torch.device) -> int:
    """Return the bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK_RSS)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak_bytes = _status_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def file_bytes() -> int:
    """Return the resident bytes of mapped files (libraries, data sets, loaded weights), which the
    system may drop; 0 where it does not report them."""
    return _status_bytes("RssFile") or 0


def give_back_memory(device: torch.device) -> None:
    """Return cached free memory of this process to the GPU, or on a CPU to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int | None:
    """Return an entry of /proc/self/status in bytes; None if there is no such entry."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


class Measuring(TypedDict, total=False):
    """Options for measuring a step."""

    exact_peaks: bool
    """Reset the device's peak memory before each action, so that records hold exact peaks; see
    `MemoryMeter`."""
    clock: ReadClock
    """The clock on a CPU; default: time.perf_counter."""
    begun: Callable[[Action], None]
    """Called with each action before it runs."""


class Recorder:
    """Records time and memory of actions, without waiting for the device."""

    def __init__(self, pools: Pools, rank: int, **measuring: Unpack[Measuring]) -> None:
        self._pools, self._rank = pools, rank
        self._watch = Stopwatch(pools.arena.device, measuring.get("clock", time.perf_counter))
        self._meter = MemoryMeter(pools.arena.device, exact=measuring.get("exact_peaks", False))
        self._begun = measuring.get("begun", lambda _: None)
        self._noted: list[tuple[Action, int, int]] = []

    def begin(self, action: Action) -> None:
        """Record the begin of an action; the first one starts the clock."""
        self._begun(action)
        if not self._noted:
            self._watch.mark()
        self._meter.begin()

    def end(self, action: Action) -> None:
        """Record the end of the action."""
        self._noted.append((action, self._meter.end(), self._pools.lower_bytes))
        self._watch.mark()

    def timeline(self) -> Timeline:
        """Return the records; waits for the device."""
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
    """Return an uncalibrated description of this process's device, with all free RAM."""
    if device.type != "cuda":
        return this_cpu()
    total_bytes = torch.cuda.mem_get_info(device)[1]
    found = Machine.of_card(torch.cuda.get_device_name(device), total_bytes)
    found = found.attended_by(fastest(CallKind(device, torch.bfloat16, 128)))
    links = replace(found.links, devices_per_node=1)
    return replace(found, links=links, host_bytes=free_ram_budget_bytes())
