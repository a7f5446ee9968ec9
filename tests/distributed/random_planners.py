"""Planners of random steps: the plan of one replica from its lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from helpers.pipeline_plans import layer_first_pipeline, row_of
from helpers.random_chunks import random_chunks
from papers.chunkflow_plan import recomputed_late
from papers.published.chunks import sliced_groups

from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import ModelShape
from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import Groups, group_chunks, sequence_work, shard_all, shard_long
from furlong.planners.infinipipe import plan_infinipipe
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_replica
from furlong.planners.places import plan_places
from furlong.planners.skrull import micro_batches

SIZE = 8
"""Tokens of a chunk on one process."""
KEEPS = ("input", "kv", "attention", "all")


@dataclass(frozen=True)
class Setting:
    """What a planner makes the plan of one replica for; `draw` is for the dials it has beside."""

    sp: int
    heights: tuple[int, ...]
    shape: ModelShape
    frozen_stages: int
    stage_layers: int
    """Most layers of a stage, layer-first."""
    draw: Random

    @property
    def cost(self) -> CostModel:
        return CostModel(self.shape, Machine.named("A100-80"))

    @property
    def pipeline(self) -> dict[str, Any]:
        """Keywords of the planners of pipelines."""
        return {"stages": self.heights, "sp_size": self.sp, "frozen_stages": self.frozen_stages}

    def sharded(self, groups: Groups) -> Groups:
        return shard_all(groups, self.sp) if self.sp > 1 else groups

    def cut(self, lens: Sequence[int]) -> Groups:
        return group_chunks(lens, ChunkOptions(size=SIZE, hybrid=self.draw.random() < 0.8))

    def walk(self) -> dict[str, Any]:
        """Dials of a walk that drops graphs."""
        return {
            "keep": self.draw.choice(KEEPS), "recompute_layers": self.draw.choice((0, 0, 1)),
        }  # fmt: skip


def state_aware(lens: Sequence[int], s: Setting, num_retained: int, **gathers: bool) -> ChunkPlan:
    dials = s.walk() | {"num_retained": num_retained} | gathers
    plan = plan_1f1b(lens, s.sharded(s.cut(lens)), **s.pipeline, **dials)
    return s.draw.choice((plan, recomputed_late(plan)))


def infinipipe(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return plan_infinipipe(lens, s.cost, stages=s.heights, sp_size=s.sp)


def in_a_row(lens: Sequence[int], s: Setting) -> ChunkPlan:
    groups = s.sharded(sliced_groups(lens, num_slices=3))
    return row_of(list(lens), groups, s.heights, [len(groups) // 2], s.draw, sp_size=s.sp)


def skrull(lens: Sequence[int], s: Setting) -> ChunkPlan:
    bucket = -(-max(lens) // s.sp) + 1
    work = sequence_work(lens, s.shape)
    batches = micro_batches(range(len(lens)), lens, work, sp_size=s.sp, bucket_tokens=bucket)
    return plan_1f1b(lens, [[batch] for batch in batches], **s.pipeline)


def dacp(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """Pieces of long sequences sharded, short ones beside them local."""
    groups = group_chunks(lens, ChunkOptions(size=2 * SIZE))
    return plan_1f1b(lens, shard_long(groups, lens, s.shape, s.sp), **s.pipeline, **s.walk())


def on_any_places(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """As many sequences of other lengths, whole and cut, each on a place of its own."""
    drawn: Sequence[int] = [1]
    while max(drawn) == 1:  # no label at all
        drawn, chunks = random_chunks(
            s.draw, s.sp, num_chunks=3, num_sequences=3 + len(lens), max_tokens=12
        )
    retained = s.draw.choice((0, 1, 2))
    return plan_1f1b(drawn, [chunks], num_retained=retained, **s.pipeline, **s.walk())


def places(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return plan_places(lens, s.cost, pool_size=s.sp, num_changes=0)


def on_one_rank(lens: Sequence[int], s: Setting, **order: Any) -> ChunkPlan:
    dials = s.walk() | {"num_retained": s.draw.choice((0, 1, 2))} | order
    options = ChunkOptions(size=SIZE, **dials)
    return plan_replica(lens, options, num_layers=sum(s.heights), sp_size=s.sp)


def layer_first(lens: Sequence[int], s: Setting) -> ChunkPlan:
    return on_one_rank(lens, s, order="layer-first", stage_layers=s.stage_layers)


def layer_first_stages(lens: Sequence[int], s: Setting) -> ChunkPlan:
    """A pipeline whose ranks run layer-first, each a layer at a time."""
    dials = s.walk() | {"num_retained": s.draw.choice((0, 1, 2))}
    heights = [(1,) * height for height in s.heights]
    return layer_first_pipeline(lens, s.sharded(s.cut(lens)), heights, sp_size=s.sp, **dials)


Planner = Callable[[Sequence[int], Setting], ChunkPlan]
PLANNERS: Mapping[str, tuple[Planner, Callable[[int, int, int], bool]]] = {
    # name: (planner of a replica, whether it fits into dp, sp, pp)
    "1F1B, K 0": (partial(state_aware, num_retained=0), lambda dp, sp, pp: pp > 1),
    "1F1B, K 1": (partial(state_aware, num_retained=1), lambda dp, sp, pp: pp > 1),
    "1F1B, K 2": (partial(state_aware, num_retained=2), lambda dp, sp, pp: pp > 1),
    "InfiniPipe": (infinipipe, lambda dp, sp, pp: pp > 1),
    "InfiniPipe, in a row": (in_a_row, lambda dp, sp, pp: pp > 1),
    "layer-first in a stage": (layer_first_stages, lambda dp, sp, pp: pp > 1),
    "Skrull": (skrull, lambda dp, sp, pp: sp > 1),
    "DACP in chunks": (dacp, lambda dp, sp, pp: sp > 1),
    "any places": (on_any_places, lambda dp, sp, pp: sp > 1),
    "places": (places, lambda dp, sp, pp: sp > 1 and pp == 1),
    "ChunkFlow": (on_one_rank, lambda dp, sp, pp: pp == 1),
    "layer-first": (layer_first, lambda dp, sp, pp: pp == 1),
    "1F1B, gathers": (
        partial(state_aware, num_retained=1, regathers=True),
        lambda dp, sp, pp: sp > 1 and pp > 1,
    ),
}
MAY_FREEZE = {"1F1B, K 0", "1F1B, K 1", "1F1B, K 2", "DACP in chunks"}
"""Planners of pipelines that leave backwards out of frozen stages."""
