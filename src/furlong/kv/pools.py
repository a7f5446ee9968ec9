"""Pools: store tensors between uses, without changing a bit, on the device, on a CPU or on disk.

`put` stores a copy of a tensor and returns at once; the tensor may be changed right away. `get`
lends the stored tensor (a lease), which may be read right away. All calls take effect in the order
of the calling thread or, on CUDA, of its current stream. `DevicePool` keeps tensors on the device
and is the reference for the others.

A `StagedPool` moves tensors through staging buffers. The calling thread, or its stream on CUDA, is
called the compute side: it copies a tensor into a buffer, or computes with a buffer that it has
leased. Beside it run two lanes. A lane is a CUDA stream, or a thread on a CPU, that runs copies in
order: one lane copies buffers to storage, the other copies them back. Tasks of a lane must start no
thread pool and draw no random numbers. The order of copies is kept like this:

    writes                       run in one lane, in the order of their calls
    a read                       waits for the last write of its handle
    reuse of a buffer            waits for the `free` event that its last user left
    reuse of dropped storage     needs no wait: later writes run later in the same lane

Every copy has its own event, which is used for no other copy. To add another offload target, write
one more subclass of `StagedPool` and one case in `Pools.of`.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from furlong.errors import ConfigError, in_short
from furlong.kv.arena import (
    MIN_SLAB_BYTES,
    Arena,
    ArenaBlock,
    Extents,
    Slabs,
    aligned,
    poison_bytes,
)
from furlong.kv.disk import PAGE_BYTES, NamelessFile
from furlong.plan.plan import Offload, OffloadTarget
from furlong.units import format_bytes


@dataclass(eq=False)
class Handle:
    """A tensor in a pool. Other fields than shape and dtype are private to the pool."""

    shape: torch.Size
    dtype: torch.dtype
    place: Any = None
    """Where the bytes are: a tensor, a part of a slab, or a range of the file."""
    written: Any = None
    """The event of the last write."""
    reading: Any = None
    """(buffer, event) of a prefetched read that no `get` has taken yet."""
    num_leases: int = 0

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(eq=False)
class Lease:
    """A tensor borrowed from a pool, valid until `release` or `write_back` is called, once.

    Change it in place only if `write_back` ends the lease.
    """

    tensor: Tensor
    _end: Callable[[bool], None] | None

    def release(self) -> None:
        """Give the tensor back to the pool, which reuses its memory."""
        self._finish(False)

    def write_back(self) -> None:
        """Store the tensor's present values under its handle, and give the tensor back."""
        self._finish(True)

    def _finish(self, writes: bool) -> None:
        end, self._end = self._end, None
        assert end is not None, "a lease ends once"
        end(writes)


@dataclass(eq=False)
class Budget:
    """Bytes held by the pools that share this budget, and their limit."""

    limit_bytes: int | None = None
    """None: no limit."""
    held_bytes: int = 0


