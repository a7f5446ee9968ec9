"""The timeline of an executor: when each action ran, and the bytes in use meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypedDict, Unpack

from furlong.plan.plan import Action
from furlong.runtime.memory.measure import MemoryMeter
from furlong.runtime.memory.pools import Pools
from furlong.runtime.stopwatch import Clock, stopwatch
from furlong.timeline import Record, Timeline


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
        self._watch = stopwatch(pools.arena.device, measuring.get("clock", time.perf_counter))
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
                Record(self._rank, "compute", action, start_s, stop_s, device_bytes, host_bytes)
                for (action, device_bytes, host_bytes), start_s, stop_s in noted
            )
        )
