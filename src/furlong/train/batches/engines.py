"""A global batch, computed by all processes of a run: one plan, and to each its own sequences.

Each process runs out of memory on its own, and the engine tells all: they take smaller chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from furlong.data.loader import Batch
from furlong.plan.plan import Layout
from furlong.plan.text import format_action
from furlong.planners.options import ChunkOptions
from furlong.planners.search import BatchPlans
from furlong.runtime.distributed.consensus import together
from furlong.train.batches.draws import with_draw
from furlong.train.batches.plans import BatchPlan, SharedPlans, Wanted, plan_batch, plan_own
from furlong.train.processes import ALONE, PLAN, Processes

if TYPE_CHECKING:
    from furlong.api import Engine
    from furlong.runtime.step import StepResult


def _tokens(seq_lens: Sequence[int]) -> Sequence[float]:
    return seq_lens


def _wanted(batch: Batch, options: ChunkOptions, *, backward: bool = True) -> Wanted:
    """The plan of all chunks of a batch, of which a sample leaves some out."""
    return Wanted(batch.seq_lens, replace(options, sample=None), backward)


class Engines:
    """The engines of all processes; one alone is its own engine."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes = ALONE,
        work: Callable[[Sequence[int]], Sequence[float]] = _tokens,
        stages: Sequence[int] = (),
        rivals: BatchPlans | None = None,
    ) -> None:
        """`work`: what is dealt out evenly over the replicas, for each sequence. `stages`: layers
        of each stage of a pipeline. `rivals`: other plans than those of the dials, which the first
        process may take."""
        self.engine, self.processes = engine, processes
        self.method: str | None = None
        """Names of the planners of the last plan, on the first of several processes."""
        self._plans: SharedPlans | None = None
        if engine.ranks is not None:
            model, ranks = engine.model, engine.ranks
            frozen = processes.each(model.num_frozen_layers)
            dials: dict[str, Any] = {
                "layout": Layout(ranks.dp, ranks.sp, ranks.pp), "stages": stages, "work": work,
                "num_layers": model.num_layers, "frozen_layers": min(frozen),
                "rivals": rivals,
            }  # fmt: skip
            is_of_replica = ranks.process == ranks.stage == 0
            self._plans = SharedPlans(
                processes, partial(plan_batch, **dials), partial(plan_own, **dials),
                ranks.replica if is_of_replica else None,
            )  # fmt: skip

    @property
    def waited_s(self) -> float | None:
        """Seconds of waiting for the last plan; None where the process plans as it goes."""
        return None if self._plans is None else self._plans.waited_s

    def expect(self, batch: Batch, options: ChunkOptions) -> None:
        """A step over this batch will come: its plan can be made."""
        if self._plans is not None and batch.num_valid_tokens:
            self._plans.expect(_wanted(batch, options))

    def compute(
        self,
        batch: Batch,
        options: ChunkOptions,
        device: torch.device,
        *,
        name: str,
        backward: bool = True,
        weights: Sequence[float] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Gradients of the batch's mean loss, or its losses; the loss is that of all processes, and
        token losses are those of the whole batch.

        `name`: what the batch is called where a process has stopped. `weights`: on several
        processes, see `Engine.run`. `watch`: see `Executor.run`. A process that fails raises its
        own error, and all others raise ElsewhereError.
        """
        if self._plans is None:
            divisor = batch.num_valid_tokens if backward else None
            sequences = batch.tensors(device)
            return self.engine.forward_backward(sequences, options, divisor, backward, watch=watch)
        processes, plans = self.processes, self._plans
        processes.at(name + PLAN)

        def prepare() -> tuple[BatchPlan, Mapping[int, Mapping[str, Tensor]]]:
            planned = plans.get(_wanted(batch, options, backward=backward))
            if backward:
                planned = replace(planned, plan=with_draw(planned.plan, batch, options))
            return planned, batch.part(self.engine.reads(planned.plan), device)

        # ids come onto the device: a process that lacks memory for them tells the others
        planned, own = together(self.engine.ranks, prepare)
        plan, self.method = planned.plan, planned.method or None
        return self.engine.run(
            plan, own, batch.num_valid_tokens, weights=weights, watch=watch,
            begun=lambda action: processes.at(f"{name} {format_action(action)}"),
        )  # fmt: skip

    def share(self, num_sequences: int) -> range:
        """The sequences of a batch whose token losses, which all have, this process counts."""
        return range(self.processes.launch.number, num_sequences, self.processes.num_processes)

    def close(self) -> None:
        """No batch will come any more."""
        if self._plans is not None:
            self._plans.close()