class Pool(ABC):
    """Storage for tensors. An error in a lane (a queue of copies) is raised by all calls but
    `drop`, until `clear`.

    A handle with an open lease cannot be dropped. `write_back` requires that no other lease of the
    handle is open.
    """

    read_bytes = 0
    """Bytes of tensors read back from where the pool offloads."""
    written_bytes = 0
    """Bytes of tensors written to where the pool offloads."""
    waited_s = 0.0
    """Seconds that the calling thread has waited for the pool's lanes."""

    def __init__(self, budget: Budget | None, *, poison: bool) -> None:
        self._budget, self._poison = budget or Budget(), poison
        self._handles: set[Handle] = set()
        self._era = 0  # `clear` increments it, and leases of an earlier era then end without effect
        self._error: BaseException | None = None
        self.held_bytes = 0
        """Bytes of all handles' tensors."""
        self.peak_bytes = 0
        """Maximum of `held_bytes`; assign `held_bytes` to restart it."""

    def put(self, x: Tensor) -> Handle:
        """Store a copy of x.

        Raises:
            ConfigError: the budget is exceeded, or the disk is full.
        """
        self._raise_error()
        handle = Handle(x.shape, x.dtype)
        self._begin(handle)  # may raise: until here nothing is counted or held
        self._handles.add(handle)
        self._hold(handle.num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._write(handle, x.detach())
        return handle

    def prefetch(self, h: Handle) -> None:
        """Start to read a handle that `get` will soon ask for; a hint that may be repeated."""
        self._raise_error()
        self._require_held(h)

    def get(self, h: Handle) -> Lease:
        """Lease the tensor that was last put or written back under a handle."""
        self._raise_error()
        self._require_held(h)
        tensor, buffer = self._read(h)
        h.num_leases += 1
        return Lease(tensor, partial(self._end_lease, h, tensor, buffer, self._era))

    def drop(self, h: Handle) -> None:
        """Free a handle and its storage."""
        self._require_held(h)
        assert h.num_leases == 0, "a lease of the handle is left"
        self._handles.remove(h)
        self._hold(-h.num_bytes)
        self._end(h)

    def close(self) -> None:
        """Close the pool; raises AssertionError if a handle or a lease is left."""
        self._raise_error()
        num_leases = sum(h.num_leases for h in self._handles)
        assert not self._handles, f"{len(self._handles)} handles and {num_leases} leases are left"

    def clear(self) -> None:
        """Recover from an error: wait for the lanes, drop every handle, lease and error."""
        for handle in self._handles:
            self._end(handle)
        self._handles.clear()
        self._era += 1
        self._error = None
        self._hold(-self.held_bytes)

    @abstractmethod
    def _begin(self, h: Handle) -> None:
        """Allocate storage for a handle."""

    @abstractmethod
    def _end(self, h: Handle) -> None:
        """Free a handle's storage."""

    @abstractmethod
    def _write(self, h: Handle, x: Tensor) -> None: ...

    @abstractmethod
    def _read(self, h: Handle) -> tuple[Tensor, Buffer | None]:
        """Return the stored tensor, and the staging buffer that it is in, or None."""

    @abstractmethod
    def _give(self, tensor: Tensor, buffer: Buffer | None) -> None:
        """Take back the tensor and the buffer that `_read` returned."""

    def _write_back(self, h: Handle, tensor: Tensor, buffer: Buffer | None) -> None:
        self._write(h, tensor)
        self._give(tensor, buffer)

    def _end_lease(
        self, h: Handle, tensor: Tensor, buffer: Buffer | None, era: int, writes: bool
    ) -> None:
        if era != self._era:
            return
        h.num_leases -= 1
        if not writes:
            self._give(tensor, buffer)
            return
        self._raise_error()
        self._require_held(h)
        assert h.num_leases == 0, "another lease of the handle is left"
        self._write_back(h, tensor, buffer)

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _require_held(self, h: Handle) -> None:
        assert h in self._handles, "the handle was dropped"


class DevicePool(Pool):
    """Tensors in the arena. A lease is the stored tensor itself; with `poison` it is a copy that is
    filled with NaN when the lease ends."""

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        super().__init__(None, poison=poison)
        self.arena = arena

    def _begin(self, h: Handle) -> None:
        h.place = self.arena.take(tuple(h.shape), h.dtype)

    def _end(self, h: Handle) -> None:
        self.arena.give(h.place)

    def _write(self, h: Handle, x: Tensor) -> None:
        if x is not h.place:  # a lease that is written back is the place itself
            h.place.copy_(x)

    def _read(self, h: Handle) -> tuple[Tensor, Buffer | None]:
        return h.place.clone() if self._poison else h.place, None

    def _give(self, tensor: Tensor, buffer: Buffer | None) -> None:
        if self._poison:
            poison_bytes(tensor)


_PREFIX = "furlong-lane-"


def is_lane() -> bool:
    """Whether the calling thread belongs to a lane, a pool's queue of copies."""
    return threading.current_thread().name.startswith(_PREFIX)


@dataclass(frozen=True)
class Event:
    """A moment that a thread or a stream can wait for: the end of a lane's task (`work`), or a
    recorded CUDA event (`point`) on `device`. An event with neither has already happened."""

    work: Future[None] | None = None
    point: torch.cuda.Event | None = None
    device: torch.device | None = None

    def wait(self) -> None:
        """Make the compute side wait: this thread for a task, the current stream for a point.

        Raises the task's exception.
        """
        if self.work is not None:
            self.work.result()
        if self.point is not None:
            torch.cuda.current_stream(self.device).wait_event(self.point)

    def block(self) -> None:
        """Block the calling thread until the event has happened."""
        if self.work is not None:
            self.work.result()
        if self.point is not None:
            self.point.synchronize()

    def done(self) -> bool:
        is_done = self.work is None or self.work.done()
        return is_done and (self.point is None or bool(self.point.query()))


def now(device: torch.device) -> Event:
    """Return an event that happens when the compute side has done all its work so far: a CUDA event
    recorded on the current stream. On a CPU it has already happened."""
    if device.type != "cuda":
        return Event()
    return Event(point=torch.cuda.current_stream(device).record_event(), device=device)


class ThreadLane:
    """A lane (a queue of copies) that is one thread. If a task fails, tasks that wait for it fail
    with the same error.

    `ThreadPoolExecutor` is not used because of its locks. The garbage collector may run inside
    `submit` and finalize another model, whose lanes then end. `SimpleQueue` allows that; an
    executor could deadlock.
    """

    def __init__(self, name: str, *, joins: bool = True) -> None:
        """`joins`: whether `close`, and the end of the process, wait for the remaining tasks."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        thread = Thread(target=_carry, args=(self._tasks,), name=_PREFIX + name, daemon=True)
        thread.start()
        self._ended = weakref.finalize(self, _end_thread, self._tasks, thread if joins else None)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        """Queue `work` to run after all earlier tasks of the lane and after the events `after`.
        Return at once, with the event that `work` has ended."""
        done: Future[None] = Future()
        self._tasks.put((done, work, tuple(after)))
        return Event(done)

    def drain(self) -> None:
        """Block the calling thread until the lane is idle."""
        self.submit(lambda: None, ()).block()

    def close(self) -> None:
        self._ended()


_Task = tuple[Future[None], Callable[[], None], tuple[Event, ...]]


def _carry(tasks: SimpleQueue[_Task | None]) -> None:
    """Run a lane's tasks in its thread, until a task is None."""
    while (task := tasks.get()) is not None:
        done, work, after = task
        try:
            for event in after:
                event.block()
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del task, done, work, after  # else the thread would keep their memory while it waits


def _end_thread(tasks: SimpleQueue[_Task | None], thread: Thread | None) -> None:
    tasks.put(None)
    # the garbage collector may finalize the lane in its own thread, which cannot join itself
    if thread is not None and thread is not threading.current_thread():
        thread.join()


class StreamLane:
    """A lane that is one CUDA stream. No thread waits for it, except in `drain` and `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        for event in after:
            if event.point is not None:
                self._stream.wait_event(event.point)
            else:
                event.block()
        with torch.cuda.stream(self._stream):
            work()
        return Event(point=self._stream.record_event(), device=self._device)

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()


CopyLane = ThreadLane | StreamLane

_MAX_SLACK = 2
"""A buffer is at most this many times as large as what is stored in it."""


@dataclass(eq=False)
class Buffer:
    memory: Tensor
    """uint8, a whole number of pages."""
    free: Event
    """The event after its last use."""


class Staging:
    """Staging buffers, which are reused and are allocated as needed. Their total is limited to
    `limit_bytes`, or to `num_largest` times the largest buffer that was asked for if that is more.

    The limit is exceeded only by a single tensor that is larger, and when all buffers within the
    limit are leased.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        limit_bytes: int,
        wait: Callable[[Event], None],
        now: Callable[[], Event],
        num_largest: int = 0,
    ) -> None:
        """
        Args:
            allocate: Returns page-aligned uint8 memory of a number of bytes.
            wait: Makes the compute side (thread or stream) wait for an event.
            now: Returns the event after all work of the compute side so far.
            num_largest: The limit rises to this many times the largest buffer asked for.
        """
        self._allocate = allocate
        self._limit_bytes, self._num_largest = limit_bytes, num_largest
        self._wait = wait
        self._now = now
        self._free: deque[Buffer] = deque()  # in the order in which they were given back
        self.total_bytes = 0

    def take(self, num_bytes: int, *, may_wait: bool = True) -> Buffer | None:
        """Return a buffer of at least `num_bytes`. Use it only after its `free` event.

        The first of these that is possible is returned: an idle buffer that fits; new memory within
        the limit, for which idle buffers may be released; a buffer in use by a copy that fits; new
        memory, after the oldest buffers in use were awaited and released. With `may_wait=False` the
        last two are not tried, and None is returned.
        """
        size = aligned(max(1, num_bytes), PAGE_BYTES)
        self._limit_bytes = max(self._limit_bytes, self._num_largest * size)
        idle = [b for b in self._free if b.free.done()]
        found = next((b for b in idle if _fits(b, size)), None)
        if found is None:
            excess_bytes = self.total_bytes + size - self._limit_bytes
            if not may_wait and excess_bytes > sum(b.memory.numel() for b in idle):
                return None
            self._release_idle(self._limit_bytes - size)
            if self.total_bytes + size > self._limit_bytes:
                found = next((b for b in self._free if _fits(b, size)), None)
        if found is not None:
            self._free.remove(found)
            return found
        while self.total_bytes + size > self._limit_bytes and self._free:
            self._wait(self._free[0].free)
            self._release(self._free[0])
        self.total_bytes += size
        memory = self._allocate(size)
        # On CUDA the memory may come from a tensor that the compute stream still has to read.
        return Buffer(memory, self._now())

    def give(self, buffer: Buffer, free: Event) -> None:
        """Take back a buffer, to be reused after the event `free`."""
        buffer.free = free
        self._free.append(buffer)
        self._release_idle(self._limit_bytes)

    def reset(self) -> None:
        """Forget all buffers, taken or not. No copy may still run."""
        self._free.clear()
        self.total_bytes = 0

    def _release_idle(self, to_bytes: int) -> None:
        """Release idle buffers until `to_bytes` are left, or none is idle."""
        for buffer in [b for b in self._free if b.free.done()]:
            if self.total_bytes > to_bytes:
                self._release(buffer)

    def _release(self, buffer: Buffer) -> None:
        self._free.remove(buffer)
        self.total_bytes -= buffer.memory.numel()


