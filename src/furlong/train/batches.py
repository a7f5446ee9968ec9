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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from furlong.data.loader import Batch
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import ElsewhereError, reason_of
from furlong.plan.plan import ChunkPlan, Layout
from furlong.planners.candidates import CHUNKS
from furlong.planners.chunks import by_cost
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import gathered_first, join_kept, plan_replica
from furlong.planners.search import BatchPlans
from furlong.planners.spaco import num_drawn, sampled
from furlong.runtime.distributed.consensus import together
from furlong.runtime.distributed.mesh import allow_time
from furlong.train.processes import ALONE, Processes, limit_of_step

if TYPE_CHECKING:
    from furlong.api import Engine
    from furlong.runtime.step import StepResult


Work = Callable[[Sequence[int]], Sequence[float]]
"""FLOPs of each sequence by its length, or whatever else is to be dealt out evenly."""

Seconds = Callable[[ChunkPlan], float]
"""Seconds that a step of a plan is predicted to take."""


class Wanted(NamedTuple):
    """A batch to be planned."""

    seq_lens: tuple[int, ...]
    options: ChunkOptions
    backward: bool = True

    @classmethod
    def of(cls, batch: Batch, options: ChunkOptions, *, backward: bool = True) -> Wanted:
        """The plan of all chunks of a batch, of which a sample leaves some out."""
        return cls(batch.seq_lens, replace(options, sample=None), backward)


class Planned(NamedTuple):
    """The plan of a batch."""

    method: str
    """Names of the planners of its replicas, see `planners.search`."""
    plan: ChunkPlan
    step_s: float = 0.0
    """Seconds that its slowest replica is predicted to take, 0 where nothing predicts them."""


@dataclass(frozen=True)
class BatchPlanner:
    """Plans in which each replica walks its own sequences: as one device would, as one pool over
    which each chunk is divided, as a pipeline in state-aware 1F1B, or as one of the `alternatives`
    that is predicted to be faster. Where there are fewer sequences than replicas some have a dummy.
    """

    layout: Layout
    work: Work
    num_layers: int
    stages: Sequence[int] = ()
    """Layers of each stage of a pipeline."""
    frozen_layers: int = 0
    alternatives: BatchPlans | None = None
    seconds: Seconds = lambda plan: 0.0

    def plan(self, wanted: Wanted) -> Planned:
        """The checked plan of all replicas."""
        num_replicas = len(self._dealt(wanted))
        return self.joined(wanted, [self.own(wanted, replica) for replica in range(num_replicas)])

    def own(self, wanted: Wanted, replica: int) -> Planned:
        """The plan of the sequences that a replica is dealt, numbered from 0."""
        options = wanted.options
        seq_lens = [wanted.seq_lens[seq_id] for seq_id in self._dealt(wanted)[replica]]
        is_cut = self.layout.pp > 1 or options.order == "layer-first"
        frozen = self.frozen_layers if is_cut and wanted.backward else 0
        plan = plan_replica(
            seq_lens, options, num_layers=self.num_layers, stages=self.stages,
            sp_size=self.layout.sp, backward=wanted.backward, frozen_layers=frozen,
        )  # fmt: skip
        method = CHUNKS
        if self.alternatives is not None and wanted.backward:
            method, plan = self.alternatives.best_plan(
                seq_lens, plan, options, frozen_layers=frozen
            )
        return Planned(method, plan, self.seconds(gathered_first(plan)))

    def joined(self, wanted: Wanted, found: Sequence[Planned]) -> Planned:
        """The checked plan of all replicas from their own."""
        plans = [own.plan for own in found]
        plan = join_kept(plans, self._dealt(wanted), wanted.seq_lens, self.layout.dp)
        methods = ", ".join(dict.fromkeys(own.method for own in found))
        return Planned(methods, plan, max(own.step_s for own in found))

    def _dealt(self, wanted: Wanted) -> Sequence[Sequence[int]]:
        """The sequences of each replica that has one; those of a process that is alone in the order
        in which it would take them without ranks."""
        if self.layout.num_devices == 1:
            return [range(len(wanted.seq_lens))]
        return by_cost(self.work(wanted.seq_lens), min(self.layout.dp, len(wanted.seq_lens)))


class SharedPlans:
    """The plans of a run of several processes, made in a thread in the order in which all ask."""

    def __init__(self, processes: Processes, replica: int | None, planner: BatchPlanner) -> None:
        """`replica`: the one that this process plans for, if any. A collective."""
        self._processes, self._replica, self._planner = processes.apart(), replica, planner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._coming: dict[Wanted, Future[Planned]] = {}
        self.waited_s = 0.0
        """Seconds that the last `get` has waited."""

    def expect(self, wanted: Wanted) -> None:
        """Begin to make a plan that will be asked for."""
        if wanted not in self._coming:
            self._coming[wanted] = self._thread.submit(self._make, wanted)

    def get(self, wanted: Wanted) -> Planned:
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

    def _make(self, wanted: Wanted) -> Planned:
        own: Planned | Exception | None = None
        if self._replica is not None and self._replica < len(wanted.seq_lens):
            try:
                own = self._planner.own(wanted, self._replica)
            except Exception as error:
                own = error
        told = reason_of(own) if isinstance(own, Exception) else own
        # in the order of their replicas, as `make_ranks` numbers processes
        found = [made for made in self._processes.each(told) if made is not None]
        if isinstance(own, Exception):
            raise own
        if reason := next((made for made in found if isinstance(made, str)), ""):
            raise ElsewhereError(f"no plan of another process ({reason})")
        plans = [made for made in found if isinstance(made, Planned)]
        planned = self._planner.joined(wanted, plans)
        assert planned.plan.checksum >= 0  # here, and not where the step waits for it
        return planned


class BatchEngine:
    """The engine of this process among those of all; one alone is its own engine."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes = ALONE,
        work: Work = lambda seq_lens: seq_lens,
        stages: Sequence[int] = (),
        alternatives: BatchPlans | None = None,
        seconds: Seconds = lambda plan: 0.0,
    ) -> None:
        """`work`: what is dealt out evenly over the replicas, for each sequence. `stages`: layers
        of each stage of a pipeline. `alternatives`: other plans than those of the options, which
        the first process may take. `seconds`: of a replica's plan, for which the others wait."""
        self.engine, self.processes = engine, processes
        self.method: str | None = None
        """Names of the planners of the last plan, on the first of several processes."""
        self._plans: SharedPlans | None = None
        if engine.ranks is not None:
            model, ranks = engine.model, engine.ranks
            frozen = processes.each(model.num_frozen_layers)
            layout = Layout(ranks.dp, ranks.sp, ranks.pp)
            planner = BatchPlanner(
                layout, work, model.num_layers, stages, min(frozen), alternatives, seconds
            )
            own = ranks.replica if ranks.process == ranks.stage == 0 else None
            self._plans = SharedPlans(processes, own, planner)

    @property
    def model(self) -> nn.Module:
        """The model of transformers."""
        return self.engine.model.model

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.engine.model.device

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
            return self.engine.forward_backward(
                batch.tensors(), options, divisor, backward, watch=watch
            )
        plans = self._plans

        def prepare() -> tuple[str, ChunkPlan, Mapping[int, Mapping[str, Tensor]]]:
            method, plan, step_s = plans.get(Wanted.of(batch, options, backward=backward))
            allow_time(limit_of_step(step_s))
            if backward:
                plan = with_draw(plan, batch, options)
            return method, plan, batch.part(self.engine.reads(plan))

        # a process that has no plan, or cannot read its sequences, tells the others
        self.method, plan, own = together(self.engine.ranks, prepare)
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
