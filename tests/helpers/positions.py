"""Positions of ranks in what they run: what a test shows when one of them stands still."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from furlong.plan.plan import ChunkPlan
from furlong.plan.text import format_action
from helpers.load import slowed
from helpers.ranks import RankError, run_ranks

STANDS_STILL = 70
"""The exit code of a rank that stood still for too long."""


class Position:
    """One rank's own, in a file that outlives the rank."""

    def __init__(self, folder: str, rank: int, limit_s: float) -> None:
        """`limit_s`: a rank that stands still for longer within `guarded` ends its process."""
        self._path = Path(folder) / f"rank {rank}"
        self._limit_s = limit_s
        self._moved = Event()

    def note(self, text: str) -> None:
        self._path.write_text(text, encoding="utf-8")
        self._moved.set()

    def watch(self, name: str, plan: ChunkPlan, plan_rank: int) -> Callable[[], None]:
        """A function for `Engine.run` to call after each action of a list."""
        texts = iter([*map(format_action, plan.actions[plan_rank]), "its end"])
        count = len(plan.actions[plan_rank])
        done = 0
        self.note(f"{name}: before '{next(texts)}', 0 of {count} actions done")

        def moved() -> None:
            nonlocal done
            done += 1
            self.note(f"{name}: behind it '{next(texts)}', {done} of {count} actions done")

        return moved

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it the rank moves, or its process ends."""
        over = Event()

        def look() -> None:
            while self._moved.wait(slowed(self._limit_s)):
                self._moved.clear()
                if over.is_set():
                    return
            os._exit(STANDS_STILL)  # a thread cannot raise in another one that waits for a peer

        thread = Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._moved.set()
            thread.join()


def run_watched(
    function: Callable[..., Any], folder: Path, *args: Any, num_ranks: int, limit_s: float
) -> list[Any]:
    """As `run_ranks` of `function(rank, folder, *args)`; what goes wrong is told with the position
    of each rank."""
    try:
        return run_ranks(function, str(folder), *args, num_ranks=num_ranks, limit_s=limit_s)
    except RankError as error:
        told = [f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("rank *"))]
        raise RankError("\n".join([str(error), *told])) from error
