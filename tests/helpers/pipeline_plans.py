"""Plans of every pipeline planner, for random batches or given groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from papers.chunkflow_plan import recomputed_late
from papers.seq1f1b_plan import plan_seq1f1b
from papers.unit_costs import UnitCosts

from furlong.cost.machine import Machine
from furlong.cost.model import Computing, CostModel
from furlong.plan.check import check
from furlong.plan.plan import (
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Recompute,
    Recv,
    Reduce,
    Send,
    Slice,
)
from furlong.plan.text import parse_chunk
from furlong.planners.chunks import Groups
from furlong.planners.infinipipe import in_a_row, plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import number_chunks, plan_1f1b, walk_groups
from furlong.simulate.clock import measure, simulate
from helpers.shapes import shape_of_values

_SMALL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512,
}  # fmt: skip


def small_cost_model() -> CostModel:
    return CostModel(shape_of_values(_SMALL), Machine.named("A100-80"))


def random_groups(random: Random) -> tuple[list[int], list[list[Chunk]]]:
    """Return lengths and chunks of 1 to 5 sequences of 1 to 5 chunks, of 1 to 3 tokens each."""
    lens, groups = [], []
    for seq_id in range(random.randint(1, 5)):
        chunks, start = [], 0
        for size in (random.randint(1, 3) for _ in range(random.randint(1, 5))):
            chunks.append(Chunk((Slice(seq_id, start, start + size),)))
            start += size
        lens.append(start)
        groups.append(chunks)
    return lens, groups


def heights(random: Random) -> tuple[int, ...]:
    return tuple(random.randint(1, 3) for _ in range(random.randint(2, 4)))


def random_1f1b(seed: int, **settings: object) -> ChunkPlan:
    random = Random(seed)
    lens, groups = random_groups(random)
    drawn = {
        "num_retained": random.randint(1, 2),
        "keep": random.choice(["kv", "input", "attention", "all"]),
    }
    plan = plan_1f1b(lens, groups, stages=heights(random), **(drawn | settings))  # type: ignore[arg-type]
    return random.choice([plan, recomputed_late(plan)])


def random_seq1f1b(seed: int) -> ChunkPlan:
    random = Random(seed)
    lens, groups = random_groups(random)
    return plan_seq1f1b(lens, groups, stages=heights(random))


def random_row(seed: int) -> ChunkPlan:
    """Return a plan of InfiniPipe's pipelines in a row, with random layers recomputed."""
    random = Random(seed)
    lens, groups = random_groups(random)
    stages = heights(random)
    cut = random.randint(0, len(groups))
    return row_of(lens, groups, stages, [cut], random)


def row_of(
    lens: list[int],
    groups: Groups,
    stages: tuple[int, ...],
    cuts: list[int],
    random: Random,
    **layout: Any,
) -> ChunkPlan:
    """Return a plan of one pipeline after another, over the groups between `cuts`; `layout`:
    sp_size, offload."""
    edges = [0, *cuts, len(groups)]
    parts = []
    for own in (range(a, b) for a, b in pairwise(edges) if a < b):
        num_diagonals = sum(len(groups[i]) for i in own) + len(stages) - 1
        parts.append((own, tuple(random.randint(0, max(stages)) for _ in range(num_diagonals))))
    return in_a_row(lens, groups, parts, stages, **layout)


def random_infinipipe(seed: int) -> ChunkPlan:
    random = Random(seed)
    lens = [random.randint(1, 60) for _ in range(random.randint(1, 5))]
    stages = random.choice(((3, 3), (2, 2, 2)))
    return plan_infinipipe(lens, small_cost_model(), stages=stages)


def num_pipelines(plan: ChunkPlan) -> int:
    """Return how often the first of several stages has released its last graph."""
    held, ends = 0, 0
    for action in plan.actions[0]:
        held += isinstance(action, Forward) - isinstance(action, Backward)
        ends += isinstance(action, Backward) and held == 0
    return ends


def layer_first_pipeline(
    lens: Sequence[int],
    groups: Groups,
    heights: Sequence[Sequence[int]],
    *,
    sp_size: int = 1,
    **dials: Any,
) -> ChunkPlan:
    """Return a plan that is layer-first on each rank, with stages of `heights[rank]` layers: a rank
    runs all chunks of a group through a stage before its next; `dials` of `ChunkOptions`."""
    options = ChunkOptions(order="layer-first", **({"num_retained": 0} | dials))
    stages = [height for own in heights for height in own]
    stops = list(accumulate(map(len, heights)))
    lists = []
    for rank, stop in enumerate(stops):
        own = range(stop - len(heights[rank]), stop)
        actions: list[Action] = []
        for numbers in number_chunks(groups):
            for action in walk_groups([numbers], stages, options, only=own):
                actions += _with_messages(action, rank, own, len(stages))
        actions += [Reduce(stage) for stage in reversed(own)]
        lists.append(tuple(actions))
    chunks = tuple(chunk for group in groups for chunk in group)
    plan = ChunkPlan(tuple(lens), chunks, tuple(stages), tuple(lists), sp_size=sp_size)
    check(plan)
    return plan


def _with_messages(action: Action, rank: int, own: range, num_stages: int) -> list[Action]:
    assert isinstance(action, Computing)
    chunk, stage = action.chunk, action.stage
    found: list[Action] = [action]
    is_first, is_last = stage == own.start and rank > 0, stage == own.stop - 1 < num_stages - 1
    if isinstance(action, Forward):
        before, behind = is_first, is_last
        ends = ("activation", stage - 1, rank - 1), ("activation", stage, rank + 1)
    else:
        is_backward = isinstance(action, Backward)
        before, behind = is_last and is_backward, is_first and is_backward
        ends = ("gradient", stage + 1, rank + 1), ("gradient", stage, rank - 1)
    if before:
        found.insert(0, Recv(ends[0][0], chunk, *ends[0][1:]))
    if behind:
        found.append(Send(ends[1][0], chunk, *ends[1][1:]))
    return found


def groups_of(*texts: Sequence[str]) -> list[list[Chunk]]:
    """Return groups of chunks from their texts."""
    return [[parse_chunk(chunk) for chunk in group] for group in texts]


def in_order(lens: Sequence[int]) -> tuple[Sequence[int], list[list[Chunk]]]:
    """Return lengths and groups, one group per sequence, in the order of `lens`."""
    return lens, groups_of(*([f"{i}:0-{n}"] for i, n in enumerate(lens)))


def step(plan: ChunkPlan) -> tuple[float, float]:
    """Return the makespan in unit costs, and the bubble in percent."""
    timeline = simulate(plan, UnitCosts(plan))
    return timeline.duration_s, round(100 * measure(timeline).bubble_ratio, 2)


def most_graphs(plan: ChunkPlan) -> list[int]:
    """Return the maximum number of graphs that each rank holds at once."""
    most = []
    for actions in plan.actions:
        held, highest = 0, 0
        for action in actions:
            held += isinstance(action, Recompute)
            held += isinstance(action, Forward) and action.keep == "all"
            highest = max(highest, held)
            held -= isinstance(action, Backward)
        most.append(highest)
    return most
