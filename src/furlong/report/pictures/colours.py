"""The colour of every chunk: shades of a hue along a cut sequence, tones that differ from neighbour
to neighbour for whole sequences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from furlong.plan.values import Backward, ChunkPlan, Forward, RebuildKV, Recompute
from furlong.report.pictures.looks import DARKEST, PACKED_COLOURS, SEQUENCE_COLOURS, tint
from furlong.timeline import Timeline

CELLS = (Forward, Recompute, RebuildKV, Backward)


@dataclass(frozen=True, slots=True)
class ChunkLook:
    """The colour of a chunk and its reason."""

    colour: str
    sequence: int | None
    """The sequence that is cut, in this plan or in another of the picture, and that the chunk holds
    a piece of; None where there is none."""


def cut_sequences(plans: Iterable[ChunkPlan]) -> dict[int, int]:
    """The tokens of each sequence that some plan cuts, the longest first."""
    tokens: dict[int, int] = {}
    for plan in plans:
        for seq_id in plan.groups:
            # a method's padding is not the sequence's
            tokens[seq_id] = min(tokens.get(seq_id, plan.seq_lens[seq_id]), plan.seq_lens[seq_id])
    return dict(sorted(tokens.items(), key=lambda item: (-item[1], item[0])))


def hue(place: int) -> str:
    """The colour of the cut sequence at a place of `cut_sequences`."""
    return SEQUENCE_COLOURS[place % len(SEQUENCE_COLOURS)]


def colour_chunks(
    plan: ChunkPlan, timeline: Timeline, cut: Mapping[int, int]
) -> tuple[ChunkLook, ...]:
    """The look of each chunk, where `cut` are the cut sequences of all plans of a picture."""
    hues = {seq_id: hue(place) for place, seq_id in enumerate(cut)}
    tones = _tones(_runs(timeline))
    looks: list[ChunkLook] = []
    for chunk, links in enumerate(plan.links):
        slices = plan.chunks[chunk].slices
        if links:
            seq_id, position = links[0]
            left = 1 - position / (len(plan.groups[seq_id]) - 1)
            looks.append(ChunkLook(tint(hues[seq_id], -DARKEST * left), seq_id))
        elif len(slices) == 1 and slices[0].seq_id in hues:
            looks.append(ChunkLook(hues[slices[0].seq_id], slices[0].seq_id))
        else:
            looks.append(ChunkLook(PACKED_COLOURS[tones.get(chunk, 0)], None))
    return tuple(looks)


def _runs(timeline: Timeline) -> list[list[int]]:
    """For each rank and kind of cell, the chunks in the order in which they run."""
    runs: dict[tuple[int, type], list[int]] = defaultdict(list)
    for record in sorted(timeline.records, key=lambda record: record.start_s):
        action = record.action
        if record.lane == "compute" and isinstance(action, CELLS):
            runs[record.rank, type(action)].append(action.chunk)
    return list(runs.values())


def _tones(runs: Sequence[Sequence[int]]) -> dict[int, int]:
    """A tone for each chunk, in turn, unless a neighbour in some run has it already."""
    near: dict[int, set[int]] = defaultdict(set)
    for run in runs:
        for one, other in pairwise(run):
            near[one].add(other)
            near[other].add(one)
    tones: dict[int, int] = {}
    for chunk in dict.fromkeys(chunk for run in runs for chunk in run):
        taken = Counter(tones[other] for other in near[chunk] - {chunk} if other in tones)
        in_turn = [(len(tones) + i) % len(PACKED_COLOURS) for i in range(len(PACKED_COLOURS))]
        tones[chunk] = min(in_turn, key=taken.__getitem__)
    return tones
