"""One direction between two processes: where the messages of a link go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from furlong.errors import LinkError

_T = TypeVar("_T")


class Work(Protocol):
    """A send or a receive that has begun."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class Wire(Protocol):
    """One direction between two processes: messages arrive in the order in which they were sent."""

    def isend(self, x: Tensor) -> Work: ...
    def irecv(self, x: Tensor) -> Work: ...


@dataclass(frozen=True, slots=True)
class GroupWire:
    """A `Wire` on a process group of its own."""

    peer: int
    """The other process, by its number in the world."""
    group: dist.ProcessGroup

    def isend(self, x: Tensor) -> Work:
        return _begun(dist.isend(x, self.peer, group=self.group))

    def irecv(self, x: Tensor) -> Work:
        return _begun(dist.irecv(x, self.peer, group=self.group))


def _begun(work: dist.Work | None) -> Work:
    assert work is not None, "this process is not in the group of the link"
    return work


def guarded(link: str, text: str, act: Callable[[], _T]) -> _T:
    """Call `act`; what a backend raises names the link and the action."""
    try:
        return act()
    except RuntimeError as error:
        raise LinkError(f"{link} broke at '{text}': {error}") from error
