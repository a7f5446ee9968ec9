"""A global batch, computed by all processes of a run: one plan, and to each its own sequences.

Each process runs out of memory on its own. Replicas of one process all take smaller chunks then:
before the gradients are added up they agree whether everybody has come that far. The processes of a
pool or a pipeline meet in every chunk, where a process that is lost ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from furlong.data.loader import Batch
from furlong.errors import ConfigError
from furlong.plan.text import format_action
from furlong.plan.values import Action, Backward, Unshard
from furlong.planners.layout import Layout
from furlong.planners.options import ChunkOptions
from furlong.train.fitting import is_out_of_memory, reason_of
from furlong.train.plans import SharedPlans, Wanted, plan_batch
from furlong.train.processes.together import ALONE, Processes

if TYPE_CHECKING:
    from furlong.api import Engine
    from furlong.runtime.result import StepResult


class ElsewhereError(MemoryError):
    """Another process ran out of memory."""


def _tokens(seq_lens: Sequence[int]) -> Sequence[float]:
    return seq_lens


class Replicas:
    """The engines of all processes; one alone is its own engine."""

    def __init__(
        self,
        engine: Engine,
        processes: Processes = ALONE,
        work: Callable[[Sequence[int]], Sequence[float]] = _tokens,
        stages: Sequence[int] = (),
    ) -> None:
        """`work`: what is dealt out evenly over the replicas, for each sequence. `stages`: layers
        of each stage of a pipeline."""
        self.engine, self.processes = engine, processes
        self._plans: SharedPlans | None = None
        if engine.ranks is not None:
            model, ranks = engine.model, engine.ranks
            frozen = processes.gathered(torch.tensor(model.num_frozen_layers))
            make = partial(
                plan_batch,
                layout=Layout(ranks.dp, ranks.sp, ranks.pp), stages=stages, work=work,
                num_layers=model.num_layers, frozen_layers=int(frozen.min()),
            )  # fmt: skip
            self._plans = SharedPlans(processes, make)

    @property
    def waited_s(self) -> float | None:
        """Seconds of waiting for the last plan; None where the process plans as it goes."""
        return None if self._plans is None else self._plans.waited_s

    def expect(self, batch: Batch, options: ChunkOptions) -> None:
        """A step over this batch will come: its plan can be made."""
        if self._plans is not None and batch.num_valid_tokens:
            self._plans.expect(Wanted(batch.seq_lens, options))

    def compute(
        self,
        batch: Batch,
        options: ChunkOptions,
        device: torch.device,
        *,
        name: str,
        backward: bool = True,
        watch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Gradients of the batch's mean loss, or its losses; the loss is that of all processes, and
        token losses are those of the whole batch.

        `name`: what the batch is called where a process has stopped. `watch`: see `Executor.run`. A
        process that lacks memory raises its own error, and all others raise ElsewhereError.
        """
        if self._plans is None:
            divisor = batch.num_valid_tokens if backward else None
            sequences = batch.tensors(device)
            return self.engine.forward_backward(sequences, options, divisor, backward, watch=watch)
        processes, ranks = self.processes, self.engine.ranks
        assert ranks is not None
        processes.at(f"{name} plan")
        plan = self._plans.get(Wanted(batch.seq_lens, options, backward))
        meets_none = ranks.sp * ranks.pp == 1
        tried = Try(processes, plan.actions[ranks.plan_rank], watch, meets_none=meets_none)
        own = batch.part(self.engine.reads(plan), device)
        try:
            return self.engine.run(
                plan, own, batch.num_valid_tokens, watch=tried.watch,
                begun=lambda action: processes.at(f"{name} {format_action(action)}"),
            )  # fmt: skip
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                tried.fail(error)
            raise

    def share(self, num_sequences: int) -> range:
        """The sequences of a batch whose token losses, which all have, this process counts."""
        return range(self.processes.launch.number, num_sequences, self.processes.num_processes)

    def close(self) -> None:
        """No batch will come any more."""
        if self._plans is not None:
            self._plans.close()


class Try:
    """One try of a plan on this process, until all agree that nobody has failed."""

    def __init__(
        self,
        processes: Processes,
        actions: Sequence[Action],
        watch: Callable[[], None],
        *,
        meets_none: bool = True,
    ) -> None:
        """`meets_none`: no other process waits for this one before gradients are added up. In a
        pool or a pipeline some do, and nobody can tell them."""
        self._processes, self._watch = processes, watch
        self._num_done, self._agreed = 0, False
        self._meets_none = meets_none
        self._num_gathers = sum(isinstance(action, Unshard) for action in actions)
        self._agrees_after = _first_sum(actions)

    def watch(self) -> None:
        """An action is over: the caller's watch, and the agreement in front of the first one that
        adds up gradients. What comes later cannot be repeated."""
        if self._agreed:
            return
        self._watch()
        self._num_done += 1
        if self._meets_none and self._num_done == self._agrees_after:
            self._agree(failed=False)

    def fail(self, error: Exception) -> None:
        """This process has no memory. Raises ConfigError where the others cannot be told."""
        if isinstance(error, ElsewhereError):
            return
        if not self._meets_none or self._agreed or self._num_done < self._num_gathers:
            moment = "while weights were gathered or gradients added up"
            if not self._meets_none:
                moment = "in a step, while the others of its pool or its pipeline wait for it"
            raise _cannot_be_repeated(error, self._processes.launch.number, moment) from error
        self._agree(failed=True)

    def _agree(self, *, failed: bool) -> None:
        self._agreed = True
        number = self._processes.launch.number
        num_failed, total = self._processes.sums([float(failed), float(failed) * number])
        if num_failed and not failed:
            who = f"process {total:.0f}" if num_failed == 1 else f"{num_failed:.0f} processes"
            raise ElsewhereError(f"out of memory on {who}")


def _first_sum(actions: Sequence[Action]) -> int:
    """How many actions come before the first that adds up gradients over all processes: the last
    Backward of a stage. Without a Backward all do."""
    last = {a.stage: index for index, a in enumerate(actions) if isinstance(a, Backward)}
    return min(last.values(), default=len(actions))


def _cannot_be_repeated(error: Exception, number: int, moment: str) -> ConfigError:
    return ConfigError(
        given=f"out of memory on process {number} {moment}: {reason_of(error)}",
        required="memory for what a step takes there",
        source="the memory of the device",
        change="set chunks.size to less; where there is a checkpoint, --resume goes on from it",
    )
