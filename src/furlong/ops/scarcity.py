"""Errors that say that the machine had too little of something."""

from __future__ import annotations

import torch

_NO_MEMORY_ON_CPU = "can't allocate memory"  # torch's CPU allocator raises a RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        _NO_MEMORY_ON_CPU in str(error)
    )


def is_of_machine(error: BaseException) -> bool:
    """Whether an error tells of memory or files, and not of the model whose code met it."""
    return is_out_of_memory(error) or isinstance(error, OSError)
