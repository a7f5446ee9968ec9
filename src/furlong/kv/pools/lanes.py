"""Lanes: work that runs beside the compute side, in order, with one event per operation.

On CUDA a lane is a stream, on a CPU a thread. What it does must take no team of threads of its own
and draw no random numbers: it copies, reads and writes, nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

_PREFIX = "furlong-lane-"


def is_lane() -> bool:
    """Whether the calling thread is that of a lane."""
    return threading.current_thread().name.startswith(_PREFIX)


class Event(Protocol):
    """Something that happens once."""

    def wait(self) -> None:
        """Let the compute side go on only after it. Raises what the operation raised."""
        ...

    def block(self) -> None:
        """The calling thread sleeps until it has happened."""
        ...

    def done(self) -> bool: ...


class Lane(Protocol):
    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        """Do `work` behind all that was submitted before it, and behind `after`."""
        ...

    def drain(self) -> None:
        """The calling thread sleeps until nothing is left to do."""
        ...

    def close(self) -> None: ...


class Past:
    """An event that has already happened."""

    def wait(self) -> None: ...
    def block(self) -> None: ...
    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _ThreadEvent:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    def block(self) -> None:
        self.future.result()

    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A point of a CUDA stream."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def block(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())


def now(device: torch.device) -> Event:
    """The event that the compute side has done all that it was given so far."""
    if device.type != "cuda":
        return Past()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return StreamEvent(event, device)


class ThreadLane:
    """One thread. An operation behind one that failed fails with the same error."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=_PREFIX + name)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        return _ThreadEvent(self._executor.submit(_in_turn, work, tuple(after)))

    def drain(self) -> None:
        self._executor.submit(_in_turn, bool, ()).result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _in_turn(work: Callable[[], object], after: Sequence[Event]) -> None:
    for event in after:
        event.block()
    work()


class StreamLane:
    """One CUDA stream; no thread ever waits for it but in `drain`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        for event in after:
            if isinstance(event, StreamEvent):
                self._stream.wait_event(event.event)
            else:
                event.block()
        with torch.cuda.stream(self._stream):
            work()
        done = torch.cuda.Event()
        done.record(self._stream)
        return StreamEvent(done, self._device)

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()
