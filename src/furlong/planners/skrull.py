"""Skrull: micro-batches of whole sequences, each on one device or sharded over a group.

Xu et al., NeurIPS 2025 (arXiv 2505.19609).

Global data scheduling (GDS, Algorithm 2 for Eqs. 8 to 11) balances the work over the replicas
(`chunks.by_cost`). It then divides the sequences of each replica into as few micro-batches as
memory allows, with long and short ones mixed: each takes every m-th sequence by rising length
(`micro_batches`). A micro-batch is one chunk of a one-stage plan; replicas may have different
numbers of them.

Placement (DACP, Algorithm 1 for Eqs. 1 to 7: `chunks.place_by_load`) decides for each micro-batch
which sequences stay local. Such a sequence goes to the process with least work or, if it does not
fit there, to the one with most room. If no process has room for it, the shortest local sequence of
the fullest process is sharded after all. Work is the model's FLOPs (Eq. 13, with the model's
constants, and causal attention halved). Room is the number of further tokens that fit in memory
(Eq. 12).

Errata: RollBack (Algorithm 3) prints a wrong sign and omits the other ranks: as printed it always
fails. As corrected here, placement succeeds whenever all processes together have room for all
tokens. Algorithm 2 restarts its loop where the loop should end. Here numbers of micro-batches are
tried from the ceiling of tokens over room up to one per sequence.

Placement does not use the cost model: a sequence stays local wherever it has room.
`planners.places` places by predicted seconds. As few layers as possible are recomputed (our
addition).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from furlong.cost.model import CostModel
from furlong.plan.check import check
from furlong.plan.plan import Chunk, ChunkPlan, Slice
from furlong.planners.chunks import (
    by_place,
    chunk_by_chunk,
    does_not_fit,
    fitting_tokens,
    place_by_load,
    recompute_choices,
    sequence_work,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.question import Candidate, Space


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield one candidate for a pool of several devices without a pipeline; its planner ensures
    that its plans fit in memory."""
    layout, limit_bytes = space.layout, space.question.limits.limit_bytes
    if layout.pp == 1 < layout.sp:
        plan_of = partial(
            plan_skrull, model=space.model, sp_size=layout.sp, budget_bytes=limit_bytes
        )
        yield Candidate("skrull", space, ChunkOptions(), 0.0, plan_of)


def plan_skrull(
    seq_lens: Sequence[int], model: CostModel, *, sp_size: int, budget_bytes: int
) -> ChunkPlan:
    """Return a checked plan of one replica on a pool of `sp_size` devices, with as few recomputed
    layers as fit in memory. Raises ConfigError if it does not fit with all layers recomputed."""
    memory, num_layers = model.memory(budget_bytes), model.shape.num_layers
    work = sequence_work(seq_lens, model.shape)
    for layers in recompute_choices(num_layers):
        tokens = fitting_tokens(memory, dp_size=1, sp_size=sp_size, recompute_layers=layers)
        if tokens * sp_size < max(seq_lens):
            continue
        batches = micro_batches(
            range(len(seq_lens)), seq_lens, work, sp_size=sp_size, bucket_tokens=tokens
        )
        plan = chunk_by_chunk(
            seq_lens, [batches], num_layers=num_layers, sp_size=sp_size, recompute_layers=layers
        )
        if max(memory.peak_bytes_of_actions(plan, 0)) <= budget_bytes:
            check(plan, memory)
            return plan
    raise does_not_fit(seq_lens, model, budget_bytes, sp_size=sp_size, recompute_layers=num_layers)


def micro_batches(
    seq_ids: Iterable[int],
    seq_lens: Sequence[int],
    work: Sequence[float],
    *,
    sp_size: int,
    bucket_tokens: int,
) -> list[Chunk]:
    """Return one replica's micro-batches, with the processes of each sequence (Algs. 1 and 2,
    corrected). Each of m micro-batches has every m-th sequence by rising length, for the smallest m
    that fits.

    `work`: FLOPs (or another measure) of each sequence. `bucket_tokens`: most tokens of a device;
    all devices of the group together must have room for the longest sequence.
    """
    rising = sorted(seq_ids, key=seq_lens.__getitem__)
    fewest = -(-sum(seq_lens[i] for i in rising) // (bucket_tokens * sp_size))
    for count in range(fewest, len(rising) + 1):
        found = []
        for first in range(count):
            batch = sorted(rising[first::count])
            places = place_by_load(
                [seq_lens[i] for i in batch], [work[i] for i in batch],
                bucket_tokens=bucket_tokens, sp_size=sp_size,
            )  # fmt: skip
            if places is None:
                break
            placed = zip(batch, places, strict=True)
            found.append(Chunk(by_place(Slice(i, 0, seq_lens[i], at) for i, at in placed)))
        if len(found) == count:
            return found
    raise AssertionError("every sequence fits into a micro-batch of its own")
