"""Steps of plans on several processes: what `parallel.py` measures, on each of them.

The same runtime either computes with the model of a config, or sleeps (`sleeping`) for a cost
model's seconds with one that has its layers and heads, each of two columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sleeping import (
    Clocked,
    Pace,
    SleepingBackend,
    SleepingNorm,
    StampedComms,
    StampedExchange,
    now_s,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from furlong.calibrate.run import calibrate
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.models.placeholders import hold, placeholders
from furlong.ops.sequence_parallel import Exchange
from furlong.plan.plan import Action, ChunkPlan, Recv, Reduce, Send
from furlong.runtime.batch import Batch, batch_of, shift_labels
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.distributed.mesh import Ranks, make_ranks
from furlong.runtime.session import Session
from furlong.runtime.step import take_step
from furlong.timeline import Record, Timeline

Layout = tuple[int, int, int]
_TINY = {"intermediate_size": 4, "vocab_size": 16}


@dataclass(frozen=True)
class Trial:
    """A plan, and the model that it is for."""

    name: str
    plan: ChunkPlan
    layout: Layout
    """Processes along dp, sp and pp."""
    config: dict[str, Any]
    sleeps_by: CostModel | None = None
    """None: the model computes."""
    rounds: int = 1
    """How often it is measured; one that computes, or has links, runs once more before."""
    has_links: bool = False
    """Whether all-to-alls of a model that sleeps carry all their bytes, and take the time that they
    take; else they are tiny, and take the modelled time."""

    @property
    def is_real(self) -> bool:
        """Whether what it measures depends on the machine alone."""
        return self.sleeps_by is None or self.has_links

    @property
    def stage_layers(self) -> list[range]:
        stops = accumulate(self.plan.stages)
        return [range(stop - n, stop) for n, stop in zip(self.plan.stages, stops, strict=True)]


@dataclass(frozen=True)
class Ran:
    """One process's step, by a clock that all share."""

    rank: int
    """Its list in the plan."""
    began_s: float
    records: tuple[Record, ...]


def calibrated(process: int, config: dict[str, Any], disk_dir: str) -> Machine:
    """This machine as `furlong calibrate` measures it, with as many processes as there are."""
    machine, _ = calibrate(
        LlamaConfig(**config), dtype="float32", device=torch.device("cpu"), disk_dir=Path(disk_dir)
    )
    return machine


def run_trials(process: int, trials: list[Trial]) -> list[list[Ran]]:
    """By trial, this process's step of each round; rounds interleave the trials."""
    ranks_of = {layout: make_ranks(*layout, "cpu") for layout in sorted({t.layout for t in trials})}
    benches: dict[Any, _Bench] = {}
    found: list[list[Ran]] = [[] for _ in trials]
    for number in range(-1, max(trial.rounds for trial in trials)):
        for index, trial in enumerate(trials):
            if number >= trial.rounds or (number < 0 and not trial.is_real):
                continue
            key = trial.layout, trial.plan.stages, trial.sleeps_by is None
            if key not in benches:
                benches[key] = _Bench(trial, ranks_of[trial.layout])
            ran = benches[key].step(trial)
            if number >= 0:
                found[index].append(ran)
    return found


def joined(rans: list[Ran]) -> Timeline:
    """One timeline of all processes; of those that obey one list, the one that ended last. As in a
    simulated one, a Recv begins when its message has been sent: before it, its rank waits."""
    first_s = min(ran.began_s for ran in rans)
    last: dict[int, Ran] = {}
    for ran in sorted(rans, key=lambda ran: ran.began_s + ran.records[-1].stop_s):
        last[ran.rank] = ran
    records = [
        replace(
            r, start_s=r.start_s + ran.began_s - first_s, stop_s=r.stop_s + ran.began_s - first_s
        )
        for ran in last.values()
        for r in ran.records
    ]
    sent = {
        (r.rank, r.action.peer, r.action.payload, r.action.chunk, r.action.stage): r.start_s
        for r in records
        if isinstance(r.action, Send)
    }
    return Timeline(tuple(sorted((_comparable(r, sent) for r in records), key=lambda r: r.stop_s)))


def _comparable(record: Record, sent: dict[Any, float]) -> Record:
    action, start_s = record.action, record.start_s
    if isinstance(action, Recv):
        key = action.peer, record.rank, action.payload, action.chunk, action.stage
        start_s = min(max(start_s, sent[key]), record.stop_s)
    linked = isinstance(action, (Send, Recv, Reduce))
    return replace(
        record,
        lane="link" if linked else "compute",
        start_s=start_s,
        device_bytes=0,
        offloaded_bytes=0,
    )


class _Bench(Session):
    """A model on this process, ready for plans of one layout and one cut of its layers."""

    def __init__(self, trial: Trial, ranks: Ranks) -> None:
        self._clocked, self._has_links = Clocked(), trial.has_links
        model = _build(trial, self._clocked)
        if ranks.pp > 1:
            hold(model, placeholders(model, trial.stage_layers[ranks.stage]))
        super().__init__(model, max_seq_len=None, compute_dtype=None, storage=None, ranks=ranks)
        with self.call("a trial"):
            if len(trial.plan.stages) > 1:
                self.require_checked(trial.plan.stages)
        if trial.sleeps_by is not None:
            self.state.backend = SleepingBackend(self._clocked)

    def comms(self, plan: ChunkPlan | None = None) -> Comms:
        inner, pace = super().comms(plan), self._clocked.pace
        return inner if pace is None else StampedComms(inner, pace)

    @property
    def exchange(self) -> Exchange | None:
        inner, pace = super().exchange, self._clocked.pace
        if pace is None or inner is None or self._has_links:
            return inner
        return StampedExchange(inner, pace)

    def step(self, trial: Trial) -> Ran:
        """Take a step with the trial's plan."""
        assert self.ranks is not None
        plan, began, pace = trial.plan, list[float](), None
        if trial.sleeps_by is not None:
            pace = Pace(trial.sleeps_by, plan, self.ranks.plan_rank, self.ranks.process)
        self._clocked.pace = pace
        batch = _batch(trial)

        def begun(action: Action) -> None:
            if not began:
                dist.barrier()
                began.append(now_s())
            if pace is not None:
                pace.begin(action)

        self.model.model.zero_grad(set_to_none=True)
        with self.call("a step of a trial"):
            result = take_step(self, plan, batch, None, _nothing, clock=now_s, begun=begun)
        self._clocked.pace = None
        return Ran(self.ranks.plan_rank, began[0], result.timeline.records)


def _nothing() -> None:
    """The watch of a step."""


def _build(trial: Trial, clocked: Clocked) -> nn.Module:
    torch.manual_seed(0)
    values = dict(trial.config)
    if trial.sleeps_by is not None:
        values |= _TINY | {"hidden_size": 2 * values["num_attention_heads"]}
        values |= {} if trial.has_links else {"head_dim": 2}
    model = LlamaForCausalLM(LlamaConfig(**values)).train()
    if trial.sleeps_by is None:
        return model
    for layer in model.model.layers:
        layer.input_layernorm = SleepingNorm(clocked)
    return model if trial.has_links else model.double()  # moments need its digits


def _batch(trial: Trial) -> Batch:
    """Random tokens, all with a label; where the model sleeps, the last one alone."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for num_tokens in trial.plan.seq_lens:
        ids = torch.randint(3, 16, (num_tokens,), generator=generator)
        labels = ids.clone()
        if trial.sleeps_by is not None:
            labels[:-1] = -100
        sequences.append({"input_ids": ids, "labels": labels})
    return batch_of(shift_labels(sequences))
