"""How much memory is in use, and the peak since the last reset.

On CUDA these are the caching allocator's allocated bytes; on a CPU the resident set of the process,
whose peak Linux keeps and resets exactly (`/proc/self/clear_refs`). Where the operating system
offers no reset, the peak is that of the process's whole life.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import psutil
import torch

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
