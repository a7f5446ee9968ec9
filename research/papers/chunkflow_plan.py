"""ChunkFlow (Yuan et al., ICML 2025); on one device also SeCO's order (Li et al., 2025).

Sequences longer than a chunk are cut, short ones packed; each cut sequence is a group of chunks and
each packed chunk a group of its own. One group runs after the other, longest first. By default the
tail of a cut sequence shares its chunk with whole short sequences, which ChunkFlow never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from furlong.plan.plan import Action, ChunkPlan, Recompute, Recv
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b


def plan_chunkflow(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    stages: Sequence[int],
    backward: bool = True,
) -> ChunkPlan:
    """A checked plan of ChunkFlow's chunks in state-aware 1F1B, longest group first.

    `stages`: layers per stage; rank s holds stage s, and one stage is one device. Chunk-first,
    whatever `options.order` says: `orders.one_device` follows it.
    """
    return plan_1f1b(
        seq_lens,
        group_chunks(seq_lens, options),
        stages=stages,
        num_retained=options.num_retained,
        keep=options.keep,
        offload=options.offloading,
        recompute_layers=options.recompute_layers,
        backward=backward,
    )


def recomputed_late(plan: ChunkPlan) -> ChunkPlan:
    """The plan with each recompute behind the gradient that its backward waits for, as ChunkFlow
    draws it; never faster than a recompute as soon as its stage is free."""
    return replace(plan, actions=tuple(map(_gradients_first, plan.actions)))


def _gradients_first(actions: Sequence[Action]) -> tuple[Action, ...]:
    found = list(actions)
    for place, (one, other) in enumerate(pairwise(actions)):
        if isinstance(one, Recompute) and isinstance(other, Recv) and other.payload == "gradient":
            found[place : place + 2] = other, one
    return tuple(found)
