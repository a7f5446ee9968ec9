"""The contract of a pool: tensors go in, wait somewhere, and come back with the same bits.

Everything is in the order of the calling thread, or of its stream on CUDA: `put` and `overwrite`
return at once and their tensor may be changed right away; a lease's tensor may be read right away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_NAN_BYTE = 0xFF
"""A float of any width whose bytes are all this one is NaN."""


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


class Pool(Protocol):
    """Tensors that wait. An error of a worker surfaces in the next call, and in all until `clear`.

    A handle with a lease can neither be overwritten nor dropped.
    """

    peak_bytes: int
    """Most bytes held at a time; whoever sets it to `held_bytes` lets it start again."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all handles' tensors."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that came back over the pool's link."""
        ...

    @property
    def written_bytes(self) -> int:
        """Bytes of tensors that went out over the pool's link."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that the calling thread has waited for the pool's workers."""
        ...

    def put(self, x: Tensor) -> Handle:
        """Keep a copy of x."""
        ...

    def prefetch(self, h: Handle) -> None:
        """Begin to read what `get` will soon ask for; a hint, without effect when repeated."""
        ...

    def get(self, h: Handle) -> Lease:
        """The tensor last put or written, in a copy that stays until its lease ends."""
        ...

    def overwrite(self, h: Handle, x: Tensor) -> None:
        """Keep a copy of x, of the same shape and dtype, in the place of what the handle held."""
        ...

    def drop(self, h: Handle) -> None:
        """Forget a handle."""
        ...

    def close(self) -> None:
        """End the pool; an AssertionError if a handle or a lease is left."""
        ...

    def clear(self) -> None:
        """After an error: wait for the workers, forget every handle, lease and error."""
        ...


def poison_bytes(x: Tensor) -> None:
    """Fill contiguous x with NaN, so that a use after it was given back is seen."""
    x.detach().view(-1).view(torch.uint8).fill_(_NAN_BYTE)
