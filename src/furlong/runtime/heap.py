"""The C library's heap, which keeps freed memory unless it is told to give it back."""

from __future__ import annotations

import ctypes
import sys

import torch


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


class ProcessHeap:
    """The heap of a process that computes on a CPU; elsewhere, and without glibc, nothing."""

    def __init__(self, device: torch.device) -> None:
        library = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None
        self._library = library if hasattr(library, "mallinfo2") else None
        if self._library is not None:
            self._library.mallinfo2.restype = _Mallinfo2

    @property
    def free_bytes(self) -> int:
        """Freed bytes that the heap holds."""
        return 0 if self._library is None else int(self._library.mallinfo2().fordblks)

    def trim(self, above_bytes: int) -> None:
        """Give what is free back to the system, if it is more than `above_bytes`."""
        if self.free_bytes > above_bytes:
            assert self._library is not None
            self._library.malloc_trim(0)
