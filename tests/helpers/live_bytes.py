"""Count the bytes of tensors that a piece of work creates and holds at a time, by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators create, until the storages are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.beside: Callable[[], int] = lambda: 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        # weights exist before, so a view of one is not a new storage
        given = {s._cdata for s in self._storages((args, kwargs), torch.nn.Parameter)}
        made = func(*args, **(kwargs or {}))
        for storage in self._storages(made):
            key = storage._cdata
            if key in self._seen or key in given:
                continue
            self._seen.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.peak = max(self.peak, self.now + self.beside())
        return made

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes

    @staticmethod
    def _storages(tree: Any, *more: type) -> list[torch.UntypedStorage]:
        kinds = (torch.Tensor, *more)
        return [x.untyped_storage() for x in tree_leaves(tree) if type(x) in kinds]
