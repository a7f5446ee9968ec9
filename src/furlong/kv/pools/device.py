"""The pool that keeps tensors where they are: the reference for the others."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools.contract import Handle, Lease, poison_bytes


class DevicePool:
    """Tensors in the arena. A lease is the kept tensor itself; with `poison` it is a copy that
    turns to NaN when it ends."""

    read_bytes = 0
    written_bytes = 0
    waited_s = 0.0

    def __init__(self, arena: Arena, *, poison: bool = False) -> None:
        self.arena = arena
        self.held_bytes = 0
        self.peak_bytes = 0
        self._poison = poison
        self._handles: set[Handle] = set()
        self._copies: dict[int, Tensor] = {}  # leased with `poison`, by data pointer

    def put(self, x: Tensor) -> Handle:
        handle = Handle(x.shape, x.dtype, self.arena.take(tuple(x.shape), x.dtype))
        handle.place.copy_(x.detach())
        self._handles.add(handle)
        self.held_bytes += handle.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return handle

    def prefetch(self, h: Handle) -> None:
        assert h in self._handles, "the handle was dropped"

    def get(self, h: Handle) -> Lease:
        assert h in self._handles, "the handle was dropped"
        h.num_leases += 1
        tensor: Tensor = h.place
        if self._poison:
            tensor = self.arena.take(tuple(h.shape), h.dtype).copy_(h.place)
            self._copies[tensor.data_ptr()] = tensor
        return Lease(tensor, partial(self._end, h, tensor))

    def _end(self, h: Handle, tensor: Tensor, writes: bool) -> None:
        if h not in self._handles:
            return  # cleared
        h.num_leases -= 1
        if tensor is h.place:
            return
        if writes:
            h.place.copy_(tensor)
        poison_bytes(tensor)
        self._copies.pop(tensor.data_ptr(), None)  # absent without elements
        self.arena.give(tensor)

    def overwrite(self, h: Handle, x: Tensor) -> None:
        assert h in self._handles and h.num_leases == 0, "a lease of the handle is left"
        assert x.shape == h.shape and x.dtype == h.dtype, "another shape or dtype"
        h.place.copy_(x.detach())

    def drop(self, h: Handle) -> None:
        assert h in self._handles and h.num_leases == 0, "a lease of the handle is left"
        self._handles.remove(h)
        self.held_bytes -= h.num_bytes
        self.arena.give(h.place)

    def close(self) -> None:
        num_leases = sum(h.num_leases for h in self._handles)
        assert not self._handles, f"{len(self._handles)} handles and {num_leases} leases are left"

    def clear(self) -> None:
        for tensor in (*(h.place for h in self._handles), *self._copies.values()):
            self.arena.give(tensor)
        self._handles.clear()
        self._copies.clear()
        self.held_bytes = 0
