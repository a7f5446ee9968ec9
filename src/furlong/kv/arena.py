"""Arena allocator of the KV store, which grows to the largest step so far.

A step that needs more adds a slab. Once everything is freed, several slabs are replaced by one of
their total size, so that later steps of the same size allocate nothing. Slabs are large: tensors
that live from forward to backward then cause no fragmentation among torch's short-lived tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor


class Extents:
    """First-fit allocator of byte ranges in [0, `num_bytes`); adjacent free ranges are merged."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._holes = [(0, num_bytes)] * (num_bytes > 0)  # sorted (start, stop)

    @property
    def free_at_end_bytes(self) -> int:
        start, stop = self._holes[-1] if self._holes else (0, 0)
        return stop - start if stop == self.num_bytes else 0

    def take(self, num_bytes: int) -> int | None:
        """Allocate a range and return its start, or None if no hole is large enough."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= num_bytes:
                rest = (start + num_bytes, stop)
                self._holes[index : index + 1] = [rest] * (stop - start > num_bytes)
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Free a range, and merge it with free neighbours."""
        stop = start + num_bytes
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))

    def grow(self, num_bytes: int) -> None:
        """Append free bytes at the end."""
        self.num_bytes += num_bytes
        self.give(self.num_bytes - num_bytes, num_bytes)


_ALIGNMENT_BYTES = 64
MIN_SLAB_BYTES = 2**26
_NAN_BYTE = 0xFF
"""A float of any width made of this byte alone is NaN."""


def aligned(num_bytes: int, alignment_bytes: int = _ALIGNMENT_BYTES) -> int:
    """Round `num_bytes` up to a multiple of `alignment_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class ArenaBlock:
    """An allocated part of a slab."""

    memory: Tensor  # (num_bytes,) uint8
    extents: Extents
    start: int

    def give(self) -> None:
        self.extents.give(self.start, aligned(self.memory.numel()))


class Slabs:
    """Memory in large slabs; the oldest slab with room serves an allocation."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self.slabs: list[tuple[Tensor, Extents]] = []

    @property
    def num_bytes(self) -> int:
        return sum(memory.numel() for memory, _ in self.slabs)

    def add(self, num_bytes: int) -> None:
        self.slabs.append((self._allocate(num_bytes), Extents(num_bytes)))

    def take(self, num_bytes: int, new_slab_bytes: Callable[[], int]) -> ArenaBlock:
        """Allocate `num_bytes`, in a new slab of `new_slab_bytes()` if no slab has room."""
        for memory, extents in self.slabs:
            if (start := extents.take(aligned(num_bytes))) is not None:
                return ArenaBlock(memory[start : start + num_bytes], extents, start)
        self.add(new_slab_bytes())
        return self.take(num_bytes, new_slab_bytes)


class Arena:
    """Device memory of the KV store: tensors are taken from slabs and given back."""

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        """`poison`: fill tensors with NaN when they are given back, to detect a use after free."""
        self.device = device
        self.taken_bytes = 0
        self._poison = poison
        self._slabs = Slabs(partial(torch.empty, dtype=torch.uint8, device=device))
        self._taken: dict[int, ArenaBlock] = {}  # by data pointer
        self._consolidated_bytes = 0

    @property
    def pooled_bytes(self) -> int:
        return self._slabs.num_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor, to be freed with `give`."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        piece = self._slabs.take(num_bytes, lambda: self._new_slab_bytes(num_bytes))
        self._taken[piece.memory.data_ptr()] = piece
        self.taken_bytes += aligned(num_bytes)
        # `.data` has its own version counter: autograd then sees writes to this piece only
        return piece.memory.view(dtype).view(shape).data

    def give(self, tensor: Tensor) -> None:
        """Free a tensor that `take` returned."""
        if tensor.numel() == 0:
            return
        piece = self._taken.pop(tensor.data_ptr())
        self.taken_bytes -= aligned(piece.memory.numel())
        if self._poison:
            poison_bytes(piece.memory)
        piece.give()
        if not self._taken and len(self._slabs.slabs) > 1:  # the next step gets one slab
            self._consolidated_bytes = self.pooled_bytes
            self._slabs.slabs.clear()

    def _new_slab_bytes(self, num_bytes: int) -> int:
        """Return the size of a new slab: at least `num_bytes` and a minimum. If the arena has just
        dropped all slabs, it is at least their total size, so that the next step needs no other
        slab."""
        consolidated_bytes = 0 if self._slabs.slabs else self._consolidated_bytes
        if consolidated_bytes and self.device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator still caches the slabs that were dropped
        return max(aligned(num_bytes), consolidated_bytes, MIN_SLAB_BYTES)


def poison_bytes(x: Tensor) -> None:
    """Fill contiguous x with NaN, to detect a use after free."""
    x.detach().view(-1).view(torch.uint8).fill_(_NAN_BYTE)
