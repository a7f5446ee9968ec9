"""Pooled memory for the store: taken and given back in pieces, grown to the largest step seen.

A step that finds the pool too small adds a slab; when everything has come back, several slabs
become one of their total size, so that later steps of the same size allocate nothing. Slabs are
large, so that what lives from forward to backward leaves no holes among the allocator's short-lived
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.kv.extents import Extents
from furlong.kv.pools.contract import poison_bytes

_ALIGNMENT_BYTES = 64
_MIN_SLAB_BYTES = 2**26


class Arena:
    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        """`poison`: what is given back turns to NaN, so that a use after it is seen."""
        self.device = device
        self._poison = poison
        self._slabs: list[tuple[Tensor, Extents]] = []
        self._taken: dict[int, tuple[int, int, int]] = {}  # data pointer -> (slab, start, stop)
        self._taken_bytes = 0
        self._consolidated_bytes = 0

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    @property
    def pooled_bytes(self) -> int:
        return sum(memory.numel() for memory, _ in self._slabs)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; give it back with `give`."""
        num_elements = 1
        for extent in shape:
            num_elements *= extent
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        num_bytes = num_elements * dtype.itemsize
        needed = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab, start = self._first_fit(needed)
        memory = self._slabs[slab][0]
        self._taken[memory.data_ptr() + start] = (slab, start, start + needed)
        self._taken_bytes += needed
        # `.data`: a version counter of its own, so that autograd sees writes to this piece only.
        return memory[start : start + num_bytes].view(dtype).view(shape).data

    def split(self, tensor: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """A tensor from `take`, cut along its first axis into parts that are given back each by
        itself. The whole may be used as long as the parts in use are not given back."""
        parts = tensor.split(list(rows))
        if tensor.numel() == 0:
            return parts
        slab, start, stop = self._taken.pop(tensor.data_ptr())
        for part in reversed([p for p in parts if p.numel()]):
            first = start + part.data_ptr() - tensor.data_ptr()
            self._taken[part.data_ptr()] = (slab, first, stop)
            stop = first
        return parts

    def give(self, tensor: Tensor) -> None:
        """Give back what `take` or `split` returned."""
        if tensor.numel() == 0:
            return
        slab, start, stop = self._taken.pop(tensor.data_ptr())
        self._taken_bytes -= stop - start
        memory, extents = self._slabs[slab]
        if self._poison:
            poison_bytes(memory[start:stop])
        extents.give(start, stop - start)
        if not self._taken and len(self._slabs) > 1:
            self._consolidated_bytes = self.pooled_bytes
            self._slabs = []

    def _first_fit(self, num_bytes: int) -> tuple[int, int]:
        """(slab, first byte) of free memory in the oldest slab that has room, else in a new one.

        Slabs that were given up when all was free are replaced by one of their total size: the
        next step then finds everything in a single slab, where it had several.
        """
        for slab, (_, extents) in enumerate(self._slabs):
            start = extents.take(num_bytes)
            if start is not None:
                return slab, start
        consolidated_bytes = 0 if self._slabs else self._consolidated_bytes
        if consolidated_bytes and self.device.type == "cuda":
            torch.cuda.empty_cache()  # the slabs that were given up still lie in its cache
        slab_bytes = max(num_bytes, consolidated_bytes, _MIN_SLAB_BYTES)
        memory = torch.empty(slab_bytes, dtype=torch.uint8, device=self.device)
        extents = Extents(slab_bytes)
        start = extents.take(num_bytes)
        assert start is not None
        self._slabs.append((memory, extents))
        return len(self._slabs) - 1, start
