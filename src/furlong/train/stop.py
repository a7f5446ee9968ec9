"""How a run is asked to end: SIGTERM, as schedulers send it, or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Within it SIGTERM and the first SIGINT are noted and nothing else happens.

    A second Ctrl-C does what it did before: it ends the process at once. Outside of the main
    thread, where Python lets no one handle signals, nothing is ever noted.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
