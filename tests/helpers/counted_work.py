"""Measure work by the lines of Python that a call runs, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LINEAR = 2.5
"""Allowed factor of work for twice the size: n log n takes a little over 2, n^2 takes 4."""


def lines_run(call: Callable[[], object]) -> int:
    """Return the number of lines that a call runs, including functions that it calls."""
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
