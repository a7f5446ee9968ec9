"""Work without a clock: how many lines of Python a call runs. A busy machine changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LINEAR = 2.5
"""Most work for twice the size: n log n takes little more than twice as much, n^2 four times."""


def lines_run(call: Callable[[], object]) -> int:
    """The lines that a call runs, those of comprehensions and of what it calls included."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
