"""Pools: tensors go in, wait somewhere, and come back with the same bits.

Everything is in the order of the calling thread, or of its stream on CUDA: `put` returns at once
and its tensor may be changed right away; a lease's tensor may be read right away.
`DevicePool` keeps tensors where they are and is the reference for the others.

In a `StagedPool` they pass through staging buffers on their way out and back. The compute side
copies into a buffer or uses it as a lease; one lane carries buffers out, another carries them back.
Each operation has its own event, so that nothing is announced by what was done before or behind it.
Writes are in order among themselves; a read comes behind the last write of its handle. A dropped
handle needs no wait: what is written later to its place is written later.

A lane is work beside the compute side, in order: a stream on CUDA, a thread on a CPU. What it does
must take no team of threads of its own and draw no random numbers: it copies, reads and writes.
Another offload target is one more `StagedPool` (where bytes lie, and how they get there and back)
and a line in `Pools`.
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
from furlong.kv.arena import MIN_SLAB_BYTES, Arena, Extents, Piece, Slabs, aligned, poison_bytes
from furlong.kv.disk import PAGE_BYTES, NamelessFile
from furlong.plan.plan import Offload, OffloadTarget
from furlong.units import format_bytes


@dataclass(eq=False)
class Handle:
    """A tensor in a pool; what else it holds is the pool's own affair."""

    shape: torch.Size
    dtype: torch.dtype
    place: Any = None
    """Where the bytes lie."""
    written: Any = None
    """The event of the last write."""
    reading: Any = None
    """The buffer and the event of a read that nobody has asked for yet."""
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
    _end: Callable[[bool], None] | None

    def release(self) -> None:
        """Give the tensor back; its memory is reused."""
        self._finish(False)

    def write_back(self) -> None:
        """Overwrite the handle with what the tensor holds now, and give the tensor back."""
        self._finish(True)

    def _finish(self, writes: bool) -> None:
        end, self._end = self._end, None
        assert end is not None, "a lease ends once"
        end(writes)


@dataclass(eq=False)
class Budget:
    """Bytes that pools hold, and may hold together."""

    limit_bytes: int | None = None
    """None: no bound."""
    held_bytes: int = 0


