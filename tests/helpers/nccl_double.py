"""A test double of NCCL on a CPU, whose queues reproduce the hangs of NCCL.

Each process has queues of sends and receives in the order in which they were started. A message is
transferred when its send is at the head of the sender's queue and its receive at the head of the
receiver's; a process waits for its receives. The placement decides which messages share a queue.
When all processes wait and no two heads match, each of them raises Deadlock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

Placement = Callable[[int, int, int], Hashable]
"""Return the queue of process `own` for a message from `sender` to `receiver`."""


def per_process(own: int, sender: int, receiver: int) -> Hashable:
    return own


def per_pair(own: int, sender: int, receiver: int) -> Hashable:
    return own, frozenset((sender, receiver))


def per_direction(own: int, sender: int, receiver: int) -> Hashable:
    return own, sender, receiver


class Deadlock(Exception):  # noqa: N818 - the outcome of a run
    """Every process waits for another one."""


@dataclass
class Waiting:
    """A send or a receive in its queue; implements `wires.Work`."""

    double: NCCLDouble
    way: tuple[int, int]
    x: Tensor
    sends: bool
    done: bool = False
    awaited: bool = False

    def wait(self) -> None:
        self.double.wait_for(self)

    def is_completed(self) -> bool:
        if self.double.stuck:
            raise Deadlock
        return self.done


@dataclass
class DoubleWire:
    """Implements `wires.Wire` from `sender` to `receiver`, for either of them."""

    double: NCCLDouble
    sender: int
    receiver: int

    def isend(self, x: Tensor) -> Waiting:
        return self.double.begin(self.sender, self.receiver, x, sends=True)

    def irecv(self, x: Tensor) -> Waiting:
        return self.double.begin(self.sender, self.receiver, x, sends=False)


@dataclass
class NCCLDouble:
    """The queues of all processes. `connects`: the first message in a queue blocks both processes
    until it is transferred, as creating a communicator does."""

    num_processes: int
    placement: Placement
    connects: bool = False
    queues: dict[Hashable, deque[Waiting]] = field(default_factory=lambda: defaultdict(deque))
    met: set[Hashable] = field(default_factory=set)
    num_waiting: int = 0
    num_left: int = 0
    stuck: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, sender: int, receiver: int, x: Tensor, *, sends: bool) -> Waiting:
        own = sender if sends else receiver
        entry = Waiting(self, (sender, receiver), x, sends)
        with self.changed:
            queue = self.placement(own, sender, receiver)
            self.queues[queue].append(entry)
            self._meet()
            is_first = queue not in self.met
            self.met.add(queue)
        if self.connects and is_first:
            entry.wait()
        return entry

    def wait_for(self, entry: Waiting) -> None:
        with self.changed:
            if entry.done:
                return
            entry.awaited = True
            self.num_waiting += 1
            self._look()
            while not entry.done and not self.stuck:
                self.changed.wait()
            if not entry.done:
                raise Deadlock

    def leave(self) -> None:
        """Note that a process has nothing left to do."""
        with self.changed:
            self.num_left += 1
            self._look()

    def _look(self) -> None:
        if self.num_waiting and self.num_waiting + self.num_left == self.num_processes:
            self.stuck = True
            self.changed.notify_all()

    def _meet(self) -> None:
        """Transfer every message whose send and receive are at the heads of their queues."""
        while pair := next(self._pairs(), None):
            out, into = (queue.popleft() for queue in pair)
            into.x.copy_(out.x)
            for entry in (out, into):
                entry.done = True
                self.num_waiting -= entry.awaited
            self.changed.notify_all()

    def _pairs(self) -> Iterator[tuple[deque[Waiting], deque[Waiting]]]:
        """Yield the pairs of queues whose heads match, the sender's first."""
        for queue in self.queues.values():
            if queue and queue[0].sends:
                sender, receiver = queue[0].way
                other = self.queues.get(self.placement(receiver, sender, receiver))
                if other and not other[0].sends and other[0].way == queue[0].way:
                    yield queue, other
