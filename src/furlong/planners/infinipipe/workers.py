"""Plans made beside training: in processes of their own, without torch.

    with PlanWorkers(2) as workers:
        ahead = workers.submit(plan_infinipipe, lens_of(batches[0]), model, num_stages=4)
        for batch, later in pairwise(batches):
            plan = ahead.result().plan
            ahead = workers.submit(plan_infinipipe, lens_of(later), model, num_stages=4)
            train(batch, plan)

InfiniPipe (3.3.4) hides its solver like this behind the step before. Planners are pure functions of
values that pickle, so any of them will do; one that runs in a worker solves its integer programs
there. Workers import the script that uses this, so it needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PlanWorkers:
    """`num_workers` processes, started when first needed; with 0 everything runs right here."""

    def __init__(self, num_workers: int = 1) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if num_workers > 0:
            # a fork of a process with CUDA or threads is not safe; a fork server has neither
            context = multiprocessing.get_context("forkserver")
            self._pool = ProcessPoolExecutor(num_workers, mp_context=context)

    def submit(self, plan: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin plan(*args, **kwargs); the future's `result()` waits for it or raises its error."""
        if self._pool is not None:
            return self._pool.submit(plan, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(plan(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> Iterable[T]:
        """function(item) for every item, in their order, spread over the processes: the `solve_map`
        of `planners.infinipipe`."""
        return map(function, items) if self._pool is None else self._pool.map(function, items)

    def close(self) -> None:
        """End the processes; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> PlanWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
