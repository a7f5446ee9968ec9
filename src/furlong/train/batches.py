"""Global batches over the processes of a run: their plans, made ahead of time, and their gradients.

A process of each replica plans what the replica is dealt, so that a plan takes as long for many
replicas as for one; all join the plans. That happens in a thread, by collectives of its own, while
the batch before trains. Each process runs out of memory on its own, and the engine tells all: they
take smaller chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from furlong.data.loader import Batch
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import ElsewhereError
from furlong.plan.plan import ChunkPlan, Layout
from furlong.planners.candidates import CHUNKS
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_kept, plan_replica
from furlong.planners.search import BatchPlans
from furlong.planners.spaco import num_drawn, sampled
from furlong.runtime.distributed.consensus import reason_of, together
from furlong.train.processes import ALONE, Processes

if TYPE_CHECKING:
    from furlong.api import Engine
    from furlong.runtime.step import StepResult


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch to be planned."""

    seq_lens: tuple[int, ...]
    options: ChunkOptions
    backward: bool = True

    @classmethod
    def of(cls, batch: Batch, options: ChunkOptions, *, backward: bool = True) -> Wanted:
        """The plan of all chunks of a batch, of which a sample leaves some out."""
        return cls(batch.seq_lens, replace(options, sample=None), backward)


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
    **settings: Any,
) -> BatchPlan:
    """A checked plan in which each replica walks its own sequences: as one device would, as one
    pool over which each chunk is divided, as a pipeline in state-aware 1F1B, or as one of the
    `alternatives` that is predicted to be faster.

    `elsewhere`: the plan of a replica; default: made here. `work`: the FLOPs of each sequence, or
    whatever else is to be dealt out evenly. `settings`: see `plan_own`. Where there are fewer
    sequences than replicas some have a dummy.
    """

    def make(replica: int) -> BatchPlan:
        return plan_own(wanted, replica, layout=layout, work=work, **settings)

    dealt = _dealt(wanted, layout, work)
    found = [*map(elsewhere or make, range(len(dealt)))]
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
    alternatives: BatchPlans | None = None,
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
    if alternatives is None or not wanted.backward:
        return BatchPlan(plan, CHUNKS)
    method, plan = alternatives.best_plan(seq_lens, plan, wanted.options, frozen_layers=frozen)
    return BatchPlan(plan, method)


def _dealt(
    wanted: Wanted, layout: Layout, work: Callable[[Sequence[int]], Sequence[float]]
) -> Sequence[Sequence[int]]:
    """The sequences of each replica that has one."""
    return by_cost(work(wanted.seq_lens), min(layout.dp, len(wanted.seq_lens)))


class SharedPlans:
    """The plans of a run of several processes, made in a thread in the order in which all ask."""

    def __init__(self, processes: Processes, replica: int | None, **settings: Any) -> None:
        """`replica`: the one that this process plans for, if any. `settings`: see `plan_batch`. A
        collective."""
        self._processes, self._replica, self._settings = processes.apart(), replica, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._coming: dict[Wanted, Future[BatchPlan]] = {}
        self.waited_s = 0.0
        """Seconds that the last `get` has waited."""

    def expect(self, wanted: Wanted) -> None:
        """Begin to make a plan that will be asked for."""
        if wanted not in self._coming:
            self._coming[wanted] = self._thread.submit(self._make, wanted)

    def get(self, wanted: Wanted) -> BatchPlan:
        """The plan, the same on all processes, which all ask for it. Raises ElsewhereError where
        another process could not make its part."""
        started_s = time.perf_counter()
        self.expect(wanted)
        # what was expected before chunks were made smaller is never asked for
        for other in [own for own in self._coming if own.options != wanted.options]:
            del self._coming[other]
        try:
            return self._coming.pop(wanted).result()
        finally:
            self.waited_s = time.perf_counter() - started_s

    def close(self) -> None:
        """End the thread, when all processes have made what any has expected."""
        self._thread.shutdown()

    def _make(self, wanted: Wanted) -> BatchPlan:
        own: BatchPlan | Exception | None = None
        if self._replica is not None and self._replica < len(wanted.seq_lens):
            try:
                own = plan_own(wanted, self._replica, **self._settings)
            except Exception as error:
                own = error
        told = reason_of(own) if isinstance(own, Exception) else own
        # in the order of their replicas, as `make_ranks` numbers processes
        found = [made for made in self._processes.each(told) if made is not None]
        if isinstance(own, Exception):
            raise own
        plans = [made for made in found if isinstance(made, BatchPlan)]
        if reason := next((made for made in found if isinstance(made, str)), ""):
            raise ElsewhereError(f"no plan of another process ({reason})")
        planned = plan_batch(wanted, lambda replica: plans[replica], **self._settings)
        assert planned.plan.checksum >= 0  # here, and not where the step waits for it
        return planned


