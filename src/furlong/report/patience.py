"""Progress lines during long operations, to show that the program has not hung."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from furlong.units import format_seconds

Tell = Callable[[str], None]


@contextmanager
def patience(what: str, *, every_s: float = 0, speaks: bool = True) -> Iterator[Tell]:
    """Context manager: print `what` and the elapsed time to stderr every `every_s` seconds.

    It yields a function that sets further words for the next lines. `every_s` 0 means 3 seconds on
    a terminal, else 10. `speaks`: whether this process prints.
    """
    every_s, last = every_s or (3.0 if sys.stderr.isatty() else 10.0), [""]
    over = threading.Event()
    started_s = time.monotonic()

    def tell(words: str) -> None:
        last[0] = words

    def report() -> None:
        while not over.wait(every_s):
            took = format_seconds(time.monotonic() - started_s)
            print(f"{what}: {took} so far" + (f", {last[0]}" if last[0] else ""), file=sys.stderr)

    thread = threading.Thread(target=report, daemon=True)
    if speaks:
        thread.start()
    try:
        yield tell
    finally:
        over.set()
        if speaks:
            thread.join()
