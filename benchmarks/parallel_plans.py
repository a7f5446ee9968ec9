"""The plans that `parallel.py` runs: the best one of each method for one long-tailed batch.

A model of 8 layers, 256 wide, on slow devices with slow links: matrices, attention and messages
stand to each other about as they do for a 7B model on GPUs of several nodes with sequences 16 times
as long. The batch has the lengths of InfiniPipe's GitHub files, divided by 16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "research"))

from papers.published.catalogue import PUBLISHED
from papers.published.chunks import sliced_groups
from papers.published.problem import Problem
from papers.published.search import search
from papers.seq1f1b_plan import plan_seq1f1b
from transformers import AutoConfig

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Link, Machine, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import by_cost, group_chunks, shard_all
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_1f1b, plan_on_device
from furlong.planners.places import plan_places
from furlong.simulate.clock import time_actions

Layout = tuple[int, int, int]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 2048,
    "max_position_embeddings": 2**17, "tie_word_embeddings": False,
}  # fmt: skip
_FLOPS_PER_S, _LINK = 1e11, Link(latency_s=1e-4, bytes_per_s=2e9)
_MEMORY_BYTES = 600 * 2**20
_SCALE = 16
PIPELINES = ("1F1B padded", "1F1B packed", "Seq1F1B", "ChunkFlow", "InfiniPipe")
POOLS = ("Ulysses", "FlexSP", "places")
_NAMES = {"ChunkFlow": "state-aware 1F1B (ChunkFlow)"}


@dataclass(frozen=True)
class Contender:
    """A method's best plan on some processes."""

    family: str
    """Those that are compared with each other."""
    name: str
    layout: Layout
    plan: ChunkPlan
    model: CostModel
    dials: str


def long_tailed(num_sequences: int, longest_tokens: int) -> tuple[int, ...]:
    lens = sample_lengths("github", num_sequences)
    return tuple(max(8, min(n // _SCALE, longest_tokens)) for n in lens)


def slow_device(slowness: int = 1) -> Machine:
    """A device of the sleep backend, so many times as slow in all; none of it is measured."""
    spec = this_cpu()
    link = Link(_LINK.latency_s * slowness, _LINK.bytes_per_s / slowness)
    return replace(
        spec, peak_flops_per_s=_FLOPS_PER_S / slowness, memory_bytes=_MEMORY_BYTES,
        reserved_bytes=0, layer_launch_s=spec.layer_launch_s * slowness,
        pass_launch_s=spec.pass_launch_s * slowness,
        slice_launch_s=spec.slice_launch_s * slowness,
        activation_bytes_per_s=spec.activation_bytes_per_s / slowness,
        links=replace(spec.links, devices_per_node=64, within_node=link, collectives={}),
    )  # fmt: skip


def cost_model(spec: Machine, config: Mapping[str, Any] = CONFIG) -> CostModel:
    """Weights are gathered once in a step and gradients reduced once, as `furlong.Engine` does."""
    training = replace(Training.in_dtype("float32"), zero_stage=1)
    return CostModel(describe(AutoConfig.for_model(**config)), spec, training)


def pipelines(
    lens: Sequence[int], spec: Machine, dp: int, pp: int, names: Sequence[str] = PIPELINES
) -> Iterator[Contender]:
    """The best plan of each method in a layout of dp replicas of pp stages."""
    for name in names:
        yield _best(lens, cost_model(spec), name, (dp, 1, pp), f"pipelines of {dp * pp} processes")


def pools(
    lens: Sequence[int],
    spec: Machine,
    size: int,
    names: Sequence[str] = POOLS,
    config: Mapping[str, Any] = CONFIG,
) -> Iterator[Contender]:
    """The best plans without a pipeline: static groups of any size, disjoint and nested places."""
    family, model = f"pools of {size} processes", cost_model(spec, config)
    for name in names:
        if name == "Ulysses":
            sizes = [n for n in (2, 4, 8) if n <= size]
            found = [_best(lens, model, name, (size // n, n, 1), family) for n in sizes]
            yield min(found, key=lambda one: step_s(one))
            continue
        if name == "FlexSP":
            problem = Problem(seq_lens=tuple(lens), model=model, num_devices=size, pp=1)
            best = search(problem, {name: PUBLISHED[name]}).best
            plan, dials = best.plan, ", ".join(best.dials.words())
        else:
            limit = int(model.hardware.budget_bytes * 0.95)
            plan, dials = plan_places(lens, model, pool_size=size, budget_bytes=limit), ""
        yield Contender(family, name, (1, size, 1), plan, model, dials)


def of_two_processes(lens: Sequence[int], model: CostModel, size: int) -> list[Contender]:
    """Plans of every layout of two processes, with chunks of `size` tokens."""
    layers = model.shape.num_layers
    halves, options = (layers // 2, layers - layers // 2), ChunkOptions(size=size)
    groups, dealt = group_chunks(lens, options), by_cost(lens, 2)
    replicas = [plan_on_device([lens[i] for i in own], options, num_layers=layers) for own in dealt]
    infinipipe = plan_infinipipe(
        lens, model, stages=halves, budget_bytes=model.hardware.budget_bytes
    )
    sliced = sliced_groups(lens, num_slices=4)
    plans: list[tuple[str, Layout, ChunkPlan]] = [
        ("data parallel", (2, 1, 1), join_replicas(replicas, dealt, lens)),
        ("sequence parallel", (1, 2, 1),
         plan_1f1b(lens, shard_all(groups, 2), stages=(layers,), sp_size=2)),
        ("places", (1, 2, 1), plan_places(lens, model, pool_size=2, num_changes=0)),
        (_NAMES["ChunkFlow"], (1, 1, 2), plan_1f1b(lens, groups, stages=halves)),
        ("Seq1F1B", (1, 1, 2), plan_seq1f1b(lens, sliced, stages=halves)),
        ("InfiniPipe", (1, 1, 2), infinipipe),
    ]  # fmt: skip
    return [Contender("two processes", name, layout, plan, model, "")
            for name, layout, plan in plans]  # fmt: skip


def step_s(contender: Contender) -> float:
    """Simulated seconds of its step."""
    costs = contender.model.costs(contender.plan)
    return time_actions(contender.plan, costs).duration_s


def _best(
    lens: Sequence[int], model: CostModel, name: str, layout: Layout, family: str
) -> Contender:
    dp, sp, pp = layout
    problem = Problem(
        seq_lens=tuple(lens), model=model, num_devices=dp * sp * pp, dp=dp, sp=sp, pp=pp
    )
    best = search(problem, {name: PUBLISHED[name]}).best
    return Contender(
        family, _NAMES.get(name, name), layout, best.plan, best.model, ", ".join(best.dials.words())
    )
