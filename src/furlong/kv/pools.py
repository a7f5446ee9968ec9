"""Pools: tensors go in, wait somewhere, and come back with the same bits.

Everything is in the order of the calling thread, or of its stream on CUDA: `put` and `overwrite`
return at once and their tensor may be changed right away; a lease's tensor may be read right away.
`DevicePool` keeps tensors where they are and is the reference for the others.

In a `StagedPool` they pass through staging buffers on their way out and back. The compute side
copies into a buffer or uses it as a lease; one lane carries buffers out, another carries them back.
Each operation has its own event, so that nothing is announced by what was done before or behind it.
Writes are in order among themselves; a read comes behind the last write of its handle. A dropped
handle needs no wait: what is written later to its place is written later.

A lane is work beside the compute side, in order: a stream on CUDA, a thread on a CPU. What it does
must take no team of threads of its own and draw no random numbers: it copies, reads and writes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.kv.arena import Arena, poison_bytes
from furlong.units import format_bytes


@dataclass(eq=False)
class Handle:
    """A tensor in a pool; what else it holds is the pool's own affair."""

    shape: torch.Size
    dtype: torch.dtype
    place: Any = None
    """Where the bytes lie; None for a tensor without elements."""
    written: Any = None
    """The event of the last write."""
    reading: Any = None
    """A read under way that nobody has asked for yet."""
    num_leases: int = 0

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(eq=False)
class Lease:
    """A tensor of a pool, valid until it is given back by one of the two methods, once.

    It may be changed in place if `write_back` ends the lease, and else must not be.
    """

    tensor: Tensor
    _end: Callable[[bool], None]
    _ended: bool = field(default=False, init=False)

    def release(self) -> None:
        """Give the tensor back; its memory is reused."""
        self._finish(writes=False)

    def write_back(self) -> None:
        """Overwrite the handle with what the tensor holds now, and give the tensor back."""
        self._finish(writes=True)

    def _finish(self, *, writes: bool) -> None:
        assert not self._ended, "a lease ends once"
        self._ended = True
        self._end(writes)


@dataclass(eq=False)
class Budget:
    """Bytes that pools hold, and may hold together."""

    limit_bytes: int | None = None
    """None: no bound."""
    held_bytes: int = 0


class Pool(ABC):
    """Tensors that wait. An error of a worker surfaces in the next call, and in all until `clear`.

    A handle with a lease can neither be overwritten nor dropped.
    """

    read_bytes = 0
    """Bytes of tensors that came back over the pool's link."""
    written_bytes = 0
    """Bytes of tensors that went out over the pool's link."""
    waited_s = 0.0
    """Seconds that the calling thread has waited for the pool's workers."""

    def __init__(self, budget: Budget | None, *, poison: bool) -> None:
        self._budget, self._poison = budget or Budget(), poison
        self._handles: set[Handle] = set()
        self._era = 0  # `clear` begins a new one: leases of an old one end without effect
        self._error: BaseException | None = None
        self.held_bytes = 0
        """Bytes of all handles' tensors."""
        self.peak_bytes = 0
        """Most bytes held at a time; whoever sets it to `held_bytes` lets it start again."""

    def put(self, x: Tensor) -> Handle:
        """Keep a copy of x."""
        self._raise_error()
        handle = Handle(x.shape, x.dtype)
        self._begin(handle)
        self._handles.add(handle)
        self._hold(handle.num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._write(handle, x.detach())
        return handle

    @abstractmethod
    def prefetch(self, h: Handle) -> None:
        """Begin to read what `get` will soon ask for; a hint, without effect when repeated."""

    @abstractmethod
    def get(self, h: Handle) -> Lease:
        """The tensor last put or written, in a copy that stays until its lease ends."""

    def overwrite(self, h: Handle, x: Tensor) -> None:
        """Keep a copy of x, of the same shape and dtype, in the place of what the handle held."""
        self._raise_error()
        self._require_unleased(h)
        assert x.shape == h.shape and x.dtype == h.dtype, "another shape or dtype"
        self._write(h, x.detach())

    def drop(self, h: Handle) -> None:
        """Forget a handle."""
        self._require_unleased(h)
        self._handles.remove(h)
        self._hold(-h.num_bytes)
        self._end(h)

    def close(self) -> None:
        """End the pool; an AssertionError if a handle or a lease is left."""
        self._raise_error()
        num_leases = sum(h.num_leases for h in self._handles)
        assert not self._handles, f"{len(self._handles)} handles and {num_leases} leases are left"

    def clear(self) -> None:
        """After an error: wait for the workers, forget every handle, lease and error."""
        for handle in self._handles:
            self._end(handle)
        self._handles.clear()
        self._era += 1
        self._error = None
        self._hold(-self.held_bytes)

    @abstractmethod
    def _begin(self, h: Handle) -> None:
        """Take room for a handle's bytes."""

    @abstractmethod
    def _end(self, h: Handle) -> None:
        """Give it back."""

    @abstractmethod
    def _write(self, h: Handle, x: Tensor) -> None: ...

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _require_held(self, h: Handle) -> None:
        assert h in self._handles, "the handle was dropped"

    def _require_unleased(self, h: Handle) -> None:
        self._require_held(h)
        assert h.num_leases == 0, "a lease of the handle is left"


class DevicePool(Pool):
    """Tensors in the arena. A lease is the kept tensor itself; with `poison` it is a copy that
    turns to NaN when it ends."""

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        super().__init__(None, poison=poison)
        self.arena = arena
        self._copies: dict[int, Tensor] = {}  # leased with `poison`, by data pointer

    def prefetch(self, h: Handle) -> None:
        self._require_held(h)

    def get(self, h: Handle) -> Lease:
        self._require_held(h)
        h.num_leases += 1
        tensor: Tensor = h.place
        if self._poison:
            tensor = self.arena.take(tuple(h.shape), h.dtype).copy_(h.place)
            self._copies[tensor.data_ptr()] = tensor
        return Lease(tensor, partial(self._give, h, tensor, self._era))

    def clear(self) -> None:
        for tensor in self._copies.values():
            self.arena.give(tensor)
        self._copies.clear()
        super().clear()

    def _give(self, h: Handle, tensor: Tensor, era: int, writes: bool) -> None:
        if era != self._era:
            return
        h.num_leases -= 1
        if tensor is h.place:
            return
        if writes:
            h.place.copy_(tensor)
        poison_bytes(tensor)
        self._copies.pop(tensor.data_ptr(), None)  # absent without elements
        self.arena.give(tensor)

    def _begin(self, h: Handle) -> None:
        h.place = self.arena.take(tuple(h.shape), h.dtype)

    def _end(self, h: Handle) -> None:
        self.arena.give(h.place)

    def _write(self, h: Handle, x: Tensor) -> None:
        h.place.copy_(x)


_PREFIX = "furlong-lane-"


def is_lane() -> bool:
    """Whether the calling thread is that of a lane."""
    return threading.current_thread().name.startswith(_PREFIX)


class Event:
    """Something that happens once; this one has already happened."""

    def wait(self) -> None:
        """Let the compute side go on only after it. Raises what the operation raised."""

    def block(self) -> None:
        """The calling thread sleeps until it has happened."""

    def done(self) -> bool:
        return True


@dataclass(frozen=True)
class _ThreadEvent(Event):
    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    def block(self) -> None:
        self.future.result()

    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True)
