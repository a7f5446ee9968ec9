"""The invariants of a plan's chunks alone: coverage, and what a chunk may hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from furlong.plan.grid import refuse_chunk
from furlong.plan.values import Action, ChunkPlan, Forward, Place, Slice, place_sizes
from furlong.units import count_words

_RULE_1 = "every token is in exactly one slice"
_RULE_2 = "a chunk holds at most one piece with a prefix per place, and a sequence keeps its place"
_RULE_3 = "a branch goes on from the end of an earlier piece on its path"


def check_chunks(plan: ChunkPlan) -> None:
    """Raise PlanError if the chunks of a plan break I1 or I2."""
    for rule, breaks in (
        (_RULE_1, _uncovered), (_RULE_2, _misplaced), (_RULE_3, _misgrown),
    ):  # fmt: skip
        for why, chunk in breaks(plan):
            raise refuse_chunk(plan, rule, why, chunk)


def _uncovered(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I1. The slices of each sequence tile it, and every sequence is there; a chunk without slices
    has no other use than to meet the passes of other ranks, or the Reduce if its rank has no other
    chunk."""
    several = len(plan.actions) > 1
    alone = {min(own) for own in map(_computed, plan.actions) if len(own) == 1}
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in plan.seq_lens]
    for index, chunk in enumerate(plan.chunks):
        if chunk.is_dummy and not (several and (plan.regathers or index in alone)):
            yield f"chunk {index} is empty, its rank needs none to go with others", index
        for piece in chunk.slices:
            if not 0 <= piece.seq_id < len(plan.seq_lens):
                yield (
                    f"none of {count_words(len(plan.seq_lens), 'sequence')} is {piece.seq_id}",
                    index,
                )
            if piece.stop <= piece.start:
                yield f"a slice of sequence {piece.seq_id} is empty", index
            pieces[piece.seq_id].append((piece.start, piece.stop, index))
    for seq_id, (seq_len, found) in enumerate(zip(plan.seq_lens, pieces, strict=True)):
        covered, index = 0, 0
        for start, stop, index in sorted(found):
            if start != covered:
                yield (
                    f"sequence {seq_id} is covered up to token {covered}, then from {start}",
                    index,
                )
            covered = stop
        if covered != seq_len or not found:
            yield (
                f"sequence {seq_id} has {count_words(seq_len, 'token')},"
                f" its slices cover {covered}",
                index,
            )


def _computed(actions: Iterable[Action]) -> set[int]:
    """The chunks of a rank."""
    return {action.chunk for action in actions if isinstance(action, Forward)}


def _misplaced(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I2. Places are nested, few pieces have a prefix, a sequence is once in a chunk and keeps its
    place."""
    places: dict[int, Place] = {}
    for index, chunk in enumerate(plan.chunks):
        if why := _oddity(chunk.slices, plan.sp_size):
            yield why, index
        for piece in chunk.slices:
            if places.setdefault(piece.seq_id, piece.place) != piece.place:
                yield f"sequence {piece.seq_id} has another place in an earlier chunk", index


def _oddity(slices: tuple[Slice, ...], sp_size: int) -> str:
    if sp_size < 1:
        return f"a pool has at least one process, not {sp_size}"
    places = [piece.place for piece in slices]
    sizes = place_sizes(sp_size)
    for place in dict.fromkeys(places):
        if place.size not in sizes or place.first not in range(0, sp_size, place.size):
            required = f"a size of {', '.join(map(str, sizes))} and begins at a multiple of it"
            return f"{place} is none of a pool of {sp_size}, where a place has {required}"
    if len(slices) > 1:
        before = {(piece.seq_id, piece.goes_on_from) for piece in slices}
        if len({seq_id for seq_id, _ in before}) < len(before):
            return "a sequence has two slices in the chunk, and they are no branches of one piece"
    order = [(-place.size, place.first) for place in places]
    if order != sorted(order):
        return "slices on larger places come first, then those of lower processes"
    for one, two in pairwise(slices):
        if one.place == two.place and two.start > 0 and one.seq_id != two.seq_id:
            return "only the first slice on a place, and branches beside it, may have a prefix"
    return ""


def _misgrown(plan: ChunkPlan) -> Iterator[tuple[str, int]]:
    """I2, of sequences that branch: pieces lie depth-first, and nothing goes on from those that
    share a chunk. All are on one process, and none is left out."""
    pieces: dict[int, list[tuple[Slice, int]]] = {}
    for index, chunk in enumerate(plan.chunks):
        for piece in chunk.slices:
            pieces.setdefault(piece.seq_id, []).append((piece, index))
    for seq_id, own in pieces.items():
        branches = [index for piece, index in own if piece.parent is not None]
        if not branches:
            continue
        if plan.sampled or plan.sp_size > 1 or len(plan.actions) > 1:
            ranks = f"has {count_words(len(plan.actions), 'rank')} of {plan.sp_size} processes"
            why = "is sampled" if plan.sampled else ranks
            yield f"sequence {seq_id} branches, and the plan {why}", branches[0]
        chunks = [index for _, index in own]
        path = [0]
        followed = {piece.goes_on_from for piece, _ in own}
        for piece, index in sorted(own, key=lambda pair: pair[0].start):
            if piece.goes_on_from not in path or piece.parent == piece.start:
                yield f"no piece of the path ends at token {piece.parent}, or it is the last", index
            path = [*path[: path.index(piece.goes_on_from) + 1], piece.stop]
            if piece.stop in followed and chunks.count(index) > 1:
                yield f"a piece goes on from token {piece.stop}, in a chunk of branches", index
