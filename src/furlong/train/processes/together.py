"""Agreement among the processes of a run: sums, flags, values of the first one, and errors.

Waiting happens in the store and not in collectives, for as long as anybody takes: who has died
meanwhile is found by the heartbeats. A process that has failed waits for the others a while only:
they may be in a collective in which it is missing. Alone nothing here needs torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from furlong import errors
from furlong.errors import UserError
from furlong.train.processes.flight import Flight, flight_file, remove_flights
from furlong.train.processes.launch import Launch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

_T = TypeVar("_T")
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.01, 0.5
"""Seconds between two looks into the store: a tenth of the wait so far. The store is one for all,
and blocking in it would neither heed signals nor let another thread use the connection."""


class Processes:
    """This process among all of a run; alone it agrees with itself."""

    def __init__(
        self, launch: Launch, store: Store | None = None, *, patience_s: float = 20.0
    ) -> None:
        """`store`: shared by all; None where there is one process. `patience_s`: how long a process
        that has failed waits for the others."""
        self.launch, self._patience_s = launch, patience_s
        self.flight = Flight()
        self.common: UserError | None = None
        """The error that every process is raising."""
        self._store = store
        self._calls = 0

    @property
    def is_first(self) -> bool:
        return self.launch.is_first

    @property
    def num_processes(self) -> int:
        return self.launch.num_processes

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums of each value over all processes, in float64. A collective."""
        if self._store is None:
            return list(values)
        import torch
        from torch import distributed as dist

        added = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(added)
        return added.tolist()

    def gathered(self, x: Tensor) -> Tensor:
        """The tensor of each process, one below the other: (N, *shape of x), on the CPU; alone as
        it is. A collective."""
        if self._store is None:
            return x
        import torch
        from torch import distributed as dist

        found = [torch.empty_like(x) for _ in range(self.num_processes)]
        dist.all_gather(found, x)
        return torch.stack(found)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process. A collective."""
        return self.sums([float(flag)])[0] > 0

    def alike(self, error: UserError) -> UserError:
        """The error, which every process has made of the same figures and is about to raise."""
        if self._store is not None:
            self.common = error
        return error

    def together(self, work: Callable[[], _T]) -> _T:
        """The outcome of `work` on this process. Where it raises a UserError on any process, all
        raise it: the first process's own if it has one."""
        failure, result = None, None
        try:
            result = work()
        except UserError as error:
            failure = error
        self._share(failure)
        return result  # type: ignore[return-value]

    def by_first(self, work: Callable[[], Any]) -> Any:
        """The outcome of `work` on the first process, which alone does it: a value of JSON."""
        failure, value = None, None
        key = f"value/{self._calls}"
        try:
            if self.is_first:
                value = work()
                self.publish(key, json.dumps(value))
        except UserError as error:
            failure = error
        self._share(failure)
        if not self.is_first:
            value = json.loads(self.fetch(key))
        return value

    def first_of_each_machine(self, work: Callable[[], _T]) -> _T:
        """The outcome of `work`; the first process of each machine does it before the others, who
        then find on disk what it took its time for."""
        if self.launch.local_number == 0:
            return self._then(work, lambda result: result)
        return self._then(lambda: None, lambda _: work())

    def _then(self, before: Callable[[], Any], after: Callable[[Any], _T]) -> _T:
        result = self.together(before)
        return self.together(lambda: after(result))

    def at(self, text: str) -> None:
        """This process begins what `text` says; the others tell it where this one stops."""
        if self._store is not None:
            self.flight.at(text)

    def keep_flight(self, run: Path) -> None:
        """From now on the positions of several processes are in the folder of their run."""
        if self._store is not None:
            self.flight.write_to(flight_file(run, self.launch.attempt, self.launch.number))

    def end_flight(self, run: Path) -> None:
        """All have come to their end: nobody needs to know where they were."""
        self.together(self.flight.close)
        if self.is_first:
            remove_flights(run)

    def to_first(self, text: str) -> list[str]:
        """The text of each process, on the first one; nothing on the others."""
        if self._store is None:
            return [text]
        self.publish(f"text/{self.launch.number}", text)
        found = []
        if self.is_first:
            keys = [f"text/{number}" for number in range(self.num_processes)]
            found = [self.fetch(key) for key in keys]
            self.forget(*keys)
        self.together(lambda: None)  # or the next call would find these texts
        return found

    def of_each(self, text: str) -> list[str]:
        """The text of each process, on all of them."""
        told = self.to_first(text)
        return list(self.by_first(lambda: told))

    def publish(self, key: str, text: str) -> None:
        """Write a text that others fetch."""
        if self._store is not None:
            self._store.set(key, text)

    def fetch(self, key: str, is_over: Callable[[], bool] = lambda: False) -> str:
        """The text of a key, as soon as it is there. Raises TimeoutError when nobody waits for it
        any more."""
        assert self._store is not None
        started_s = time.monotonic()
        while not self._store.check([key]):
            if is_over():
                raise TimeoutError(key)
            pause_s = (time.monotonic() - started_s) / 10
            time.sleep(min(max(pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))
        return self._store.get(key).decode()

    def forget(self, *keys: str) -> None:
        """Let go of texts that nobody fetches any more."""
        for key in keys:
            if self._store is not None:
                self._store.delete_key(key)

    def _share(self, failure: UserError | None) -> None:
        """Raise the error of any process on all of them."""
        number, self._calls = self._calls, self._calls + 1
        if self._store is None:
            if failure is not None:
                raise failure
            return
        own = {"failure": None if failure is None else _written(failure)}
        self.publish(f"done/{number}/{self.launch.number}", json.dumps(own))
        until_s = inf if failure is None else time.monotonic() + self._patience_s

        def is_over() -> bool:
            return time.monotonic() > until_s

        try:
            if self.is_first:
                self._sum_up(number, is_over)
            found = json.loads(self.fetch(f"done/{number}", is_over))
        except TimeoutError:
            assert failure is not None
            raise failure from None  # of this process alone: the heartbeats tell the others
        if found["failure"] is None:
            return
        is_own = failure is not None and found["process"] == self.launch.number
        raise self.alike(failure if is_own and failure else _read(found))

    def _sum_up(self, number: int, is_over: Callable[[], bool]) -> None:
        """Publish the first error of all processes, or that there is none."""
        keys = [f"done/{number}/{process}" for process in range(self.num_processes)]
        found: dict[str, Any] = {"failure": None}
        for process, key in enumerate(keys):
            said = json.loads(self.fetch(key, is_over))
            if found["failure"] is None and said["failure"] is not None:
                found = said | {"process": process}
        self.publish(f"done/{number}", json.dumps(found))
        self.forget(*keys, f"done/{number - 2}", f"value/{number - 2}")

    def part(self, limit_s: float) -> None:
        """Return when all have called it, or when the limit is over; on the first process, which
        without torchrun holds the store, when no other one will ask it for anything any more."""
        if self._store is None:
            return
        rounds = ("left", "gone") if self.is_first else ("left",)
        try:
            for name in rounds:
                self._store.set(f"{name}/{self.launch.number}", "")
                keys = [f"{name}/{process}" for process in range(self.num_processes)]
                self._store.wait(keys, timedelta(seconds=limit_s))
            if not self.is_first:
                self._store.set(f"gone/{self.launch.number}", "")
        except RuntimeError:
            return


ALONE = Processes(Launch())
"""One process, which keeps no position and agrees with itself."""


def _written(error: UserError) -> dict[str, str]:
    names = ("given", "required", "source", "change")
    return {"kind": type(error).__name__} | {name: getattr(error, name) for name in names}


def _read(found: dict[str, Any]) -> UserError:
    """An error of another process, by name."""
    parts = dict(found["failure"])
    kind = getattr(errors, parts.pop("kind"), UserError)
    if found["process"]:
        parts["given"] = f"process {found['process']}: {parts['given']}"
    error = kind(**parts)
    assert isinstance(error, UserError)
    return error
