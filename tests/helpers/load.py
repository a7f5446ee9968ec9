"""Limits of wall time that hold on a machine with more work than cores."""

from __future__ import annotations

import os


def slowed(limit_s: float) -> float:
    """Seconds that work of at most `limit_s` may take beside whatever else runs there by now."""
    return limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
