"""Handlers of stop signals: Ctrl-C, and the signals of schedulers and closed terminals."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
# Python itself or its caller always handles these; a handler for the others has a purpose.
_ALWAYS_TAKEN = (signal.SIGTERM, signal.SIGINT)


class Ended(KeyboardInterrupt):
    """A stop signal arrived while there was nothing to save."""


class _Handler:
    """Context manager: while it is active, the method `_take` handles stop signals.

    Ignored signals (as SIGHUP under nohup) stay ignored. Outside the main thread, where Python
    cannot set handlers, nothing changes.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                present = signal.getsignal(number)
                is_free = present is signal.SIG_DFL or isinstance(
                    getattr(present, "__self__", None), QuietEnd
                )
                # None: not set by Python, so it could not be restored.
                is_kept = present in (signal.SIG_IGN, None)
                if not is_kept and (is_free or number in _ALWAYS_TAKEN):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class QuietEnd(_Handler):
    """Context manager: a stop signal raises `Ended`, and a second one exits at once."""

    number: int | None = None
    """The received signal, also if a library has caught the exception."""

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        if _is_importing(frame):
            # Nothing is open yet, and libraries swallow exceptions during their import.
            with suppress(OSError):
                os.write(2, f"{self}\n".encode())
            os._exit(128 + number)
        raise Ended

    def __str__(self) -> str:
        return "" if self.number is None else f"ended by {signal.Signals(self.number).name}"


class StopRequest(_Handler):
    """Context manager: record stop signals without acting on them.

    A second Ctrl-C is handled as outside of this context, usually by ending the process. Other
    signals never end it, so that a scheduler that sends several does not cost a checkpoint. A
    caller's handlers of signals other than SIGTERM and SIGINT stay in effect.
    """

    signal_name: str | None = None
    """Name of the first signal received."""

    @property
    def asked(self) -> bool:
        return self.signal_name is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is running in the call stack of `frame`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
