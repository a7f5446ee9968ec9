"""Colours of pictures: a hue for every cut sequence, a tone for every chunk of whole sequences that
differs from its neighbours', a shade for every kind of action, a fill for every part of memory.

The colours of a group differ for the colour-blind too, at full strength and half as strong: the
tests simulate how they see them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from furlong.plan.values import COMPUTING, ChunkPlan
from furlong.timeline import Timeline

Kind = Literal[
    "forward", "recompute", "rebuild", "backward", "activation", "gradient", "collective", "copy"
]

SEQUENCE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Hues of cut sequences, the longest first; they repeat when there are more (after Okabe, Ito)."""
PACKED_COLOURS = ("#2b4256", "#cfc08a", "#8780cc", "#86793f")
"""Tones of the chunks that hold whole sequences."""
DARKEST = 0.35
"""How much black the first chunk of a cut sequence has; the last one has none."""
GREY = "#7b8798"

INK, FAINT, LINE, LIMIT = "#1d2530", "#667080", "#c3c9d3", "#c8372d"
LANE = "#eef0f4"
"""The ground on which a rank's actions stand: what stays free of them is idle."""

PART_COLOURS = {
    "weights": "#55606f",
    "gradients": "#8d96a3",
    "optimizer": "#b9c0c9",
    "buffers": "#e3e6ea",
    "kv": "#2f6fb0",
    "kv_gradients": "#9cc3e6",
    "states": "#882e10",
    "activations": "#e08a2e",
    "logits": "#f2d64b",
    "in use": "#9db6d3",
    "host": "#8a6fb0",
    "host and disk": "#8a6fb0",
    "disk": "#c9b6de",
}
"""Fills of the parts of memory, from the bottom of a stack to its top; `in use` is the total, where
nothing more is known."""

MESSAGE_COLOURS: dict[Kind, str] = {
    "activation": "#2b3442",
    "gradient": "#8a93a3",
    "collective": "#b0752b",
    "copy": PART_COLOURS["host"],
}
KIND_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "recompute": "recompute",
    "rebuild": "rebuild K,V",
    "backward": "backward",
    "activation": "activation message",
    "gradient": "gradient message",
    "collective": "collectives",
    "copy": "copies between tiers",
}
"""The kinds in the order of a legend."""
LIGHTER: dict[Kind, float] = {"forward": 0.5, "recompute": 0.82, "rebuild": 0.82}
HATCHES: dict[Kind, str] = {"recompute": "//////", "rebuild": "......"}


def fill(colour: str, kind: Kind) -> str:
    """The shade of a kind: a forward is light, a backward full, a second computation almost white
    (and hatched); messages have colours of their own."""
    return MESSAGE_COLOURS.get(kind) or tint(colour, LIGHTER.get(kind, 0.0))


def tint(colour: str, share: float) -> str:
    """`colour` (#rrggbb) mixed with that share of white; a negative share is one of black."""
    to = 255 if share > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (to - part) * abs(share)):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """White or dark letters, whichever can be read on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK


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
            left = 1 - _done(plan, seq_id, position)
            looks.append(ChunkLook(tint(hues[seq_id], -DARKEST * left), seq_id))
        elif len(slices) == 1 and slices[0].seq_id in hues:
            looks.append(ChunkLook(hues[slices[0].seq_id], slices[0].seq_id))
        else:
            looks.append(ChunkLook(PACKED_COLOURS[tones.get(chunk, 0)], None))
    return tuple(looks)


def _done(plan: ChunkPlan, seq_id: int, position: int) -> float:
    """Share of a cut sequence's chunks before one, where it branches of those on its longest
    path: branches that are equally far from the start look alike."""
    tree = plan.trees.get(seq_id)
    if tree is None:
        return position / (len(plan.groups[seq_id]) - 1)
    return len(tree.path(position)) / max(len(tree.path(n)) for n in range(len(tree.parents)))


def _runs(timeline: Timeline) -> list[list[int]]:
    """For each rank and kind of cell, the chunks in the order in which they run."""
    runs: dict[tuple[int, type], list[int]] = defaultdict(list)
    for record in sorted(timeline.records, key=lambda record: record.start_s):
        action = record.action
        if record.lane == "compute" and isinstance(action, COMPUTING):
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
