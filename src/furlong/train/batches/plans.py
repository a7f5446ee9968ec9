"""Plans of global batches over the processes of a run: made by the first one, ahead of time.

The others fetch the text from the store, under a name that says for what it was made. Nobody waits
in a collective for a plan, and a process that sees another batch finds no plan of it.
"""

from __future__ import annotations

import json
import time
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256

from furlong.errors import ElsewhereError
from furlong.plan.layout import Layout
from furlong.plan.saved import load_plan, save_plan
from furlong.plan.values import ChunkPlan
from furlong.planners.auto.rivals import CHUNKS, Rivals
from furlong.planners.chunks.balance import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders.replica import plan_replica
from furlong.planners.orders.replicas import join_kept
from furlong.runtime.parallel.recovery import reason_of
from furlong.train.processes.together import Processes

_FAILURE = "failed: "
"""Before the reason in the place of a plan that could not be made; no plan's text has a space."""
_NUM_KEPT = 4
"""Plans that stay in the store: whoever takes the last one has the one before."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch to be planned."""

    seq_lens: tuple[int, ...]
    options: ChunkOptions
    backward: bool = True

    @property
    def name(self) -> str:
        """The same on every process that sees the same batch."""
        values = {"seq_lens": self.seq_lens, "backward": self.backward} | asdict(self.options)
        return f"plan/{sha256(json.dumps(values).encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of a batch."""

    plan: ChunkPlan
    method: str = ""
    """Names of the planners of its replicas, see `planners.auto.rivals`; known to the first process
    alone."""


def plan_batch(
    wanted: Wanted,
    *,
    layout: Layout,
    stages: Sequence[int] = (),
    work: Callable[[Sequence[int]], Sequence[float]],
    num_layers: int,
    frozen_layers: int = 0,
    rivals: Rivals | None = None,
) -> BatchPlan:
    """A checked plan in which each replica walks its own sequences: as one device would, as one
    pool over which each chunk is divided, as a pipeline in state-aware 1F1B, or as one of the
    `rivals` that is predicted to be faster.

    `stages`: layers of each stage of a pipeline. `work`: the FLOPs of each sequence, or whatever
    else is to be dealt out evenly. Where there are fewer sequences than replicas some have a dummy.
    """
    num_busy = min(layout.dp, len(wanted.seq_lens))
    dealt = by_cost(work(wanted.seq_lens), num_busy)
    is_cut = layout.pp > 1 or wanted.options.order == "layer-first"
    frozen = frozen_layers if is_cut and wanted.backward else 0
    methods, plans = [], []
    for own in dealt:
        seq_lens = [wanted.seq_lens[seq_id] for seq_id in own]
        method, plan = CHUNKS, plan_replica(
            seq_lens, wanted.options,
            num_layers=num_layers, stages=stages, sp_size=layout.sp, backward=wanted.backward,
            frozen_layers=frozen,
        )  # fmt: skip
        if rivals is not None and wanted.backward:
            method, plan = rivals.fastest(seq_lens, plan, wanted.options, frozen_layers=frozen)
        methods.append(method)
        plans.append(plan)
    plan = join_kept(plans, dealt, wanted.seq_lens, layout.dp)
    return BatchPlan(plan, ", ".join(dict.fromkeys(methods)))


class SharedPlans:
    """The plans of a run of several processes, in the order in which all of them ask."""

    def __init__(self, processes: Processes, make: Callable[[Wanted], BatchPlan]) -> None:
        """`make` runs in a thread of the first process."""
        self._processes, self._make = processes, make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._coming: dict[str, tuple[Wanted, Future[BatchPlan]]] = {}
        self._given: list[str] = []
        self._outdated: set[str] = set()
        """Plans that nobody will ask for."""
        self._is_closed = False
        self.waited_s = 0.0
        """Seconds that the last `get` has waited."""

    def expect(self, wanted: Wanted) -> None:
        """Begin to make, or to fetch, a plan that will be asked for."""
        if wanted.name not in self._coming:
            self._outdated.discard(wanted.name)
            future = self._thread.submit(self._find, wanted)
            self._coming[wanted.name] = wanted, future

    def get(self, wanted: Wanted) -> BatchPlan:
        """The plan, the same on all processes, which all ask for it.

        What was expected with other options, before chunks were made smaller, is expected with
        those of now. Raises ElsewhereError where the first process could not make the plan.
        """
        started_s = time.perf_counter()
        outdated = [own for own, _ in self._coming.values() if own.options != wanted.options]
        for own in outdated:
            self._coming.pop(own.name)[1].cancel()
            self._outdated.add(own.name)
            self._given.append(own.name)
        self.expect(wanted)
        for own in outdated:
            if own.seq_lens != wanted.seq_lens:
                self.expect(replace(own, options=wanted.options))
        try:
            planned = self._coming[wanted.name][1].result()
        finally:
            del self._coming[wanted.name]
            self._given.append(wanted.name)
        if self._processes.is_first:
            self._forget()
        self.waited_s = time.perf_counter() - started_s
        return planned

    def close(self) -> None:
        """End the thread, when nobody asks any more."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def _find(self, wanted: Wanted) -> BatchPlan:
        if not self._processes.is_first:
            text = self._processes.fetch(wanted.name, partial(self._is_over, wanted.name))
            return BatchPlan(unpacked(text))
        try:
            planned = self._make(wanted)
        except Exception as error:
            self._processes.publish(wanted.name, _FAILURE + reason_of(error))
            raise
        self._processes.publish(wanted.name, packed(planned.plan))
        return planned

    def _is_over(self, name: str) -> bool:
        return self._is_closed or name in self._outdated

    def _forget(self) -> None:
        """Let go of texts that all have fetched by now."""
        kept = {*self._given[-_NUM_KEPT:], *self._coming}
        self._processes.forget(*(name for name in self._given if name not in kept))
        self._given = self._given[-_NUM_KEPT:]


def packed(plan: ChunkPlan) -> str:
    """A plan as short text."""
    return b85encode(zlib.compress(save_plan(plan).encode(), 1)).decode()


def unpacked(text: str) -> ChunkPlan:
    """The inverse of `packed`. Raises ElsewhereError where there is no plan."""
    if text.startswith(_FAILURE):
        raise ElsewhereError(f"no plan of process 0 ({text.removeprefix(_FAILURE)})")
    return load_plan(zlib.decompress(b85decode(text)).decode())