class _StreamEvent(Event):
    """A point of a CUDA stream."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def block(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())


def now(device: torch.device) -> Event:
    """The event that the compute side has done all that it was given so far."""
    if device.type != "cuda":
        return Event()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _StreamEvent(event, device)


class ThreadLane:
    """One thread. An operation behind one that failed fails with the same error."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=_PREFIX + name)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        """Do `work` behind all that was submitted before it, and behind `after`."""
        return _ThreadEvent(self._executor.submit(_in_turn, work, tuple(after)))

    def drain(self) -> None:
        """The calling thread sleeps until nothing is left to do."""
        self._executor.submit(_in_turn, bool, ()).result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _in_turn(work: Callable[[], object], after: Sequence[Event]) -> None:
    for event in after:
        event.block()
    work()


class StreamLane:
    """One CUDA stream; no thread ever waits for it but in `drain`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        for event in after:
            if isinstance(event, _StreamEvent):
                self._stream.wait_event(event.event)
            else:
                event.block()
        with torch.cuda.stream(self._stream):
            work()
        done = torch.cuda.Event()
        done.record(self._stream)
        return _StreamEvent(done, self._device)

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()


Lane = ThreadLane | StreamLane

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


STAGING_BYTES = 2**25
"""In flight and leased, unless told otherwise."""
_NUM_LARGEST_ON_CUDA = 5
"""Staging for so many of the largest tensor, a segment's gradients: those in use, those on their
way back and out, two segments' keys and values, and remembered attention. A read that does not
begin before it is needed holds up a GPU."""


