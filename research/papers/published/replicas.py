"""The replicas of a batch: which sequences each has, their plans, and one plan of them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from furlong.cost.model import CostModel
from furlong.errors import PlanError, UserError
from furlong.plan.plan import Chunk, ChunkPlan, Layout
from furlong.planners.chunks import by_cost, fitting_tokens, sequence_work
from furlong.planners.places import PoolBatch, Setting
from furlong.simulate.clock import time_actions
from papers.fits import fit
from papers.published.bounds import least_s
from papers.published.build import build, groups_of, replica_model
from papers.published.chunks import Balance, by_speed, deal_sequences
from papers.published.dials import Dials, Ladder
from papers.published.in_step import join_in_step

_MOST_PLANS = 24
"""Plans of replicas that are made while they are dealt by the time of their plans, for each measure
of work."""
_MOST_ROUNDS = 6
_MOST_REORDERED = 8
"""Replicas of a plan whose order of groups is searched: the slowest ones."""

Dealt = list[list[int]]
"""The seq_ids of each replica."""


@dataclass(frozen=True)
class Outcome:
    """A plan of the whole batch."""

    dials: Dials
    plan: ChunkPlan
    model: CostModel
    step_s: float
    peak_bytes: int
    """Most bytes of the rank that needs most."""


class ReplicaPlans:
    """Plans of one batch, dealt in any of the ways."""

    def __init__(self, seq_lens: Sequence[int], model: CostModel, limit_bytes: int) -> None:
        self._seq_lens = tuple(seq_lens)
        self._model = model
        self._limit_bytes = limit_bytes
        self._work = sequence_work(seq_lens, model.shape)
        self._dealt: dict[tuple[int, Balance], Dealt] = {}
        self._dealt_by_time: dict[Dials, Dealt] = {}
        self._chunks: dict[Dials, tuple[Sequence[int], list[Chunk]]] = {}
        self._capacities: dict[tuple[Layout, tuple[int, ...]], int] = {}

    def busiest(self, dials: Dials) -> list[int]:
        """Lengths of the sequences of the replica with most work."""
        work = self._work
        return self._lens(max(self._deal(dials), key=lambda own: sum(work[i] for i in own)))

    def busiest_chunks(self, dials: Dials) -> tuple[Sequence[int], list[Chunk]]:
        """Its lengths, which may be padded, and its chunks."""
        key = dials.chunks_only()
        if key not in self._chunks:
            model = replica_model(dials, self._model)
            lens, groups = groups_of(dials, self.busiest(dials), model)
            self._chunks[key] = lens, [chunk for group in groups for chunk in group]
        return self._chunks[key]

    def sized(self, ladder: Ladder) -> Ladder:
        """Micro-batches of as many tokens as a device can hold; none where that is too few for the
        longest sequence, unless no more can be checkpointed, which a refusal then tells."""
        (dials,) = ladder
        size, longest = self._capacity(dials), max(self._seq_lens)
        if size < longest and dials.recompute_layers != dials.stages:
            return ()
        return (replace(dials, size=max(size, longest)),)

    def require_room(self, dials: Dials) -> None:
        """Raises DoesNotFitError where not even one token per device fits."""
        least = replace(dials, size=dials.layout.sp, num_retained=0, keep="kv")
        model = replica_model(dials, self._model)
        plan = build(least, [dials.layout.sp], model)
        fit(plan, model, self._limit_bytes, with_what="one token")

    def least_s(self, dials: Dials) -> float:
        """Seconds below which no plan of a layout gets, from all tokens of the busiest replica."""
        model = replica_model(dials, self._model)
        return least_s(self.busiest(dials), dials.stages, dials.layout.sp, model)

    def work_s(self, dials: Dials) -> float:
        """Seconds that its work takes at the hardware's best."""
        training, hardware = self._model.training, self._model.hardware
        passes = 2 if training.lora is not None else 3
        devices = dials.layout.sp * dials.layout.pp
        best = max(e.best for e in (hardware.linear, hardware.attention_forward))
        most = max(sum(self._work[i] for i in own) for own in self._deal(dials))
        return passes * most / (devices * hardware.peak_flops_per_s * best)

    def plan_busiest(self, dials: Dials, beat_s: float) -> tuple[ChunkPlan, float]:
        """Its plan, which may not fit and is not checked, with its seconds. Raises UserError where
        there is none; `beat_s` as for `build`."""
        plan = self._build(dials.planned_first(), self.busiest(dials), beat_s, checked=False)
        costs = replica_model(dials, self._model).costs(plan)
        return plan, time_actions(plan, costs).duration_s

    def plan_whole(self, dials: Dials) -> Outcome:
        """The plan of the batch as it is planned first.

        Raises UserError where a replica has none that fits.
        """
        return self._joined(dials.planned_first(), self._deal(dials))

    def plan_improved(self, dials: Dials) -> Outcome:
        """The plan of the batch with all that the dials say: dealt by the time of the replicas'
        plans, and with the order of their groups searched."""
        by_time = dials.balance == "time"
        return self._joined(dials, self._deal_by_time(dials) if by_time else self._deal(dials))

    def _deal_by_time(self, dials: Dials) -> Dealt:
        """Rounds of dealing, each by what a unit of work has taken each replica so far; the longest
        sequence stays, or replicas would only change their roles. Work is FLOPs, then the seconds
        that each sequence adds to a group; of each the first round and the best are planned whole,
        since replicas may have to go in step."""
        dials = replace(dials, group_order="as listed")
        if dials in self._dealt_by_time:
            return self._dealt_by_time[dials]
        dp, model = dials.layout.dp, replica_model(dials, self._model)
        pool = PoolBatch.of(self._seq_lens, model, dials.layout.sp)
        alone = Setting(pool, sum(dials.recompute_layers))
        found: list[tuple[float, Dealt]] = []
        for work in (self._work, alone.alone_s[:, -1].tolist()):
            dealt, rounds = by_cost(work, dp), list[tuple[float, Dealt]]()
            for _ in range(min(_MOST_ROUNDS, max(1, _MOST_PLANS // dp))):
                seconds = []
                for own in dealt:
                    plan = self._build(dials, self._lens(own))
                    seconds.append(time_actions(plan, model.costs(plan)).duration_s)
                rounds.append((max(seconds), dealt))
                dealt = by_speed(work, dealt, seconds)
            for _, dealt in {id(one): one for one in (rounds[0], min(rounds))}.values():
                with suppress(UserError, PlanError):
                    found.append((self._joined(dials, dealt).step_s, dealt))
        self._dealt_by_time[dials] = min(found)[1] if found else self._deal(dials)
        return self._dealt_by_time[dials]

    def _reorder(self, dials: Dials, dealt: Dealt, plans: list[ChunkPlan]) -> None:
        """Searches the order of groups of the slowest replica, then of the next slowest, as long as
        none that is searched already is slower."""
        model, done_s = replica_model(dials, self._model), 0.0
        left = [(time_actions(p, model.costs(p)).duration_s, i) for i, p in enumerate(plans)]
        for step_s, i in sorted(left, reverse=True)[:_MOST_REORDERED]:
            if step_s < done_s:
                break
            plans[i] = self._build(dials, self._lens(dealt[i]))
            done_s = max(done_s, time_actions(plans[i], model.costs(plans[i])).duration_s)

    def _joined(self, dials: Dials, dealt: Dealt) -> Outcome:
        plans = self._plans(replace(dials, group_order="as listed"), dealt)
        if dials.group_order == "searched":
            self._reorder(dials, dealt, plans)
        model, plan = self._model, plans[0]
        if len(plans) > 1:
            planned = {
                seq_id: seq_len
                for own, one in zip(dealt, plans, strict=True)
                for seq_id, seq_len in zip(own, one.seq_lens, strict=True)  # padded in some
            }
            plan = join_in_step(plans, dealt, [planned[i] for i in range(len(planned))], model)
        elif model.training.regathers and plan.sp_size > 1:
            plan = replace(plan, regathers=True)
        peak_bytes = fit(plan, model, self._limit_bytes)
        step_s = time_actions(plan, model.costs(plan)).duration_s
        return Outcome(dials, plan, model, step_s, peak_bytes)

    def _plans(self, dials: Dials, dealt: Dealt) -> list[ChunkPlan]:
        """One plan for each replica."""
        return [self._build(dials, self._lens(own)) for own in dealt]

    def _build(
        self,
        dials: Dials,
        lens: Sequence[int],
        beat_s: float = inf,
        *,
        checked: bool = True,
    ) -> ChunkPlan:
        model = replica_model(dials, self._model)
        return build(dials, lens, model, self._limit_bytes, beat_s=beat_s, checked=checked)

    def _lens(self, own: Sequence[int]) -> list[int]:
        return [self._seq_lens[i] for i in own]

    def _capacity(self, dials: Dials) -> int:
        """Tokens of whole sequences that an sp group can hold at a time, on one stage."""
        key = dials.layout, dials.recompute_layers
        if key not in self._capacities:
            sp_size = dials.layout.sp
            self._capacities[key] = sp_size * fitting_tokens(
                replica_model(dials, self._model).memory(self._limit_bytes),
                dp_size=1, sp_size=sp_size, recompute_layers=sum(dials.recompute_layers),
            )  # fmt: skip
        return self._capacities[key]

    def _deal(self, dials: Dials) -> Dealt:
        key = dials.layout.dp, dials.planned_first().balance
        if key not in self._dealt:
            self._dealt[key] = deal_sequences(self._seq_lens, self._model.shape, *key)
        return self._dealt[key]