class Pool(ABC):
    """Tensors that wait. An error of a worker surfaces in the next call, and in all until `clear`.

    A handle with a lease cannot be dropped, nor written back while another one is left.
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

    def prefetch(self, h: Handle) -> None:
        """Begin to read what `get` will soon ask for; a hint, without effect when repeated."""
        self._raise_error()
        self._require_held(h)

    def get(self, h: Handle) -> Lease:
        """The tensor last put or written, in a copy that stays until its lease ends."""
        self._raise_error()
        self._require_held(h)
        tensor, buffer = self._read(h)
        h.num_leases += 1
        return Lease(tensor, partial(self._end_lease, h, tensor, buffer, self._era))

    def drop(self, h: Handle) -> None:
        """Forget a handle."""
        self._require_held(h)
        assert h.num_leases == 0, "a lease of the handle is left"
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

    @abstractmethod
    def _read(self, h: Handle) -> tuple[Tensor, Buffer | None]:
        """A tensor for a lease, and the buffer that it lies in."""

    @abstractmethod
    def _give(self, tensor: Tensor, buffer: Buffer | None) -> None:
        """Give back what `_read` gave."""

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
    """Tensors in the arena. A lease is the kept tensor itself; with `poison` it is a copy that
    turns to NaN when it ends."""

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        super().__init__(None, poison=poison)
        self.arena = arena

    def _begin(self, h: Handle) -> None:
        h.place = self.arena.take(tuple(h.shape), h.dtype)

    def _end(self, h: Handle) -> None:
        self.arena.give(h.place)

    def _write(self, h: Handle, x: Tensor) -> None:
        if x is not h.place:
            h.place.copy_(x)

    def _read(self, h: Handle) -> tuple[Tensor, Buffer | None]:
        return h.place.clone() if self._poison else h.place, None

    def _give(self, tensor: Tensor, buffer: Buffer | None) -> None:
        if self._poison:
            poison_bytes(tensor)


_PREFIX = "furlong-lane-"


def is_lane() -> bool:
    """Whether the calling thread is that of a lane."""
    return threading.current_thread().name.startswith(_PREFIX)


@dataclass(frozen=True)
class Event:
    """Something that happens once: the end of a thread's work, or a point of a CUDA stream of a
    device; with neither it has already happened."""

    work: Future[None] | None = None
    point: torch.cuda.Event | None = None
    device: torch.device | None = None

    def wait(self) -> None:
        """Let the compute side go on only after it. Raises what the work raised."""
        if self.work is not None:
            self.work.result()
        if self.point is not None:
            torch.cuda.current_stream(self.device).wait_event(self.point)

    def block(self) -> None:
        """The calling thread sleeps until it has happened."""
        if self.work is not None:
            self.work.result()
        if self.point is not None:
            self.point.synchronize()

    def done(self) -> bool:
        is_done = self.work is None or self.work.done()
        return is_done and (self.point is None or bool(self.point.query()))


def now(device: torch.device) -> Event:
    """The event that the compute side has done all that it was given so far."""
    if device.type != "cuda":
        return Event()
    return Event(point=torch.cuda.current_stream(device).record_event(), device=device)


class ThreadLane:
    """One thread. An operation behind one that failed fails with the same error.

    The garbage collector may come upon a `submit`, and drop values of another model whose lanes
    have then to end: that needs a queue which is made for it, where an executor has locks.
    """

    def __init__(self, name: str, *, joins: bool = True) -> None:
        """`joins`: whether its end, and that of the process, wait for what is left to do."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        thread = Thread(target=_carry, args=(self._tasks,), name=_PREFIX + name, daemon=True)
        thread.start()
        self._ended = weakref.finalize(self, _end_thread, self._tasks, thread if joins else None)

    def submit(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        """Do `work` behind all that was submitted before it, and behind `after`."""
        done: Future[None] = Future()
        self._tasks.put((done, work, tuple(after)))
        return Event(done)

    def drain(self) -> None:
        """The calling thread sleeps until nothing is left to do."""
        self.submit(lambda: None, ()).block()

    def close(self) -> None:
        self._ended()


_Task = tuple[Future[None], Callable[[], None], tuple[Event, ...]]


def _carry(tasks: SimpleQueue[_Task | None]) -> None:
    """The life of a lane's thread; None ends it."""
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
        del task, done, work, after  # they hold memory, while it waits


def _end_thread(tasks: SimpleQueue[_Task | None], thread: Thread | None) -> None:
    tasks.put(None)
    # the collector may find the lane in the thread itself
    if thread is not None and thread is not threading.current_thread():
        thread.join()


class StreamLane:
    """One CUDA stream; no thread ever waits for it but in `drain`."""

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


Lane = ThreadLane | StreamLane

_MAX_SLACK = 2
"""A buffer serves tensors down to this fraction of its size."""


@dataclass(eq=False)
class Buffer:
    memory: Tensor
    """uint8, whole pages."""
    free: Event
    """When its last user is done with it."""


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

    def take(self, num_bytes: int, *, may_wait: bool = True) -> Buffer | None:
        """A buffer of at least `num_bytes`; mind its `free`. Waits where that keeps the limit, or
        gives None."""
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
        """Back, to be reused once `free` has happened."""
        buffer.free = free
        self._free.append(buffer)
        self._release_idle(self._limit_bytes)

    def reset(self) -> None:
        """Forget all buffers, also those that were taken; nobody may use one any more."""
        self._free.clear()
        self.total_bytes = 0

    def _release_idle(self, to_bytes: int) -> None:
        """Release buffers that nobody uses until `to_bytes` are left, or all are in use."""
        for buffer in [b for b in self._free if b.free.done()]:
            if self.total_bytes > to_bytes:
                self._release(buffer)

    def _release(self, buffer: Buffer) -> None:
        self._free.remove(buffer)
        self.total_bytes -= buffer.memory.numel()


def _fits(buffer: Buffer, size: int) -> bool:
    return size <= buffer.memory.numel() <= _MAX_SLACK * size


STAGING_BYTES = 2**25
"""In flight and leased, unless told otherwise."""
_NUM_LARGEST_ON_CUDA = 5
"""Staging for so many of the largest tensor, a segment's gradients: those in use, those on their
way back and out, two segments' keys and values, and remembered attention. A read that does not
begin before it is needed holds up a GPU."""


class StagedPool(Pool):
    """A pool whose tensors lie elsewhere, behind staging buffers and two lanes."""

    name: str
    """Where they lie, in messages, such as `CPU memory`."""
    budget_key: str
    """The key of a run's configuration that bounds it."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: Budget | None = None,
        staging_bytes: int = STAGING_BYTES,
        poison: bool = False,
        stages_on_cpu: bool = False,
    ) -> None:
        """`stages_on_cpu`: staging is CPU memory even where tensors live on another device, and
        lanes are threads."""
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
        """Page-aligned uint8 memory."""

    @abstractmethod
    def _copy_out(self, place: Any, staged: Tensor) -> None:
        """In a lane: staged (num_bytes,) uint8 -> place."""

    @abstractmethod
    def _copy_back(self, place: Any, staged: Tensor) -> None:
        """In a lane: place -> staged (num_bytes,) uint8."""

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
        self._forget_read(h)
        if buffer is None:
            super()._write_back(h, tensor, buffer)
        else:
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
            return tensor, buffer
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
        # An empty write moves the version counter: a graph that has saved the tensor will notice.
        tensor.detach().view(-1)[:0].zero_()
        if buffer is not None:
            self._staging.give(buffer, now(self._device))

    def _submit(
        self, lane: Lane, copy: Callable[[Any, Tensor], None], h: Handle, buffer: Buffer,
        *after: Event,
    ) -> Event:  # fmt: skip
        """Copy between a handle's place and a buffer, in a lane."""
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
"""A slab that is taken beforehand has at most so many: pages may run out."""
_RECORDS_PER_SLAB = 4


class CpuPool(StagedPool):
    """Tensors of `device` in CPU memory: pinned for CUDA, so that copies run beside the
    computation.

    On CUDA two streams copy, one each way, and the compute stream waits for them, never the host.
    On a CPU two threads do the same. Slabs have powers of two, to which torch would round pinned
    memory up anyway.
    """

    name, budget_key = "CPU memory", "memory.cpu"

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.memory = Slabs(self._allocate)
        self._is_refused = False  # pinned memory, by the system

    def reserve(self, num_bytes: int, limit_bytes: int | None) -> None:
        """Take memory for so many bytes in all, where it has to be pinned; elsewhere it costs
        nothing until it is used. A few more are for the ends of slabs, within the limit."""
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

    def _take_place(self, num_bytes: int) -> Piece:
        least_bytes = max(MIN_SLAB_BYTES, _RECORDS_PER_SLAB * aligned(num_bytes))
        return self.memory.take(num_bytes, lambda: 1 << (least_bytes - 1).bit_length())

    def _give_place(self, place: Piece) -> None:
        place.give()

    def _allocate_staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _copy_out(self, place: Piece, staged: Tensor) -> None:
        self._copy(place.memory, staged)

    def _copy_back(self, place: Piece, staged: Tensor) -> None:
        self._copy(staged, place.memory)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self._device.type == "cuda":
            to.copy_(source, non_blocking=True)
        else:
            np.copyto(to.numpy(), source.numpy())  # a torch copy would take a team of threads

    def _allocate(self, num_bytes: int) -> Tensor:
        memory = None
        if self._device.type == "cuda" and not self._is_refused:
            memory = pinned_memory(num_bytes)
            self._is_refused = memory is None
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return memory


def pinned_memory(num_bytes: int) -> Tensor | None:
    """Pinned uint8 memory, or None with a message where the system refuses it."""
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
    """Tensors of `device` in a file in `folder`; two threads write and read it.

    ConfigError for a folder that cannot take it, at once, and for a full disk, at `put`.
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
        """First byte and number of bytes."""
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
        # Private: shared pages, Python's default, would count as shared memory of the process.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _copy_out(self, place: tuple[int, int], staged: Tensor) -> None:
        self.file.write(_pages(staged, place[1]), place[0])

    def _copy_back(self, place: tuple[int, int], staged: Tensor) -> None:
        self.file.read(_pages(staged, place[1]), place[0])


def _pages(staged: Tensor, num_bytes: int) -> memoryview:
    """The whole pages that `staged` lies in, as bytes of the buffer that it begins."""
    return staged.as_strided((num_bytes,), (1,)).numpy().data


@dataclass(frozen=True, slots=True)
class Storage:
    """Bounds of the memory that calls may use beside weights, gradients and optimizer."""

    cpu_bytes: int | None = None
    """Budget of CPU memory, for all calls on a model that live; None: no bound."""
    disk_bytes: int | None = None
    """Budget of the disk, likewise; None: no bound."""
    disk_dir: str | Path | None = None
    """Folder of the disk; None: the system's folder for temporary files."""
    poison: bool = False
    """Whether memory that is given back turns to NaN, so that tests see a use after that."""
    device_bytes: int | None = None
    """Budget of the device, by which a keep of auto is decided; None: what is free at the first
    call. It bounds nothing else."""

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
    """The pools of one model, or of one call on it, opened when a plan first offloads to them."""

    def __init__(
        self, arena: Arena, storage: Storage, budgets: Mapping[OffloadTarget, Budget] | None = None
    ) -> None:
        self.arena, self.storage = arena, storage
        self.process = os.getpid()
        """Whose threads copy; a forked process has none of them."""
        self.reserved: dict[tuple[bool, Offload], tuple[int, int]] = {}
        """Kinds of plans (whether they train, what they offload) for which memory was taken
        beforehand: the most tokens of one sequence, and of all."""
        self.opened: dict[OffloadTarget, Pool] = {}
        self._budgets = budgets or {
            "cpu": Budget(storage.cpu_bytes), "disk": Budget(storage.disk_bytes)
        }  # fmt: skip

    def beside(self) -> Pools:
        """Others in the same arena, within the same budgets."""
        return Pools(self.arena, self.storage, self._budgets)

    def of(self, target: OffloadTarget) -> Pool:
        """The pool of an offload target."""
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
        """Bytes that wait in CPU memory and on disk."""
        return sum(pool.held_bytes for target, pool in self.opened.items() if target != "none")

    def reset_peaks(self) -> None:
        """Let the pools' peaks start again from what they hold."""
        for pool in self.opened.values():
            pool.peak_bytes = pool.held_bytes

    def peak_bytes(self, target: OffloadTarget) -> int:
        """Most bytes that a pool has held since `reset_peaks`; 0 if it was never opened."""
        return self.opened[target].peak_bytes if target in self.opened else 0

    @property
    def waited_s(self) -> float:
        """Seconds for which the calling thread has waited for copies."""
        return sum(pool.waited_s for pool in self.opened.values())

    def clear(self) -> None:
        """Forget everything, after an error."""
        for pool in self.opened.values():
            pool.clear()

    def close(self) -> None:
        """End the pools; an AssertionError if anything is left in them."""
        for pool in self.opened.values():
            pool.close()