class Places(Protocol):
    """Where a pool's bytes lie."""

    name: str
    """Its name in messages, such as `host memory`."""
    budget_key: str
    """The key of the run's configuration that bounds it."""
    stages_on_host: bool
    """Whether staging is host memory even where tensors live on another device."""

    def take(self, num_bytes: int) -> Any: ...
    def give(self, place: Any) -> None: ...
    def allocate_staging(self, num_bytes: int) -> Tensor: ...
    def write(self, place: Any, staged: Tensor) -> None:
        """In a lane: staged (num_bytes,) uint8 -> place."""
        ...

    def read(self, place: Any, staged: Tensor) -> None:
        """In a lane: place -> staged (num_bytes,) uint8."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Read:
    buffer: Buffer
    event: Event


class StagedPool(Pool):
    """A pool over places and two lanes."""

    def __init__(
        self,
        places: Places,
        device: torch.device,
        make_lane: Callable[[str], Lane],
        *,
        budget: Budget | None = None,
        staging_bytes: int = STAGING_BYTES,
        poison: bool = False,
    ) -> None:
        super().__init__(budget, poison=poison)
        self._places, self._device = places, device
        self._out, self._back = make_lane("out"), make_lane("back")
        self._hops = places.stages_on_host and device.type != "cpu"
        self._staging = Staging(
            places.allocate_staging, staging_bytes, self._wait, partial(now, device),
            _NUM_LARGEST_ON_CUDA if device.type == "cuda" else 0,
        )  # fmt: skip

    def prefetch(self, h: Handle) -> None:
        self._raise_error()
        self._require_held(h)
        if h.reading is None and h.num_bytes and self._staging.has_room(h.num_bytes):
            h.reading = self._start_read(h)

    def get(self, h: Handle) -> Lease:
        self._raise_error()
        self._require_held(h)
        if not h.num_bytes:
            empty = torch.empty(h.shape, dtype=h.dtype, device=self._device)
            h.num_leases += 1
            return Lease(empty, partial(self._give, h, None, empty, self._era))
        read: _Read = h.reading or self._start_read(h)
        h.reading = None
        self._wait(read.event)
        tensor = _typed(read.buffer, h)
        buffer: Buffer | None = read.buffer
        if self._hops:
            tensor = torch.empty(h.shape, dtype=h.dtype, device=self._device).copy_(
                tensor, non_blocking=True
            )
            self._staging.give(read.buffer, now(self._device))
            buffer = None
        h.num_leases += 1
        return Lease(tensor, partial(self._give, h, buffer, tensor, self._era))

    def close(self) -> None:
        self._out.close()
        self._back.close()
        self._staging.reset()
        self._places.close()
        super().close()

    def clear(self) -> None:
        self._out.drain()
        self._back.drain()
        super().clear()
        self._staging.reset()

    def _begin(self, h: Handle) -> None:
        budget, places = self._budget, self._places
        if budget.limit_bytes is not None and budget.held_bytes + h.num_bytes > budget.limit_bytes:
            raise ConfigError(
                given=f"{format_bytes(h.num_bytes)} more for {places.name}, which already holds "
                f"{format_bytes(budget.held_bytes)}",
                required=f"at most {format_bytes(budget.limit_bytes)} in all",
                source=places.budget_key,
                change=f"raise {places.budget_key}, or name fewer kinds of memory in chunks.tier",
            )
        if h.num_bytes:
            h.place = places.take(h.num_bytes)

    def _end(self, h: Handle) -> None:
        self._forget_read(h)
        if h.place is not None:
            self._places.give(h.place)

    def _write(self, h: Handle, x: Tensor) -> None:
        self._forget_read(h)
        if not h.num_bytes:
            return
        buffer = self._staging.take(h.num_bytes)
        self._wait(buffer.free)
        _typed(buffer, h).copy_(x, non_blocking=self._hops)
        self._send(h, buffer)

    def _send(self, h: Handle, buffer: Buffer) -> None:
        staged = buffer.bytes(h.num_bytes)
        work = partial(self._places.write, h.place, staged)
        h.written = self._out.submit(partial(self._noting, work), [now(self._device)])
        self.written_bytes += h.num_bytes
        self._staging.give(buffer, h.written)

    def _start_read(self, h: Handle) -> _Read:
        buffer = self._staging.take(h.num_bytes)
        work = partial(self._places.read, h.place, buffer.bytes(h.num_bytes))
        event = self._back.submit(partial(self._noting, work), [buffer.free, h.written])
        self.read_bytes += h.num_bytes
        return _Read(buffer, event)

    def _forget_read(self, h: Handle) -> None:
        if h.reading is not None:
            self._staging.give(h.reading.buffer, h.reading.event)
            h.reading = None

    def _give(
        self, h: Handle, buffer: Buffer | None, tensor: Tensor, era: int, writes: bool
    ) -> None:
        if era != self._era:
            return
        h.num_leases -= 1
        if writes:
            self._raise_error()
            self._require_unleased(h)
            if buffer is not None:
                self._forget_read(h)
                self._send(h, buffer)
                return
            self._write(h, tensor)
        if self._poison:
            poison_bytes(tensor)
        # An empty write moves the version counter: a graph that has saved the tensor will notice.
        tensor.detach().view(-1)[:0].zero_()
        if buffer is not None:
            self._staging.give(buffer, now(self._device))

    def _noting(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = self._error or error
            raise

    def _wait(self, event: Event) -> None:
        start_s = time.perf_counter()
        event.wait()
        self.waited_s += time.perf_counter() - start_s


def _typed(buffer: Buffer, h: Handle) -> Tensor:
    return buffer.bytes(h.num_bytes).view(h.dtype).view(h.shape)
