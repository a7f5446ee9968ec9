"""Plans of global batches over the processes of a run: made ahead of time, joined by the first one.

A process of each replica plans what the replica is dealt, so that a plan takes as long for many
replicas as for one. All fetch the text of the joined plan from the store, under a name that says
for what it was made. Nobody waits in a collective for a plan, and a process that sees another batch
finds no plan of it.
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
from typing import Any

from furlong.errors import ElsewhereError
from furlong.plan.check import check
from furlong.plan.plan import ChunkPlan, Layout
from furlong.plan.text import load_plan, save_plan
from furlong.planners.candidates import CHUNKS
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, plan_replica
from furlong.planners.search import BatchPlans
from furlong.runtime.distributed.consensus import reason_of
from furlong.train.processes import Processes

_FAILURE = "failed: "
"""Before the reason in the place of a plan that could not be made; no planner is called so."""
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
    """Names of the planners of its replicas, see `planners.search`."""


def plan_batch(
    wanted: Wanted,
    elsewhere: Callable[[int], BatchPlan] | None = None,
    *,
    layout: Layout,
    work: Callable[[Sequence[int]], Sequence[float]],
    **dials: Any,
) -> BatchPlan:
    """A checked plan in which each replica walks its own sequences: as one device would, as one
    pool over which each chunk is divided, as a pipeline in state-aware 1F1B, or as one of the
    `rivals` that is predicted to be faster.

    `elsewhere`: the plan of a replica but the first; default: made here. `work`: the FLOPs of each
    sequence, or whatever else is to be dealt out evenly. `dials`: see `plan_own`. Where there are
    fewer sequences than replicas some have a dummy.
    """

    def make(replica: int) -> BatchPlan:
        return plan_own(wanted, replica, layout=layout, work=work, **dials)

    dealt = _dealt(wanted, layout, work)
    found = [make(0), *map(elsewhere or make, range(1, len(dealt)))]
    plans = [own.plan for own in found]
    plan = join_kept(plans, dealt, wanted.seq_lens, layout.dp)
    return BatchPlan(plan, ", ".join(dict.fromkeys(own.method for own in found)))


def plan_own(
    wanted: Wanted,
    replica: int,
    *,
    layout: Layout,
    work: Callable[[Sequence[int]], Sequence[float]],
    num_layers: int,
    stages: Sequence[int] = (),
    frozen_layers: int = 0,
    rivals: BatchPlans | None = None,
) -> BatchPlan:
    """The plan of the sequences that a replica is dealt, numbered from 0. `stages`: layers of each
    stage of a pipeline."""
    seq_lens = [wanted.seq_lens[seq_id] for seq_id in _dealt(wanted, layout, work)[replica]]
    is_cut = layout.pp > 1 or wanted.options.order == "layer-first"
    frozen = frozen_layers if is_cut and wanted.backward else 0
    plan = plan_replica(
        seq_lens, wanted.options,
        num_layers=num_layers, stages=stages, sp_size=layout.sp, backward=wanted.backward,
        frozen_layers=frozen,
    )  # fmt: skip
    if rivals is None or not wanted.backward:
        return BatchPlan(plan, CHUNKS)
    method, plan = rivals.best_plan(seq_lens, plan, wanted.options, frozen_layers=frozen)
    return BatchPlan(plan, method)


def _dealt(
    wanted: Wanted, layout: Layout, work: Callable[[Sequence[int]], Sequence[float]]
) -> Sequence[Sequence[int]]:
    """The sequences of each replica that has one."""
    return by_cost(work(wanted.seq_lens), min(layout.dp, len(wanted.seq_lens)))


class SharedPlans:
    """The plans of a run of several processes, in the order in which all of them ask."""

    def __init__(
        self,
        processes: Processes,
        make: Callable[[Wanted, Callable[[int], BatchPlan]], BatchPlan],
        make_own: Callable[[Wanted, int], BatchPlan] | None = None,
        replica: int | None = None,
    ) -> None:
        """`make`, see `plan_batch`, runs in a thread of the first process; `make_own`, `plan_own`,
        in one of the process that plans for a `replica` but the first."""
        self._processes, self._make = processes, make
        self._make_own, self._replica = make_own, replica
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
        found = self._made_or_fetched(wanted)
        assert found.plan.checksum >= 0  # here, and not where the step waits for it
        return found

    def _made_or_fetched(self, wanted: Wanted) -> BatchPlan:
        replica, name = self._replica, wanted.name
        if self._processes.is_first:
            return self._published(name, partial(self._make, wanted, partial(self._of, wanted)))
        if replica and self._make_own and replica < len(wanted.seq_lens):
            self._published(f"{name}/{replica}", partial(self._make_own, wanted, replica))
        return unpacked(self._processes.fetch(name, partial(self._is_over, name)))

    def _of(self, wanted: Wanted, replica: int) -> BatchPlan:
        """The plan of a replica, made by a process of its own."""
        key = f"{wanted.name}/{replica}"
        text = self._processes.fetch(key, partial(self._is_over, wanted.name))
        self._processes.forget(key)
        return unpacked(text)

    def _published(self, key: str, make: Callable[[], BatchPlan]) -> BatchPlan:
        try:
            made = make()
            text = packed(made)
        except Exception as error:
            self._processes.publish(key, _FAILURE + reason_of(error))
            raise
        self._processes.publish(key, text)
        return made

    def _is_over(self, name: str) -> bool:
        return self._is_closed or name in self._outdated

    def _forget(self) -> None:
        """Let go of texts that all have fetched by now."""
        kept = {*self._given[-_NUM_KEPT:], *self._coming}
        self._processes.forget(*(name for name in self._given if name not in kept))
        self._given = self._given[-_NUM_KEPT:]


def packed(made: BatchPlan) -> str:
    """A plan as short text."""
    text = b85encode(zlib.compress(save_plan(made.plan).encode(), 1)).decode()
    return f"{made.method}\n{text}"


def unpacked(text: str) -> BatchPlan:
    """The inverse of `packed`, checked. Raises ElsewhereError where there is no plan."""
    if text.startswith(_FAILURE):
        raise ElsewhereError(f"no plan of another process ({text.removeprefix(_FAILURE)})")
    method, _, saved = text.partition("\n")
    plan = load_plan(zlib.decompress(b85decode(saved)).decode())
    check(plan)
    return BatchPlan(plan, method)
