"""A segment: some stored tokens of one sequence in one layer, their K,V and their gradients.

S stored tokens, K key-value heads, H head dim; tensors of the store are token-major
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from furlong.kv.arena import Arena
from furlong.kv.pools.contract import Handle, Lease, Pool

_T = TypeVar("_T")


@dataclass
class Segment:
    """Stored tokens [start, stop); its tensors (S, 2, K, H) are in the arena or in the pool."""

    start: int
    stop: int
    kv: Tensor | None = None
    kv_handle: Handle | None = None
    grad: Tensor | None = None
    grad_handle: Handle | None = None
    written: set[int] = field(default_factory=set)
    """Pieces that were written since it came into being."""

    @property
    def is_alive(self) -> bool:
        return self.kv is not None or self.kv_handle is not None

    def kv_rows(self, tokens: range) -> Tensor:
        """K,V of those of `tokens` that it holds, while it is in the arena."""
        return present(self.kv)[self.rows(tokens)]

    def rows(self, tokens: range) -> slice:
        """Where it holds those of `tokens` that it holds."""
        start, stop = max(tokens.start, self.start), min(tokens.stop, self.stop)
        return slice(start - self.start, stop - self.start)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Implements `ops.layer_kv.PrefixBlock`."""

    kv: Tensor  # (S, 2, K, H)
    distance: int
    add: Callable[[Tensor, Tensor], None]

    @property
    def k(self) -> Tensor:
        return self.kv[:, 0].transpose(0, 1)  # (K, S, H)

    @property
    def v(self) -> Tensor:
        return self.kv[:, 1].transpose(0, 1)  # (K, S, H)

    def add_grad(self, dk: Tensor, dv: Tensor) -> None:
        self.add(dk, dv)


class SegmentGradient:
    """The gradients of one segment while its block is read: brought on the first `add`."""

    def __init__(
        self, arena: Arena, pool: Pool, segment: Segment, zeros: Callable[[Segment], Tensor]
    ) -> None:
        self._arena, self._pool, self._segment, self._zeros = arena, pool, segment, zeros
        self._lease: Lease | None = None
        self._touched = False

    def rows(self, tokens: range) -> slice:
        return self._segment.rows(tokens)

    def add(self, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (K, rows, H)."""
        segment = self._segment
        if segment.grad is None and self._lease is None:
            if segment.grad_handle is None:
                segment.grad = self._zeros(segment)
            else:
                self._lease = self._pool.get(segment.grad_handle)
        grad = present(segment.grad if self._lease is None else self._lease.tensor)
        add_token_major(grad[rows], dk, dv)
        self._touched = True

    def settle(self, *, stays: bool) -> None:
        """Leave them in the arena, or send them to the pool."""
        segment, lease = self._segment, self._lease
        if not self._touched:
            return
        if stays and lease is not None:
            segment.grad = self._arena.take(tuple(lease.tensor.shape), lease.tensor.dtype)
            segment.grad.copy_(lease.tensor)
            lease.release()
            self._pool.drop(present(segment.grad_handle))
            segment.grad_handle = None
        elif lease is not None:
            lease.write_back()
        elif not stays:
            grad = present(segment.grad)
            segment.grad_handle = self._pool.put(grad)
            self._arena.give(grad)
            segment.grad = None


def add_token_major(grad: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dk, dv (K, S, H) to grad (S, 2, K, H)."""
    grad[:, 0] += dk.transpose(0, 1)
    grad[:, 1] += dv.transpose(0, 1)


def present(x: _T | None) -> _T:
    assert x is not None
    return x


def joined(parts: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors (rows, ...), those that lie behind one another in memory as one view."""
    views: list[Tensor] = []
    for part in parts:
        last = views[-1] if views else None
        if (
            last is not None
            and last.data_ptr() + last.nbytes == part.data_ptr()
            and last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        ):
            shape = (last.shape[0] + part.shape[0], *last.shape[1:])
            views[-1] = last.as_strided(shape, last.stride())
        else:
            views.append(part)
    return views
