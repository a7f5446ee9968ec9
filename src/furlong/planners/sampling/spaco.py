"""SeCO and SpaCO on one device (Li et al., Findings of ACL 2025).

SeCO: a first pass without graphs keeps the K,V of every chunk; then, from the last chunk down, each
is run again and sent back at once. That is ChunkFlow with nothing retained, so it takes 4/3 of the
time of a plain step (forward 1, recompute 1, backward 2) and never holds two graphs.

SpaCO: the same with a backward for t drawn chunks of k: 1 + 3 t/k forwards in all. The paper's
listing runs over the drawn chunks in any order; it must descend.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.values import ChunkPlan
from furlong.planners.methods.chunkflow import plan_chunkflow
from furlong.planners.options import ChunkOptions
from furlong.planners.sampling.plans import sampled
from furlong.planners.sampling.rules import Sampling


def plan_seco(seq_lens: Sequence[int], *, num_layers: int, chunk_size: int) -> ChunkPlan:
    """A checked plan for one device; short sequences are packed into chunks of their own."""
    options = ChunkOptions(size=chunk_size, num_retained=0, keep="kv", hybrid=False)
    return plan_chunkflow(seq_lens, options, stages=(num_layers,))


def plan_spaco(
    seq_lens: Sequence[int], sampling: Sampling, *, num_layers: int, chunk_size: int
) -> ChunkPlan:
    """A checked plan whose backwards are those of the chunks that `sampling` draws."""
    plan = plan_seco(seq_lens, num_layers=num_layers, chunk_size=chunk_size)
    return sampled(plan, sampling)
