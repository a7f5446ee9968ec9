"""The plan of a batch of which each replica has planned its own sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch.distributed as dist

from furlong.errors import ConfigError, UserError
from furlong.plan.values import ChunkPlan
from furlong.planners.orders.replicas import join_replicas
from furlong.runtime.parallel.ranks import Ranks


def planned_together(ranks: Ranks, make: Callable[[], ChunkPlan]) -> tuple[ChunkPlan, range]:
    """The joined plan, the same on all replicas, and the numbers of this one's sequences in it.

    `make`: the plan of this replica's own sequences. Raises ConfigError for other layouts, and on
    all replicas where it raises on one.
    """
    require_replicas(ranks)
    own: ChunkPlan | UserError
    try:
        own = make()
    except UserError as error:
        own = error
    found: list[ChunkPlan | UserError | None] = [None] * ranks.dp
    dist.all_gather_object(found, own, group=ranks.group)
    plans = [plan for plan in found if isinstance(plan, ChunkPlan)]
    if isinstance(own, UserError):
        raise own
    if len(plans) < ranks.dp:
        replica = next(index for index, plan in enumerate(found) if isinstance(plan, UserError))
        raise ConfigError(
            given=f"an error on replica {replica}, while this one waits for its plan",
            required="sequences and options that every replica can plan",
            source=f"replica {replica}: {str(found[replica]).splitlines()[0]}",
            change="see the message of that process",
        )
    stops = list(accumulate(len(plan.seq_lens) for plan in plans))
    ids = [range(stop - len(p.seq_lens), stop) for p, stop in zip(plans, stops, strict=True)]
    seq_lens = [seq_len for plan in plans for seq_len in plan.seq_lens]
    return join_replicas(plans, ids, seq_lens), ids[ranks.replica]


def require_replicas(ranks: Ranks) -> None:
    """Raise ConfigError for ranks that are more than replicas."""
    if ranks.sp > 1 or ranks.pp > 1:
        raise ConfigError(
            given=f"a plan by furlong.Engine for sp {ranks.sp}, pp {ranks.pp}",
            required="replicas alone: pools and pipelines need a planner that knows them",
            source="the ranks that were passed to furlong.Engine",
            change="make a plan of the whole batch with furlong.planners, pass it to Engine.run",
        )
