"""A pool whose tensors pass through staging buffers on their way out and back.

The compute side copies into a buffer or uses it as a lease; one lane carries buffers out, another
carries them back. Each operation has its own event, so that nothing is announced by what was done
before or behind it. Writes are in order among themselves; a read comes behind the last write of its
handle. A dropped handle needs no wait: what is written later to its place is written later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.kv.pools.contract import Handle, Lease, poison_bytes
from furlong.kv.pools.lanes import Event, Lane, now
from furlong.kv.pools.staging import Buffer, Staging
from furlong.units import format_bytes

STAGING_BYTES = 2**25
"""In flight and leased, unless told otherwise."""
_NUM_LARGEST_ON_CUDA = 5
"""Staging for so many of the largest tensor, a segment's gradients: those in use, those on their
way back and out, two segments' keys and values, and remembered attention. A read that does not
begin before it is needed holds up a GPU."""


@dataclass(eq=False)
class Budget:
    """Bytes that pools hold, and may hold together."""

    limit_bytes: int | None = None
    """None: no bound."""
    held_bytes: int = 0


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


class StagedPool:
    """The contract's `Pool` over places and two lanes."""

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
        self._places = places
        self._device = device
        self._out, self._back = make_lane("out"), make_lane("back")
        self._budget = budget or Budget()
        self._poison = poison
        self._hops = places.stages_on_host and device.type != "cpu"
        self._staging = Staging(
            places.allocate_staging, staging_bytes, self._wait, partial(now, device),
            _NUM_LARGEST_ON_CUDA if device.type == "cuda" else 0,
        )  # fmt: skip
        self._handles: set[Handle] = set()
        self._era = 0  # `clear` begins a new one: leases of an old one end without effect
        self._error: BaseException | None = None
        self.held_bytes = 0
        self.peak_bytes = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.waited_s = 0.0

    def put(self, x: Tensor) -> Handle:
        self._raise_error()
        handle = Handle(x.shape, x.dtype)
        self._require_room(handle.num_bytes)
        if handle.num_bytes:
            handle.place = self._places.take(handle.num_bytes)
        self._handles.add(handle)
        self._hold(handle.num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._write(handle, x)
        return handle

    def overwrite(self, h: Handle, x: Tensor) -> None:
        self._raise_error()
        self._require_unleased(h)
        assert x.shape == h.shape and x.dtype == h.dtype, "another shape or dtype"
        self._forget_read(h)
        self._write(h, x)

    def prefetch(self, h: Handle) -> None:
        self._raise_error()
        assert h in self._handles, "the handle was dropped"
        if h.reading is None and h.num_bytes and self._staging.has_room(h.num_bytes):
            h.reading = self._start_read(h)

    def get(self, h: Handle) -> Lease:
        self._raise_error()
        assert h in self._handles, "the handle was dropped"
        if not h.num_bytes:
            empty = torch.empty(h.shape, dtype=h.dtype, device=self._device)
            h.num_leases += 1
            return Lease(empty, partial(self._end, h, None, empty, self._era))
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
        return Lease(tensor, partial(self._end, h, buffer, tensor, self._era))

    def drop(self, h: Handle) -> None:
        self._require_unleased(h)
        self._forget_read(h)
        self._handles.remove(h)
        self._hold(-h.num_bytes)
        if h.place is not None:
            self._places.give(h.place)

    def close(self) -> None:
        self._out.close()
        self._back.close()
        self._staging.reset()
        self._places.close()
        self._raise_error()
        num_leases = sum(h.num_leases for h in self._handles)
        assert not self._handles, f"{len(self._handles)} handles and {num_leases} leases are left"

    def clear(self) -> None:
        self._out.drain()
        self._back.drain()
        for handle in self._handles:
            if handle.place is not None:
                self._places.give(handle.place)
        self._handles.clear()
        self._staging.reset()
        self._era += 1
        self._error = None
        self._hold(-self.held_bytes)

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def _write(self, h: Handle, x: Tensor) -> None:
        if not h.num_bytes:
            return
        buffer = self._staging.take(h.num_bytes)
        self._wait(buffer.free)
        _typed(buffer, h).copy_(x.detach(), non_blocking=self._hops)
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

    def _end(
        self, h: Handle, buffer: Buffer | None, tensor: Tensor, era: int, writes: bool
    ) -> None:
        if era != self._era:
            return
        h.num_leases -= 1
        if writes:
            self._raise_error()
            self._require_unleased(h)
            self._forget_read(h)
            if buffer is not None:
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

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, event: Event) -> None:
        start_s = time.perf_counter()
        event.wait()
        self.waited_s += time.perf_counter() - start_s

    def _require_unleased(self, h: Handle) -> None:
        assert h in self._handles, "the handle was dropped"
        assert h.num_leases == 0, "a lease of the handle is left"

    def _require_room(self, num_bytes: int) -> None:
        budget, places = self._budget, self._places
        if budget.limit_bytes is not None and budget.held_bytes + num_bytes > budget.limit_bytes:
            raise ConfigError(
                given=f"{format_bytes(num_bytes)} more for {places.name}, which already holds "
                f"{format_bytes(budget.held_bytes)}",
                required=f"at most {format_bytes(budget.limit_bytes)} in all",
                source=places.budget_key,
                change=f"raise {places.budget_key}, or name fewer kinds of memory in chunks.tier",
            )


def _typed(buffer: Buffer, h: Handle) -> Tensor:
    return buffer.bytes(h.num_bytes).view(h.dtype).view(h.shape)
