"""ChunkFlow on one device (Yuan et al., ICML 2025), which is also SeCO's order (Li et al., 2025).

Sequences longer than a chunk are cut, short ones packed; each cut sequence is a group of chunks and
each packed chunk a group of its own. One group runs after the other, longest first. By default the
tail of a cut sequence shares its chunk with whole short sequences, which ChunkFlow never does.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.check import check
from furlong.plan.values import Action, Chunk, ChunkPlan, Reduce, Slice
from furlong.planners.groups import longest_first, refuse_unusable
from furlong.planners.options import ChunkOptions
from furlong.planners.pack import pack
from furlong.planners.schedule import schedule_group
from furlong.planners.split import split_long


def plan_chunkflow(
    seq_lens: Sequence[int],
    options: ChunkOptions,
    *,
    num_layers: int,
    backward: bool = True,
) -> ChunkPlan:
    """A checked plan for one device and one stage; without backward a plan that only evaluates.

    Chunk-first, whatever `options.order` says: `planners.one_device` follows it.
    """
    chunks: list[Chunk] = []
    actions: list[Action] = []
    for group in group_chunks(seq_lens, options):
        first = len(chunks)
        chunks += group
        actions += schedule_group(
            range(first, len(chunks)),
            num_retained=options.num_retained,
            keep=options.keep,
            backward=backward,
            recompute_layers=min(options.recompute_layers, num_layers),
        )
    if backward:
        actions.append(Reduce(0))
    plan = ChunkPlan(
        seq_lens=tuple(seq_lens),
        chunks=tuple(chunks),
        stages=(num_layers,),
        actions=(tuple(actions),),
        tiers=options.tiers,
    )
    check(plan)
    return plan


def group_chunks(seq_lens: Sequence[int], options: ChunkOptions) -> list[list[Chunk]]:
    """The chunks of every cut sequence, and every packed chunk by itself; most tokens first."""
    refuse_unusable(seq_lens)
    long = split_long(seq_lens, options.size)
    short = {seq_id: n for seq_id, n in enumerate(seq_lens) if seq_id not in long}
    tails = [pieces[-1].num_tokens for pieces in long.values()] if options.hybrid else []
    bins = [
        [Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids]
        for seq_ids in pack(short, options.size, taken=tails)
    ]
    groups = [[Chunk((piece,)) for piece in pieces] for pieces in long.values()]
    if options.hybrid:
        for group, joined in zip(groups, bins, strict=False):
            # a chunk's piece with a prefix comes first
            group[-1] = Chunk((*group[-1].slices, *joined))
    groups += [[Chunk(tuple(slices))] for slices in bins[len(tails) :]]
    return longest_first(groups)
