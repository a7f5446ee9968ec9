"""Pooled memory for the store: taken and given back in pieces, grown to the largest step seen.

A step that finds the pool too small adds a slab; when everything has come back, several slabs
become one of their total size, so that later steps of the same size allocate nothing. Slabs are
large, so that what lives from forward to backward leaves no holes among the allocator's short-lived
tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64
_MIN_SLAB_BYTES = 2**26


class Arena:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slabs: list[Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # per slab, sorted (start, stop) in bytes
        self._taken: dict[int, tuple[int, int, int]] = {}  # data pointer -> (slab, start, stop)
        self._consolidated_bytes = 0

    @property
    def taken_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self._taken.values())

    @property
    def pooled_bytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

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
        view = self._slabs[slab][start : start + num_bytes].view(dtype).view(shape)
        self._taken[self._slabs[slab].data_ptr() + start] = (slab, start, start + needed)
        # `.data`: a version counter of its own, so that autograd sees writes to this piece only.
        return view.data

    def give(self, tensor: Tensor) -> None:
        """Give back what `take` returned."""
        if tensor.numel() == 0:
            return
        slab, start, stop = self._taken.pop(tensor.data_ptr())
        free = sorted([*self._free[slab], (start, stop)])
        merged = [free[0]]
        for hole in free[1:]:
            if hole[0] == merged[-1][1]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._free[slab] = merged
        if not self._taken and len(self._slabs) > 1:
            self._consolidated_bytes = self.pooled_bytes
            self._slabs, self._free = [], []

    def _first_fit(self, num_bytes: int) -> tuple[int, int]:
        for slab, holes in enumerate(self._free):
            for index, (start, stop) in enumerate(holes):
                if stop - start >= num_bytes:
                    holes[index : index + 1] = [(start + num_bytes, stop)] * (
                        stop - start > num_bytes
                    )
                    return slab, start
        consolidated_bytes = 0 if self._slabs else self._consolidated_bytes
        slab_bytes = max(num_bytes, consolidated_bytes, _MIN_SLAB_BYTES)
        self._slabs.append(torch.empty(slab_bytes, dtype=torch.uint8, device=self.device))
        self._free.append([(num_bytes, slab_bytes)] * (slab_bytes > num_bytes))
        return len(self._slabs) - 1, 0