def _fits(buffer: Buffer, size: int) -> bool:
    return size <= buffer.memory.numel() <= _MAX_SLACK * size


STAGING_BYTES = 2**25
"""Default limit of a pool's staging buffers."""
_NUM_LARGEST_ON_CUDA = 5
"""Staging for this many of the largest tensor, a segment's gradients: gradients in use, on their
way back and on their way out, keys and values of two segments, and saved attention. A read that
starts only when it is needed stalls a GPU."""


class StagedPool(Pool):
    """A pool that stores tensors off the device, through staging buffers and two lanes."""

    name: str
    """Name of the storage in messages, such as `CPU memory`."""
    budget_key: str
    """Key of a run's configuration that sets the budget."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: Budget | None = None,
        staging_bytes: int = STAGING_BYTES,
        poison: bool = False,
        stages_on_cpu: bool = False,
    ) -> None:
        """`stages_on_cpu`: use CPU memory as staging buffers and threads as lanes even if the
        tensors' device is a GPU."""
        super().__init__(budget, poison=poison)
        self._device, is_cuda = device, device.type == "cuda"
        self._out, self._back = (
            StreamLane(device) if is_cuda and not stages_on_cpu else ThreadLane(name)
            for name in ("out", "back")
        )
        self._hops = stages_on_cpu and is_cuda
        self._staging = Staging(
            self._allocate_staging, staging_bytes, self._wait, partial(now, device),
            _NUM_LARGEST_ON_CUDA if is_cuda else 0,
        )  # fmt: skip

    @abstractmethod
    def _take_place(self, num_bytes: int) -> Any: ...

    @abstractmethod
    def _give_place(self, place: Any) -> None: ...

    @abstractmethod
    def _allocate_staging(self, num_bytes: int) -> Tensor:
        """Return page-aligned uint8 memory."""

    @abstractmethod
    def _copy_out(self, place: Any, staged: Tensor) -> None:
        """Copy `staged` (num_bytes,) uint8 to `place` in the pool's storage; runs in a lane."""

    @abstractmethod
    def _copy_back(self, place: Any, staged: Tensor) -> None:
        """Copy `place` in the pool's storage to `staged` (num_bytes,) uint8; runs in a lane."""

    def prefetch(self, h: Handle) -> None:
        super().prefetch(h)
        if h.reading is None and (buffer := self._staging.take(h.num_bytes, may_wait=False)):
            h.reading = buffer, self._start_read(h, buffer)

    def close(self) -> None:
        self._out.close()
        self._back.close()
        self._staging.reset()
        super().close()

    def clear(self) -> None:
        self._out.drain()
        self._back.drain()
        super().clear()
        self._staging.reset()

    def _begin(self, h: Handle) -> None:
        budget = self._budget
        if budget.limit_bytes is not None and budget.held_bytes + h.num_bytes > budget.limit_bytes:
            raise ConfigError(
                given=f"{format_bytes(h.num_bytes)} more for {self.name}, which already holds "
                f"{format_bytes(budget.held_bytes)}",
                required=f"at most {format_bytes(budget.limit_bytes)} in all",
                source=self.budget_key,
                change=f"raise {self.budget_key}, or name fewer kinds of memory in offload",
            )
        h.place = self._take_place(h.num_bytes)

    def _end(self, h: Handle) -> None:
        self._forget_read(h)
        self._give_place(h.place)

    def _write(self, h: Handle, x: Tensor) -> None:
        buffer = self._staging.take(h.num_bytes)
        assert buffer is not None
        self._wait(buffer.free)
        _typed(buffer, h).copy_(x, non_blocking=self._hops)
        self._send(h, buffer)

    def _write_back(self, h: Handle, tensor: Tensor, buffer: Buffer | None) -> None:
        self._forget_read(h)  # a read that was prefetched meanwhile has the old values
        if buffer is None:
            super()._write_back(h, tensor, buffer)
        else:  # the lease is the buffer: no copy
            self._send(h, buffer)

    def _send(self, h: Handle, buffer: Buffer) -> None:
        h.written = self._submit(self._out, self._copy_out, h, buffer, now(self._device))
        self.written_bytes += h.num_bytes
        self._staging.give(buffer, h.written)

    def _read(self, h: Handle) -> tuple[Tensor, Buffer | None]:
        if h.reading is None:
            buffer = self._staging.take(h.num_bytes)
            assert buffer is not None
            h.reading = buffer, self._start_read(h, buffer)
        (buffer, event), h.reading = h.reading, None
        self._wait(event)
        tensor = _typed(buffer, h)
        if not self._hops:
            return tensor, buffer  # the lease is the staging buffer until it ends
        own = torch.empty(h.shape, dtype=h.dtype, device=self._device)
        own.copy_(tensor, non_blocking=True)
        self._staging.give(buffer, now(self._device))
        return own, None

    def _start_read(self, h: Handle, buffer: Buffer) -> Event:
        self.read_bytes += h.num_bytes
        return self._submit(self._back, self._copy_back, h, buffer, buffer.free, h.written)

    def _forget_read(self, h: Handle) -> None:
        if h.reading is not None:
            self._staging.give(*h.reading)
            h.reading = None

    def _give(self, tensor: Tensor, buffer: Buffer | None) -> None:
        if self._poison:
            poison_bytes(tensor)
        # An empty write bumps the version counter: a graph that saved the tensor raises in backward
        tensor.detach().view(-1)[:0].zero_()
        if buffer is not None:
            self._staging.give(buffer, now(self._device))

    def _submit(
        self, lane: CopyLane, copy: Callable[[Any, Tensor], None], h: Handle, buffer: Buffer,
        *after: Event,
    ) -> Event:  # fmt: skip
        """Run `copy` between a handle's storage and a buffer, in a lane, after some events."""
        place, staged = h.place, buffer.memory[: h.num_bytes]

        def work() -> None:
            try:
                copy(place, staged)
            except BaseException as error:
                self._error = self._error or error
                raise

        return lane.submit(work, after)

    def _wait(self, event: Event) -> None:
        start_s = time.perf_counter()
        event.wait()
        self.waited_s += time.perf_counter() - start_s


