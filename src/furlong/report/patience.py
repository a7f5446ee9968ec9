"""A line now and then while something takes long, so that nobody has to guess whether it hangs."""

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
    """Print `what` to stderr every `every_s` seconds while the block runs, with the seconds so far
    and the words that the function it yields was last told. `speaks`: whether this process does.

    0: every 3 seconds on a terminal, where somebody waits, else every 10.
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
