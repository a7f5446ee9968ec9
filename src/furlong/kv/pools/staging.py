"""Buffers through which a pool's tensors pass: reused, and no more of them than a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from furlong.kv.pools.lanes import Event

PAGE_BYTES = 4096
_MAX_SLACK = 2
"""A buffer serves tensors down to this fraction of its size."""


@dataclass(eq=False)
class Buffer:
    memory: Tensor
    """uint8, whole pages."""
    free: Event
    """When its last user is done with it."""

    def bytes(self, num_bytes: int) -> Tensor:
        return self.memory[:num_bytes]


class Staging:
    """Buffers of at most `limit_bytes` together, or of a number of the largest tensor; one larger
    tensor and leases excepted."""

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        limit_bytes: int,
        wait: Callable[[Event], None],
        now: Callable[[], Event],
        num_largest: int = 0,
    ) -> None:
        """`allocate`: a page-aligned uint8 tensor of so many bytes; `wait`: the compute side
        waits for an event; `now`: what it has done so far. `num_largest`: how many of the largest
        tensor so far may be on their way though they are more than the limit."""
        self._allocate = allocate
        self._limit_bytes, self._num_largest = limit_bytes, num_largest
        self._wait = wait
        self._now = now
        self._free: deque[Buffer] = deque()  # the longest given back first
        self.total_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether `take` would neither wait nor go beyond the limit."""
        size = self._size(num_bytes)
        if any(_fits(b, size) and b.free.done() for b in self._free):
            return True
        idle_bytes = sum(b.memory.numel() for b in self._free if b.free.done())
        return self.total_bytes - idle_bytes + size <= self._limit_bytes

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least `num_bytes`; mind its `free`. Waits where that keeps the limit."""
        size = self._size(num_bytes)
        fitting = [b for b in self._free if _fits(b, size)]
        idle = next((b for b in fitting if b.free.done()), None)
        if idle is None:
            self._release_idle(self._limit_bytes - size)
            fitting = [b for b in self._free if _fits(b, size)]  # one may have been done meanwhile
            if self.total_bytes + size > self._limit_bytes and fitting:
                idle = fitting[0]
        if idle is not None:
            self._free.remove(idle)
            return idle
        while self.total_bytes + size > self._limit_bytes and self._free:
            self._wait(self._free[0].free)
            self._release(self._free[0])
        self.total_bytes += size
        memory = self._allocate(size)
        # On CUDA the memory may come from a tensor that the compute stream still has to read.
        return Buffer(memory, self._now())

    def give(self, buffer: Buffer, free: Event) -> None:
        """Back, to be reused once `free` has happened."""
        buffer.free = free
        self._free.append(buffer)
        self._release_idle(self._limit_bytes)

    def reset(self) -> None:
        """Forget all buffers, also those that were taken; nobody may use one any more."""
        self._free.clear()
        self.total_bytes = 0

    def _size(self, num_bytes: int) -> int:
        size = padded(num_bytes)
        self._limit_bytes = max(self._limit_bytes, self._num_largest * size)
        return size

    def _release_idle(self, to_bytes: int) -> None:
        """Release buffers that nobody uses until `to_bytes` are left, or all are in use."""
        for buffer in [b for b in self._free if b.free.done()]:
            if self.total_bytes > to_bytes:
                self._release(buffer)

    def _release(self, buffer: Buffer) -> None:
        self._free.remove(buffer)
        self.total_bytes -= buffer.memory.numel()


def padded(num_bytes: int) -> int:
    """Bytes of the whole pages that hold `num_bytes`."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _fits(buffer: Buffer, size: int) -> bool:
    return size <= buffer.memory.numel() <= _MAX_SLACK * size