def _typed(buffer: Buffer, h: Handle) -> Tensor:
    return buffer.memory[: h.num_bytes].view(h.dtype).view(h.shape)


_MAX_RESERVED_BYTES = 2**32
"""Most bytes of a slab that is reserved in advance: the system may run out of pages to pin."""
_RECORDS_PER_SLAB = 4


class CpuPool(StagedPool):
    """Tensors of `device` in CPU memory, which is pinned for CUDA, so that copies overlap compute.

    On CUDA two streams copy, one each way, and the compute stream waits for them, never the host.
    On a CPU two threads do the same. Sizes of slabs are powers of two, to which torch would round
    pinned memory up anyway.
    """

    name, budget_key = "CPU memory", "memory.cpu"

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.memory = Slabs(self._allocate)
        self._is_refused = False  # whether the system has refused pinned memory

    def reserve(self, num_bytes: int, limit_bytes: int | None) -> None:
        """Allocate pinned memory for `num_bytes` in all, and 3 % for unused ends of slabs, up to
        the limit. Without CUDA do nothing: memory that is not pinned costs nothing until used."""
        if self._device.type != "cuda":
            return
        wanted = num_bytes + num_bytes // 32
        wanted = wanted if limit_bytes is None else min(wanted, limit_bytes)
        while (missing := wanted - self.memory.num_bytes) > 0 and not self._is_refused:
            power = 1 << max(MIN_SLAB_BYTES, missing).bit_length() - 1
            self.memory.add(min(power, _MAX_RESERVED_BYTES))

    def close(self) -> None:
        super().close()
        self.memory.slabs.clear()

    def _take_place(self, num_bytes: int) -> ArenaBlock:
        least_bytes = max(MIN_SLAB_BYTES, _RECORDS_PER_SLAB * aligned(num_bytes))
        return self.memory.take(num_bytes, lambda: 1 << (least_bytes - 1).bit_length())

    def _give_place(self, place: ArenaBlock) -> None:
        place.give()

    def _allocate_staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _copy_out(self, place: ArenaBlock, staged: Tensor) -> None:
        self._copy(place.memory, staged)

    def _copy_back(self, place: ArenaBlock, staged: Tensor) -> None:
        self._copy(staged, place.memory)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self._device.type == "cuda":
            to.copy_(source, non_blocking=True)
        else:
            np.copyto(to.numpy(), source.numpy())  # a torch copy would use OpenMP threads

    def _allocate(self, num_bytes: int) -> Tensor:
        memory = None
        if self._device.type == "cuda" and not self._is_refused:
            memory = pinned_memory(num_bytes)
            self._is_refused = memory is None
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return memory


