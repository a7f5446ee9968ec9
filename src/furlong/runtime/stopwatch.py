"""Points in time on a device, without waiting for it: resolved together at the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Clock = Callable[[], float]
"""Seconds since any moment."""


class Stopwatch(Protocol):
    """Marks in the order of the device's work."""

    def mark(self) -> None:
        """Note the moment at which the device gets here."""
        ...

    def seconds(self) -> list[float]:
        """Seconds of every mark since the first."""
        ...


class HostStopwatch:
    """For devices that compute in the calling thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(self._clock())

    def seconds(self) -> list[float]:
        return [mark - self._marks[0] for mark in self._marks]


class CUDAStopwatch:
    """Events on the current stream; `seconds` waits for the last one, once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        self._marks.append(event)

    def seconds(self) -> list[float]:
        if self._marks:
            self._marks[-1].synchronize()  # type: ignore[no-untyped-call]
        return [self._marks[0].elapsed_time(mark) / 1e3 for mark in self._marks]  # type: ignore[no-untyped-call]


def stopwatch(device: torch.device, clock: Clock) -> Stopwatch:
    return CUDAStopwatch(device) if device.type == "cuda" else HostStopwatch(clock)
