"""A thread that waits for sends, one after the other, and lets go of their buffers."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

from furlong.runtime.parallel.wires import Work


class Waiter:
    """For backends that only know a send to be over once it was waited for (gloo).

    The thread ends when its sends are over and nobody knows the waiter any more. It is a daemon: a
    process that fails must not stay until its neighbours have taken what it has sent, for they wait
    for what it will never send.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Work, Tensor, Future[None]] | None] = SimpleQueue()
        Thread(target=_run, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def hold(self, work: Work, x: Tensor) -> Future[None]:
        """Hold a send and its buffer until it is over; the future has its error."""
        future: Future[None] = Future()
        self._queue.put((work, x, future))
        return future


def _run(queue: SimpleQueue[tuple[Work, Tensor, Future[None]] | None]) -> None:
    while (entry := queue.get()) is not None:
        work, _, future = entry
        try:
            work.wait()
        except Exception as error:  # it surfaces in the next send
            future.set_exception(error)
        else:
            future.set_result(None)
        del entry, work, _