def pinned_memory(num_bytes: int) -> Tensor | None:
    """Allocate pinned uint8 memory; None, with a warning, if the system refuses it."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "the system refuses %s of pinned CPU memory (%s): pageable memory is used instead, "
            "copies to it hold up the computation; raise `ulimit -l` or lower memory.cpu",
            format_bytes(num_bytes), str(error).splitlines()[0],
        )  # fmt: skip
        return None


class DiskPool(StagedPool):
    """Tensors of `device` in a file in `folder`, which one thread writes and another reads.

    Raises ConfigError at once for a folder that cannot hold the file, and at `put` for a full disk.
    """

    name, budget_key = "the disk", "memory.disk"

    def __init__(self, folder: Path, device: torch.device, **options: Any) -> None:
        self.file = NamelessFile(folder)
        self._extents = Extents()
        super().__init__(device, stages_on_cpu=True, **options)

    def close(self) -> None:
        super().close()
        self.file.close()

    def _take_place(self, num_bytes: int) -> tuple[int, int]:
        """Reserve whole pages of the file: (first byte, number of bytes)."""
        size = aligned(max(1, num_bytes), PAGE_BYTES)
        start = self._extents.take(size)
        if start is None:
            more = size - self._extents.free_at_end_bytes
            self.file.reserve(self._extents.num_bytes, more)
            self._extents.grow(more)
            start = self._extents.take(size)
            assert start is not None
        return start, size

    def _give_place(self, place: tuple[int, int]) -> None:
        self._extents.give(*place)

    def _allocate_staging(self, num_bytes: int) -> Tensor:
        if self._hops and (pinned := pinned_memory(num_bytes + PAGE_BYTES)) is not None:
            first = -pinned.data_ptr() % PAGE_BYTES
            return pinned[first : first + num_bytes]
        # MAP_PRIVATE: shared pages, Python's default, would count as the process's shared memory
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _copy_out(self, place: tuple[int, int], staged: Tensor) -> None:
        self.file.write(_pages(staged, place[1]), place[0])

    def _copy_back(self, place: tuple[int, int], staged: Tensor) -> None:
        self.file.read(_pages(staged, place[1]), place[0])


def _pages(staged: Tensor, num_bytes: int) -> memoryview:
    """Return the `num_bytes` (whole pages) from the first byte of `staged` on. They may extend past
    `staged`, but not past its buffer."""
    return staged.as_strided((num_bytes,), (1,)).numpy().data


@dataclass(frozen=True, slots=True)
class Storage:
    """Limits of the memory that calls may use besides weights, gradients and optimizer states."""

    cpu_bytes: int | None = None
    """Bytes of CPU memory for all pending calls on a model together; None: no limit."""
    disk_bytes: int | None = None
    """Bytes of the disk for all pending calls on a model together; None: no limit."""
    disk_dir: str | Path | None = None
    """Folder for offloading to disk; None: the system's folder for temporary files."""
    poison: bool = False
    """Whether freed memory is filled with NaN, so that tests detect a use after free."""
    device_bytes: int | None = None
    """Bytes of device memory by which `keep: auto` is decided; None: the bytes that are free at the
    first call. It limits nothing else."""

    def __post_init__(self) -> None:
        for name in ("device_bytes", "cpu_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(
                    given=f"{name} = {in_short(repr(value), 60)}",
                    required="bytes as a whole number of at least 0, or None",
                    source="furlong.Storage", change=f"pass such a {name}, or leave it out",
                )  # fmt: skip


