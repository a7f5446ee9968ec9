"""Chunks of sequences that branch, such as one prompt with several answers (`plan.trees`).

Each stretch between two forks is cut by itself. Last stretches of branches that go on from one
token share chunks where they fit: attention then reads their prefix once for all of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from furlong.plan.values import Chunk, ChunkPlan, RebuildKV, Slice
from furlong.planners.chunks.pack import pack

Forks = Mapping[int, Sequence[tuple[int, int]]]
"""By sequence, the (first token, token it goes on from) of each branch that does not go on from the
token before it; sequences lie depth-first."""


def branch_chunks(
    seq_id: int, seq_len: int, forks: Sequence[tuple[int, int]], chunk_size: int
) -> list[Chunk]:
    """The chunks of a sequence that branches, in the order of their first tokens."""
    parents = dict(forks)
    cuts = sorted({0, seq_len, *parents, *parents.values()})
    stretches = [(start, stop, parents.get(start)) for start, stop in pairwise(cuts)]
    continued = {start if parent is None else parent for start, _, parent in stretches}
    chunks: list[Chunk] = []
    last: dict[int, dict[int, Slice]] = {}
    for start, stop, parent in stretches:
        whole = Slice(seq_id, start, stop, parent=parent)
        if start and stop not in continued and whole.num_tokens <= chunk_size:
            last.setdefault(whole.goes_on_from, {})[start] = whole
            continue
        for first in range(start, stop, chunk_size):
            before = parent if first == start else None
            piece = Slice(seq_id, first, min(first + chunk_size, stop), parent=before)
            chunks.append(Chunk((piece,)))
    for branches in last.values():
        bins = pack({start: piece.num_tokens for start, piece in branches.items()}, chunk_size)
        chunks += [Chunk(tuple(branches[start] for start in sorted(own))) for own in bins]
    return sorted(chunks, key=lambda chunk: chunk.slices[0].start)


def without_unread(plan: ChunkPlan) -> ChunkPlan:
    """The plan without the RebuildKV of chunks that nobody reads: the last ones of branches."""
    if not plan.trees:
        return plan
    kept = (
        tuple(a for a in own if not isinstance(a, RebuildKV) or plan.continues[a.chunk])
        for own in plan.actions
    )
    return replace(plan, actions=tuple(kept))
