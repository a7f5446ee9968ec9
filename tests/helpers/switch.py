"""A pool of processes as threads, connected by a switch that behaves like NCCL.

Each process has one queue. An exchange runs when it is at the head of the queues of all processes
of its place; until then it blocks those after it. When all processes wait and none can continue,
each raises `DeadlockError`, so that a hang shows at once, on a CPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class DeadlockError(AssertionError):
    """All processes wait for one another."""


@dataclass
class _Message:
    place: range
    sent: list[Tensor]
    """Rows for each process of the place."""
    recv_rows: list[int]
    arrived: Tensor | None = None


@dataclass
class Switch:
    """The queues of a pool; `log[p]`: (first process, size) of each exchange of process p."""

    num_processes: int
    log: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = [[] for _ in range(self.num_processes)]
        self._queues: list[deque[_Message]] = [deque() for _ in range(self.num_processes)]
        self._change = threading.Condition()
        self._waits: dict[int, _Message] = {}
        self._ended: set[int] = set()
        self._is_stuck = False

    def post(self, process: int, message: _Message) -> None:
        with self._change:
            self.log[process].append((message.place.start, len(message.place)))
            self._queues[process].append(message)
            while any(self._meet(queue[0]) for queue in self._queues if queue):
                pass
            self._change.notify_all()

    def wait(self, process: int, message: _Message) -> Tensor:
        with self._change:
            self._waits[process] = message
            self._find_deadlock()
            self._change.wait_for(lambda: message.arrived is not None or self._is_stuck)
            del self._waits[process]
            if message.arrived is None:
                raise DeadlockError(f"process {process} waits in {message.place}")
            return message.arrived

    def end(self, process: int) -> None:
        """Note that a process has ended or failed, so that it starts no further exchange."""
        with self._change:
            self._ended.add(process)
            self._find_deadlock()

    def _meet(self, message: _Message) -> bool:
        heads = [self._queues[p][0] if self._queues[p] else None for p in message.place]
        both = [head for head in heads if head is not None and head.place == message.place]
        if len(both) < len(message.place):
            return False
        for member, head in enumerate(both):
            parts = [other.sent[member] for other in both]
            assert [len(part) for part in parts] == head.recv_rows, "the two ends disagree"
            head.arrived = torch.cat(parts)
        for p in message.place:
            self._queues[p].popleft()
        return True

    def _find_deadlock(self) -> None:
        waiting = {p for p, message in self._waits.items() if message.arrived is None}
        if waiting and len(waiting | self._ended) == self.num_processes:
            self._is_stuck = True
            self._change.notify_all()


@dataclass(frozen=True)
class SwitchExchange:
    """Implements `ops.exchange.Exchange` for one process at a switch."""

    switch: Switch
    process: int

    def start(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], size: int
    ) -> Callable[[], Tensor]:
        first = self.process // size * size
        sent = [part.clone() for part in x.split(list(send_rows))]
        message = _Message(range(first, first + size), sent, list(recv_rows))
        self.switch.post(self.process, message)
        return lambda: self.switch.wait(self.process, message)


def run_pool(switch: Switch, function: Callable[[SwitchExchange], Any]) -> list[Any]:
    """Return the results of `function`, called in a thread per process; raise the first error."""
    found: list[Any] = [None] * switch.num_processes
    errors: list[BaseException] = []

    def process(number: int) -> None:
        try:
            found[number] = function(SwitchExchange(switch, number))
        except BaseException as error:
            errors.append(error)
        finally:
            switch.end(number)

    threads = [threading.Thread(target=process, args=(p,)) for p in range(switch.num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, DeadlockError)), errors[0])
    return found
