"""Plans of one replica's sequences that may be faster than that of a run's dials, by simulation.

    chunks            every slice on all processes of the pool, in the order of the dials
    local sequences   the same chunks, whole sequences in them on one process where that balances
    places            whole sequences in micro-batches, each on a place of its own
    InfiniPipe        chunks of equal time in a pipeline, layers recomputed as far as memory asks

The last two make chunks of their own and are asked only where no dial is given. They fit the
budget by themselves; local sequences need no more memory than shared ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from furlong.cost.model import CostModel
from furlong.errors import UserError
from furlong.plan.plan import ON_DEVICE, ChunkPlan
from furlong.planners.auto.search import SLACK
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica
from furlong.planners.places import plan_places
from furlong.planners.predict import step_s

CHUNKS = "chunks"
"""The plan of the dials."""
_NUM_TRIES = 60
"""Sequences that the planner of places tries to move or swap. A plan is made while a step runs: far
more would make the steps wait, and gain a percent."""
_MAX_SLICE_NUMBERS = 4
"""Bound of InfiniPipe's search, for the same reason."""


@dataclass(frozen=True)
class Rivals:
    """Planners beside that of a run's dials, asked for every batch."""

    model: CostModel
    """The model of one replica."""
    budget_bytes: int
    """Bytes that a step may use on a device."""
    options: ChunkOptions
    """The dials that the run has begun with."""
    is_free: bool
    """Whether the run has given none of them."""

    def fastest(
        self,
        seq_lens: Sequence[int],
        plan: ChunkPlan,
        options: ChunkOptions,
        *,
        frozen_layers: int = 0,
    ) -> tuple[str, ChunkPlan]:
        """The name and the plan that is predicted to be fastest: that of the dials `options`,
        which is `plan`, unless another one gains more than a prediction may be wrong."""
        best, best_s = (CHUNKS, plan), inf
        for name, found in self._others(seq_lens, plan, options, frozen_layers):
            if best_s == inf:
                best_s = step_s(self.model, plan) * (1 - SLACK)
            if (found_s := step_s(self.model, found)) < best_s:
                best, best_s = (name, found), found_s
        return best

    def _others(
        self, seq_lens: Sequence[int], plan: ChunkPlan, options: ChunkOptions, frozen_layers: int
    ) -> Iterator[tuple[str, ChunkPlan]]:
        sp_size, stages = plan.sp_size, plan.stages if len(plan.actions) > 1 else ()
        shape = self.model.shape
        if sp_size > 1:
            yield "local sequences", plan_replica(
                seq_lens, options, num_layers=shape.num_layers, stages=stages, sp_size=sp_size,
                frozen_layers=frozen_layers, local_in=shape,
            )  # fmt: skip
        # smaller chunks than at the start: what was predicted to fit did not
        is_free = self.is_free and options == self.options and options.tiers == ON_DEVICE
        if not is_free or plan.frozen_stages:
            return
        with suppress(UserError):  # no plan of theirs fits, or none is faster
            if stages:
                yield "InfiniPipe", plan_infinipipe(
                    seq_lens, self.model, num_stages=len(stages), sp_size=sp_size, stages=stages,
                    budget_bytes=self.budget_bytes, beat_s=step_s(self.model, plan),
                    max_tried=_MAX_SLICE_NUMBERS,
                ).plan  # fmt: skip
            elif sp_size > 1:
                yield "places", self._places(seq_lens, sp_size)

    def _places(self, seq_lens: Sequence[int], sp_size: int) -> ChunkPlan:
        """The plan of places, with layers recomputed if it does not fit without. Raises UserError
        where it does not fit with all of them."""
        plan = partial(
            plan_places, seq_lens, self.model, pool_size=sp_size, budget_bytes=self.budget_bytes,
            num_tries=_NUM_TRIES,
        )  # fmt: skip
        try:
            return plan(recompute_layers=0)
        except UserError:
            return plan()
