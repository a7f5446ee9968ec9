"""Errors in the middle of a step."""

from __future__ import annotations

from typing import Any

import pytest

from furlong.runtime.check import TrialHead
from furlong.runtime.executor import Executor


def fail_at(patched: pytest.MonkeyPatch, actions: set[int], error: Exception) -> None:
    """Make executors raise `error` before the actions of training steps with these numbers; actions
    of a start-up check are not counted."""
    original, count = Executor._obey, iter(range(10**9))

    def obey(executor: Executor, action: Any, what: Any) -> None:
        is_step = executor._plan.trained and not isinstance(executor._head, TrialHead)
        if is_step and next(count) in actions:
            raise error
        original(executor, action, what)

    patched.setattr(Executor, "_obey", obey)
