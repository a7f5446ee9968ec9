"""The replicas of a batch: which sequences each has, their plans, and one plan of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from furlong.cost.model import CostModel
from furlong.plan.values import ChunkPlan
from furlong.planners.budget import fit
from furlong.planners.chunks.balance import Balance, by_speed, deal_sequences, sequence_work
from furlong.planners.orders.replicas import join_replicas
from furlong.planners.search.build import build, replica_model
from furlong.planners.search.dials import Dials
from furlong.simulate.clock import time_actions

_MOST_PLANS = 96
"""Of replicas, made while they are dealt by the time of their plans."""
_MOST_ROUNDS = 12

Dealt = list[list[int]]
"""The seq_ids of each replica."""


@dataclass(frozen=True)
class Outcome:
    """A plan of the whole batch."""

    dials: Dials
    plan: ChunkPlan
    model: CostModel
    """With the ZeRO stage of the dials."""
    step_s: float
    peak_bytes: int
    """Of the rank that needs most."""


class Replicas:
    """Plans of one batch, dealt in any of the ways."""

    def __init__(self, seq_lens: Sequence[int], model: CostModel, limit_bytes: int) -> None:
        self._seq_lens = tuple(seq_lens)
        self._model = model
        self._limit_bytes = limit_bytes
        self._work = sequence_work(seq_lens, model.shape)
        self._dealt: dict[tuple[int, Balance], Dealt] = {}

    def busiest(self, dials: Dials) -> list[int]:
        """Lengths of the sequences of the replica with most work."""
        work = self._work
        return self._lens(max(self._deal(dials), key=lambda own: sum(work[i] for i in own)))

    def work_s(self, dials: Dials) -> float:
        """Seconds that its work takes at the hardware's best."""
        training, hardware = self._model.training, self._model.hardware
        passes = 2 if training.lora is not None else 3
        devices = dials.layout.sp * dials.layout.pp * training.tp_size
        best = max(e.best for e in (hardware.linear, hardware.attention_forward))
        most = max(sum(self._work[i] for i in own) for own in self._deal(dials))
        return passes * most / (devices * hardware.peak_flops_per_s * best)

    def plan_busiest(self, dials: Dials, beat_s: float) -> ChunkPlan:
        """Its plan. Raises UserError where there is none that fits, or, where that is known before
        it is made, none that takes less than `beat_s`."""
        plan = self._build(dials, self.busiest(dials), beat_s)
        fit(plan, replica_model(dials, self._model), self._limit_bytes)
        return plan

    def plan_whole(self, dials: Dials) -> Outcome:
        """The plan of the batch; dealt by work, where it may be by time.

        Raises UserError where a replica has none that fits.
        """
        return self._joined(_by_work(dials), self._deal(dials))

    def plan_by_time(self, dials: Dials) -> Outcome:
        """The same, dealt by the time of the replicas' plans."""
        return self._joined(dials, self._deal_by_time(dials))

    def _deal_by_time(self, dials: Dials) -> Dealt:
        """Rounds of dealing, each by what a unit of work has taken each replica so far; the longest
        sequence stays, or replicas would only change their roles."""
        dealt, model = self._deal(dials), replica_model(dials, self._model)
        best: tuple[float, Dealt] = float("inf"), dealt
        for _ in range(min(_MOST_ROUNDS, max(1, _MOST_PLANS // dials.layout.dp))):
            seconds = []
            for own in dealt:
                plan = self._build(dials, self._lens(own))
                seconds.append(time_actions(plan, model.costs(plan)).duration_s)
            best = min(best, (max(seconds), dealt))
            dealt = by_speed(self._work, dealt, seconds)
        return best[1]

    def _joined(self, dials: Dials, dealt: Dealt) -> Outcome:
        plans = [self._build(dials, self._lens(own)) for own in dealt]
        plan = plans[0]
        if len(plans) > 1:
            planned = {
                seq_id: seq_len
                for own, one in zip(dealt, plans, strict=True)
                for seq_id, seq_len in zip(own, one.seq_lens, strict=True)  # padded in some
            }
            plan = join_replicas(plans, dealt, [planned[i] for i in range(len(planned))])
        training = replace(self._model.training, zero_stage=dials.zero)
        model = replace(self._model, training=training)
        peak_bytes = fit(plan, model, self._limit_bytes)
        step_s = time_actions(plan, model.costs(plan)).duration_s
        return Outcome(dials, plan, model, step_s, peak_bytes)

    def _build(self, dials: Dials, lens: Sequence[int], beat_s: float = inf) -> ChunkPlan:
        model = replica_model(dials, self._model)
        return build(dials, lens, model, self._limit_bytes, beat_s=beat_s)

    def _lens(self, own: Sequence[int]) -> list[int]:
        return [self._seq_lens[i] for i in own]

    def _deal(self, dials: Dials) -> Dealt:
        key = dials.layout.dp, _by_work(dials).balance
        if key not in self._dealt:
            self._dealt[key] = deal_sequences(self._seq_lens, self._model.shape, *key)
        return self._dealt[key]


def _by_work(dials: Dials) -> Dials:
    return replace(dials, balance="flops") if dials.balance == "time" else dials
