"""Tokens of one cut sequence that one process stores at one stage, in segments, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from furlong.cost.memory.cells import StageBytes
from furlong.cost.shapes.shape import ModelShape
from furlong.plan.pieces import piece_lens_of
from furlong.plan.segments import StoredTokens, segment_tokens
from furlong.plan.values import ChunkPlan, Slice


def token_share(piece: Slice, process: int) -> float:
    """Share of a slice's tokens that a process of the pool holds."""
    place = piece.place
    return 1 / place.size if place.first <= process < place.stop else 0.0


def gathered_tokens(piece: Slice, process: int, shape: ModelShape) -> float:
    """Tokens whose K and V a process of the slice's place gets beyond its own part of them all,
    in units of whole heads: 0 where each has its own heads alone."""
    share = token_share(piece, process)
    return piece.num_tokens * (shape.kv_share(piece.place.size) - share) if share else 0.0


@dataclass(frozen=True)
class StoredLayers:
    """Tokens of one sequence that one process stores in the layers of a stage that share a
    window."""

    tokens: StoredTokens
    window: int | None
    layers: tuple[int, ...]
    """Numbers of the layers within the stage."""
    kv_token_bytes: float
    """Bytes of K and V of one token in one layer."""
    gradient_token_bytes: float
    sizes: tuple[int, ...]
    """Tokens of each segment."""
    pieces: tuple[tuple[int, ...], ...]
    """The pieces that touch each segment."""

    def touched(self, piece: int) -> range:
        """The segments that hold tokens of a piece."""
        return self.tokens.segments(self.tokens.of_piece(piece))

    def seen(self, piece: int) -> Sequence[int]:
        """The segments that hold tokens which a piece sees, ascending."""
        return self.tokens.seen_segments(piece, self.window)

    def sent_to(self, piece: int) -> Sequence[int]:
        """The segments that a piece sees and sends gradients to."""
        runs = self.tokens.seen_from(piece, self.window)
        parts = [part for run in runs for part in self.tokens.gradients_in(run)]
        if len(parts) == 1:
            return self.tokens.segments(parts[0])
        return sorted({index for part in parts for index in self.tokens.segments(part)})

    def takes_gradients(self, index: int) -> bool:
        """Whether a segment holds tokens whose gradients are kept."""
        return bool(self.tokens.gradients_in(range(*self.tokens.bounds[index : index + 2])))


def stored_layers(
    shape: ModelShape,
    plan: ChunkPlan,
    cell: StageBytes,
    seq_id: int,
    stage: int,
    process: int,
    device_type: str,
) -> tuple[StoredLayers, ...]:
    """Stored tokens of a cut sequence at a stage, one entry per window; none on a process without a
    share."""
    group = plan.groups[seq_id][: plan.num_computed[seq_id]]
    first_piece = next(s for s in plan.chunks[group[0]].slices if s.seq_id == seq_id)
    if not token_share(first_piece, process):
        return ()
    share = shape.kv_share(first_piece.place.size)
    first = sum(plan.stages[:stage])
    windows = shape.windows[first : first + plan.stages[stage]]
    lens, tree = piece_lens_of(plan, seq_id), plan.trees.get(seq_id)
    kv = cell.kv_layer * share
    found = []
    attends = [mixer.attends for mixer in shape.mixers[first : first + plan.stages[stage]]]
    for window in dict.fromkeys(w for w, has in zip(windows, attends, strict=True) if has):
        tokens = StoredTokens.of(lens, window, segment_tokens(kv, device_type), tree)
        if plan.sampled:
            tokens = tokens.with_gradients_of(i for i, c in enumerate(group) if c in plan.trained)
        sizes = [stop - start for start, stop in pairwise(tokens.bounds)]
        layers = tuple(i for i, other in enumerate(windows) if other == window and attends[i])
        gradients = cell.kv_gradient_layer * share
        touching = _pieces_of_segments(tokens)
        found.append(StoredLayers(tokens, window, layers, kv, gradients, tuple(sizes), touching))
    return tuple(found)


def _pieces_of_segments(tokens: StoredTokens) -> tuple[tuple[int, ...], ...]:
    """The pieces that touch each segment, each found once."""
    pieces: list[list[int]] = [[] for _ in range(tokens.num_segments)]
    for piece in range(len(tokens.lens)):
        for index in tokens.segments(tokens.of_piece(piece)):
            pieces[index].append(piece)
    return tuple(map(tuple, pieces))
