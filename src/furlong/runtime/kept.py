"""State that outlives the calls on a model, as long as the model lives."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from furlong.kv.arena import Arena
from furlong.kv.pools.lanes import is_lane
from furlong.ops.choose import ProbedBackend
from furlong.runtime.memory.pools import Pools, Storage
from furlong.runtime.parallel.exchange import AllToAll
from furlong.runtime.parallel.pipeline import Pipeline
from furlong.runtime.parallel.ranks import Ranks


@dataclass
class Kept:
    """State of one model: its buffers, the kernels that were probed, the checks that it passed."""

    pools: Pools | None = None
    backend: ProbedBackend = field(default_factory=ProbedBackend)
    checked: set[tuple[Any, ...]] = field(default_factory=set)
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held by the call that runs."""
    thread: int | None = None
    """The thread of that call."""
    pooled: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever takes memory of the pools or gives it back: a call, or a `sweep`."""
    process: int = field(default_factory=os.getpid)
    """The process that has opened the pools."""
    ranks: Ranks | None = None
    """The processes among which the weights are divided, for good."""
    pipeline: Pipeline | None = None
    """The links to other stages, where the ranks have several."""
    exchange: AllToAll | None = None
    """That of the pool, where the ranks have pools."""
    trained_layers: range | None = None
    """The layers that this process of a pipeline has trained."""
    heights: tuple[int, ...] = ()
    """Layers of each stage, where the ranks have several."""
    is_settled: bool = True
    """Whether nothing of an earlier step is left under way between the processes."""
    compute_dtype: torch.dtype | None = None
    """The dtype in which divided weights are gathered."""
    room_bytes: int | None = None
    """Bytes of the device that calls with a keep of auto may use, measured at the first one."""
    has_drawn: bool = False
    """Whether a forward in train mode has drawn random numbers."""
    decided: str = ""
    """The keep that the last call with a keep of auto has got."""
    dropped: deque[Callable[[], None]] = field(default_factory=deque)
    """Ends of calls whose values nobody holds any more."""

    def exchange_of(self, ranks: Ranks | None) -> AllToAll | None:
        """The exchange with the others of a pool, always the same one; None without others."""
        if ranks is None or ranks.sp == 1:
            return None
        self.exchange = self.exchange or AllToAll(ranks.place_groups)
        return self.exchange

    def drop(self, end: Callable[[], None]) -> None:
        """Give back what a call holds: at once, or when the call that runs now is over."""
        self.dropped.append(end)
        self.sweep()

    def sweep(self) -> None:
        """Give back what was dropped, unless a call runs. A pool's own thread, in which the garbage
        collector may drop values, leaves that to others: it would wait for itself."""
        if is_lane():
            return
        while self.dropped and self.pooled.acquire(blocking=False):
            try:
                while self.dropped:
                    self.dropped.popleft()()
            finally:
                self.pooled.release()

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Within it a call of this thread runs; False, and nothing, if another one does."""
        if not self.busy.acquire(blocking=False):
            yield False
            return
        try:
            if self.process != os.getpid():
                self.pooled = threading.Lock()  # a thread of the parent may have held it
            with self.pooled:  # a sweep of another thread is over soon
                self.thread = threading.get_ident()
                try:
                    yield True
                finally:
                    self.thread = None
        finally:
            self.busy.release()
            self.sweep()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the call that runs."""
        return self.thread == threading.get_ident()

    def free(self) -> None:
        """Give back the memory, threads and files of the pools; the next call opens its own."""
        if self.pools is not None:
            self.pools.close()
            self._renew(self.pools)

    @property
    def opened(self) -> Pools:
        """The pools, which `open_pools` has made."""
        assert self.pools is not None
        self._leave_parent()
        return self.pools

    def open_pools(self, device: torch.device, storage: Storage | None) -> None:
        """Make the pools of a device; anew if the device or the given storage is another one."""
        self._leave_parent()
        if self.pools is not None:
            storage = storage or self.pools.storage
            if self.pools.arena.device == device and self.pools.storage == storage:
                return
            self.pools.close()
        storage = storage or Storage()
        self.pools = Pools(Arena(device, poison=storage.poison), storage)

    def _leave_parent(self) -> None:
        """In a fork use pools of its own: threads did not come along, and the file is the
        parent's."""
        if self.process != os.getpid():
            self.process = os.getpid()
            if self.pools is not None:
                self._renew(self.pools)

    def _renew(self, pools: Pools) -> None:
        storage = pools.storage
        self.pools = Pools(Arena(pools.arena.device, poison=storage.poison), storage)
