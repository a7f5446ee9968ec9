"""ChunkFlow (Yuan et al., ICML 2025); on one device also SeCO's order (Li et al., 2025).

Sequences longer than a chunk are cut, short ones packed; each cut sequence is a group of chunks and
each packed chunk a group of its own. One group runs after the other, longest first. By default the
tail of a cut sequence shares its chunk with whole short sequences, which ChunkFlow never does.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.plan import ChunkPlan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import RecomputeStart, plan_1f1b


def plan_chunkflow(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    stages: Sequence[int],
    recompute: RecomputeStart = "eager",
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
        tiers=options.tiers,
        recompute=recompute,
        recompute_layers=options.recompute_layers,
        backward=backward,
    )
