"""What several tables share: a step's time, a device whose calls cost more or less than assumed,
chunks of whole sequences that a group shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf

from furlong.cost.machine import Efficiency, Machine
from furlong.cost.model import CostModel
from furlong.cost.seconds import Hidden
from furlong.plan.plan import Chunk, ChunkPlan, Place, Slice
from furlong.simulate.clock import Clock


def step_s(
    cost: CostModel,
    plan: ChunkPlan,
    clock: type[Clock] = Clock,
    free: Collection[Hidden] = (),
) -> float:
    return clock(plan, cost.costs(plan, free=free)).run().duration_s


def fused_card(name: str) -> Machine:
    """A known card under the papers' own frameworks, whose element-wise kernels are fused: what is
    left of them is in the rates of products, which their publications report with all else."""
    return replace(Machine.named(name), activation_bytes_per_s=inf)


def with_fixed_costs(spec: Machine, factor: float) -> Machine:
    """`spec` with so many times the half_tokens and the launch time that are assumed."""

    def scaled(eff: Efficiency) -> Efficiency:
        return replace(eff, half_tokens=factor * eff.half_tokens)

    return replace(
        spec, layer_launch_s=factor * spec.layer_launch_s, linear=scaled(spec.linear),
        attention_forward=scaled(spec.attention_forward),
        attention_backward=scaled(spec.attention_backward),
    )  # fmt: skip


def shared_chunk(seq_ids: Iterable[int], seq_lens: Sequence[int], sp_size: int) -> Chunk:
    """Whole sequences, each shared by all `sp_size` devices of a group."""
    return Chunk(tuple(Slice(i, 0, seq_lens[i], Place(0, sp_size)) for i in seq_ids))
