"""Graphs of retained cells in a lower tier: what autograd saves goes into a pool and comes back.

Parameters, buffers and small tensors stay where they are. A storage that is saved several times (a
residual by a norm and an addition, q by rotary embedding and attention) goes out once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from furlong.kv.pools import Handle, Pool

_MIN_BYTES = 4096
"""Smaller tensors, and those that are no floating-point numbers, are not worth the way."""


@dataclass(frozen=True, slots=True)
class _Away:
    """A saved tensor whose storage is in the pool."""

    handle: Handle
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class SavedGraph:
    """Tensors that one graph has saved into a pool."""

    pool: Pool
    _handles: list[Handle] = field(default_factory=list)

    @contextmanager
    def saving(self, stays: Iterable[Tensor]) -> Iterator[None]:
        """Within it what autograd saves goes into the pool, but for tensors that share memory with
        one of `stays`."""
        known = {x.untyped_storage().data_ptr() for x in stays if not isinstance(x, DTensor)}
        sent: dict[tuple[int, int, torch.dtype], tuple[Handle, Tensor]] = {}
        # The table holds the tensors: an address that is free could be another tensor's next.

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers call it too
        def pack(x: Tensor) -> Tensor | _Away:
            storage = x.untyped_storage()
            small = storage.nbytes() < _MIN_BYTES or not x.is_floating_point()
            # a weight that was divided is gathered only now
            is_weight = isinstance(x if x._base is None else x._base, nn.Parameter)
            if small or is_weight or storage.data_ptr() in known:
                # with its graph it would hold the very node that saves it: what no backward
                # reaches (a norm behind a stage, all after an error) would never be freed
                return x.detach()
            key = storage.data_ptr(), x._version, x.dtype
            if key not in sent:
                with torch.no_grad():
                    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)  # type: ignore[call-overload]
                    sent[key] = self.pool.put(flat), x
                self._handles.append(sent[key][0])
            return _Away(sent[key][0], x.shape, x.stride(), int(x.storage_offset()))

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            sent.clear()  # the graph keeps `pack`, and with it all that the table holds

    def _unpack(self, packed: Tensor | _Away) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        lease = self.pool.get(packed.handle)
        with torch.no_grad():
            # a copy, so that the pool's buffer is free again while autograd uses the tensor
            flat = lease.tensor.clone()
        lease.release()
        return flat.as_strided(packed.shape, packed.stride, packed.offset)

    def drop(self) -> None:
        """Forget what was saved, after the backward."""
        for handle in self._handles:
            self.pool.drop(handle)
        self._handles.clear()
