"""A thread that waits for sends, one after the other, and lets go of their buffers."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

from furlong.runtime.parallel.wires import Work


class Waiter:
    """For backends that only know a send to be over once it was waited for (gloo).

    The thread is a daemon: a process that fails must not stay until its neighbours have taken what
    it has sent, for they wait for what it will never send.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Work, Tensor, Future[None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def hold(self, work: Work, x: Tensor) -> Future[None]:
        """Hold a send and its buffer until it is over; the future has its error."""
        future: Future[None] = Future()
        self._queue.put((work, x, future))
        return future

    def close(self) -> None:
        """End the thread once all sends are over."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, _, future = entry
            try:
                work.wait()
            except Exception as error:  # it surfaces in the next send
                future.set_exception(error)
            else:
                future.set_result(None)
            del entry, work, _
