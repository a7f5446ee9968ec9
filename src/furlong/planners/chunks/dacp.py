"""Skrull's placement of the sequences of one micro-batch (Xu et al., arXiv 2505.19609, Alg. 1).

A sequence is local to one process of a context-parallel group or sharded over all of them. Short
ones stay local as long as memory allows; where it does not, the shortest local one of the fullest
rank is sharded after all. The paper's RollBack (Alg. 3) has a wrong sign and leaves the other ranks
out; as corrected here places are found exactly where all tokens fit into all buckets.

Rooms are counted in tokens times the number of ranks, so that a share of a sequence is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from furlong.plan.values import Place


def place_by_load(
    seq_lens: Sequence[int], work: Sequence[float], *, bucket_tokens: int, sp_size: int
) -> list[Place] | None:
    """The place of each sequence, one process or the whole group; None where they do not fit.

    `bucket_tokens`: what a rank holds at a time (a sharded sequence counts 1/sp_size with each; the
    split into whole tokens can add one per sharded sequence). `work`: FLOPs or any other measure of
    each sequence, spread evenly.
    """
    rooms = [bucket_tokens * sp_size] * sp_size
    loads = [0.0] * sp_size
    ranks: list[int | None] = [None] * len(seq_lens)
    local: list[deque[int]] = [deque() for _ in range(sp_size)]

    def shard(seq_id: int) -> None:
        shared = work[seq_id] / sp_size
        rooms[:] = [room - seq_lens[seq_id] for room in rooms]
        loads[:] = [load + shared for load in loads]

    def roll_back(rank: int) -> bool:
        if not local[rank]:
            return False
        seq_id = local[rank].popleft()
        ranks[seq_id] = None
        shard(seq_id)
        rooms[rank] += seq_lens[seq_id] * sp_size
        loads[rank] -= work[seq_id]
        return True

    for seq_id in sorted(range(len(seq_lens)), key=seq_lens.__getitem__):
        needed = seq_lens[seq_id] * sp_size
        while True:
            rank = loads.index(min(loads))
            if rooms[rank] < needed:
                rank = rooms.index(max(rooms))
            if rooms[rank] >= needed:
                ranks[seq_id] = rank
                local[rank].append(seq_id)
                rooms[rank] -= needed
                loads[rank] += work[seq_id]
                break
            fullest = rooms.index(min(rooms))
            if rooms[fullest] >= seq_lens[seq_id]:
                shard(seq_id)
                break
            if not roll_back(fullest):
                return None
    return [Place(0, sp_size) if rank is None else Place(rank, 1) for rank in ranks]
