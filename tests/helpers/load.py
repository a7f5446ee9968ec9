"""Limits of wall time that hold on a machine with more work than cores."""

from __future__ import annotations

import os


def slowed(limit_s: float) -> float:
    """Return the limit in seconds for work of at most `limit_s`, given the machine's load now."""
    return limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