class BatchEngine:
    """The engine of this process among those of all; one alone is its own engine."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes = ALONE,
        work: Callable[[Sequence[int]], Sequence[float]] = lambda seq_lens: seq_lens,
        stages: Sequence[int] = (),
        alternatives: BatchPlans | None = None,
    ) -> None:
        """`work`: what is dealt out evenly over the replicas, for each sequence. `stages`: layers
        of each stage of a pipeline. `alternatives`: other plans than those of the options, which
        the first process may take."""
        self.engine, self.processes = engine, processes
        self.method: str | None = None
        """Names of the planners of the last plan, on the first of several processes."""
        self._plans: SharedPlans | None = None
        if engine.ranks is not None:
            model, ranks = engine.model, engine.ranks
            frozen = processes.each(model.num_frozen_layers)
            settings: dict[str, Any] = {
                "layout": Layout(ranks.dp, ranks.sp, ranks.pp), "stages": stages, "work": work,
                "num_layers": model.num_layers, "frozen_layers": min(frozen),
                "alternatives": alternatives,
            }  # fmt: skip
            is_of_replica = ranks.process == ranks.stage == 0
            own = ranks.replica if is_of_replica else None
            self._plans = SharedPlans(processes, own, **settings)

    @property
    def is_alone(self) -> bool:
        """Whether no other process computes a part of the batch."""
        return self._plans is None

    @property
    def waited_s(self) -> float | None:
        """Seconds of waiting for the last plan; None where the process plans as it goes."""
        return None if self._plans is None else self._plans.waited_s

    def expect(self, batch: Batch, options: ChunkOptions) -> None:
        """A step over this batch will come: its plan can be made."""
        if self._plans is not None and batch.num_valid_tokens:
            self._plans.expect(Wanted.of(batch, options))

    def compute(
        self,
        batch: Batch,
        options: ChunkOptions,
        device: torch.device,
        *,
        backward: bool = True,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Gradients of the batch's mean loss, or its losses; the loss is that of all processes, and
        token losses are those of the whole batch.

        `weights`: on several processes, see `Engine.run`. `watch`: see `Executor.run`. A process
        that fails raises its own error, and all others raise ElsewhereError.
        """
        if self._plans is None:
            divisor = batch.num_valid_tokens if backward else None
            sequences = batch.tensors(device)
            return self.engine.forward_backward(sequences, options, divisor, backward, watch=watch)
        plans = self._plans

        def prepare() -> tuple[BatchPlan, Mapping[int, Mapping[str, Tensor]]]:
            planned = plans.get(Wanted.of(batch, options, backward=backward))
            if backward:
                planned = replace(planned, plan=with_draw(planned.plan, batch, options))
            return planned, batch.part(self.engine.reads(planned.plan), device)

        # ids come onto the device: a process that lacks memory for them tells the others
        planned, own = together(self.engine.ranks, prepare)
        plan, self.method = planned.plan, planned.method or None
        return self.engine.run(plan, own, batch.num_valid_tokens, weights=weights, watch=watch)

    def share(self, num_sequences: int) -> range:
        """The sequences of a batch whose token losses, which all have, this process counts."""
        return range(self.processes.launch.number, num_sequences, self.processes.num_processes)

    def close(self) -> None:
        """No batch will come any more."""
        if self._plans is not None:
            self._plans.close()


def step_options(options: ChunkOptions, step: int) -> ChunkOptions:
    """Options whose draw is that of a step: it follows from the run's seed and the step's number
    alone, so that a step that is repeated, or computed after a resume, draws the same chunks."""
    sampling = options.sampling
    if sampling is None:
        return options
    return replace(options, sample=replace(sampling, seed=((sampling.seed or 0) << 32) + step))


def drawn_share(plan: ChunkPlan | None) -> float | None:
    """Share of a plan's chunks that were drawn, whole sequences among them; None: it draws none."""
    if plan is None or not plan.sampled:
        return None
    return num_drawn(plan) / len(plan.chunks)


def with_draw(plan: ChunkPlan, batch: Batch, options: ChunkOptions) -> ChunkPlan:
    """The plan with the draw that `options` ask for, if any: the same on all processes that have
    the batch, whose labels are read."""
    if options.sampling is None:
        return plan
    return sampled(plan, options.sampling, _labelled(plan, batch))


def _labelled(plan: ChunkPlan, batch: Batch) -> set[int]:
    """The chunks of cut sequences that have a label: that of a token is the token behind it."""
    found = set()
    for index in {chunk for group in plan.groups.values() for chunk in group}:
        for piece in plan.chunks[index].slices:
            labels = batch.sequences[piece.seq_id].labels[piece.start + 1 : piece.stop + 1]
            if np.any(labels != IGNORE_INDEX):
                found.add(index)
    return found