class Pools:
    """The pools of one model, or of one call on it, created when a plan first offloads to them."""

    def __init__(
        self, arena: Arena, storage: Storage, budgets: Mapping[OffloadTarget, Budget] | None = None
    ) -> None:
        self.arena, self.storage = arena, storage
        self.process = os.getpid()
        """Id of the process whose threads copy; a forked process has none of them."""
        self.reserved: dict[tuple[bool, Offload], tuple[int, int]] = {}
        """Plans for which memory was reserved: (whether they train, what they offload) -> (most
        tokens of one sequence, most tokens of a batch)."""
        self.opened: dict[OffloadTarget, Pool] = {}
        self._budgets = budgets or {
            "cpu": Budget(storage.cpu_bytes), "disk": Budget(storage.disk_bytes)
        }  # fmt: skip

    def beside(self) -> Pools:
        """Return a second set of pools, which uses the same arena and counts toward the same
        budgets, for a call that keeps tensors while other calls run."""
        return Pools(self.arena, self.storage, self._budgets)

    def of(self, target: OffloadTarget) -> Pool:
        """Return the pool of an offload target, and create it on first use."""
        if target not in self.opened:
            poison, device = self.storage.poison, self.arena.device
            match target:
                case "none":
                    pool: Pool = DevicePool(self.arena, poison=poison)
                case "cpu":
                    pool = CpuPool(device, budget=self._budgets[target], poison=poison)
                case "disk":
                    folder = Path(self.storage.disk_dir or tempfile.gettempdir())
                    pool = DiskPool(folder, device, budget=self._budgets[target], poison=poison)
            self.opened[target] = pool
        return self.opened[target]

    @property
    def lower_bytes(self) -> int:
        """Bytes held in CPU memory and on disk."""
        return sum(pool.held_bytes for target, pool in self.opened.items() if target != "none")

    def reset_peaks(self) -> None:
        """Reset each pool's peak to the bytes that it holds now."""
        for pool in self.opened.values():
            pool.peak_bytes = pool.held_bytes

    def peak_bytes(self, target: OffloadTarget) -> int:
        """Most bytes that a pool has held since `reset_peaks`; 0 if it was never created."""
        return self.opened[target].peak_bytes if target in self.opened else 0

    @property
    def waited_s(self) -> float:
        """Seconds for which the calling thread has waited for copies."""
        return sum(pool.waited_s for pool in self.opened.values())

    def clear(self) -> None:
        """Drop everything after an error."""
        for pool in self.opened.values():
            pool.clear()

    def close(self) -> None:
        """Close the pools; raises AssertionError if anything is left in them."""
        for pool in self.opened.values():
            pool.close()
