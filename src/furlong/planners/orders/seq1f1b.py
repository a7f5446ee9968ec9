"""Token-level 1F1B: one forward, one backward, over the slices of sequences (Seq1F1B).

The order of Seq1F1B (Sun et al.) and of one pipeline of InfiniPipe (its 3.3.3): forwards
in the order of the groups; backwards last in, first out within a group, first in, first out across
groups. Stage s of P runs P - 1 - s + N - 1 forwards ahead, N chunks being the longest group, then
one forward and one backward in turn. Every chunk keeps its graph; a stage holds those of at most
P - 1 - s + N chunks, its window. Compare `orders.pipeline`, which holds fewer and recomputes.

The paper counts chunks and stages from 1; here all places start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.values import ON_DEVICE, Action, Backward, ChunkPlan, Forward, Tiers
from furlong.planners.chunks.groups import Groups
from furlong.planners.orders.pipeline import assemble, number_chunks, with_messages


def plan_seq1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    tiers: Tiers = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
) -> ChunkPlan:
    """A checked plan of any groups in token-level 1F1B, in the order in which they are listed.

    `stages`: layers per stage; rank s holds stage s. `recompute_layers[stage][chunk]`: how many
    layers of the cell are checkpointed, each by its own input (default none). The first
    `frozen_stages`, with nothing to train in them or below, only run forward.
    """
    numbered = number_chunks(groups)
    lists = token_level_lists(numbered, stages, recompute_layers, frozen_stages)
    return assemble(
        seq_lens, groups, stages, lists, tiers=tiers, sp_size=sp_size, frozen_stages=frozen_stages
    )


def token_level_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """The list of every rank for groups whose chunks have the numbers `numbered`; the first
    `frozen_stages` only run forward."""
    num_stages, lists = len(stages), []
    for stage, row in enumerate(recompute_layers or [()] * num_stages):
        cells = seq1f1b_cells(numbered, num_stages, stage, row)
        if stage < frozen_stages:
            cells = [Forward(chunk, stage, "input") for chunks in numbered for chunk in chunks]
        lists.append(with_messages(cells, stage, num_stages, frozen_stages=frozen_stages))
    return lists


def seq1f1b_cells(
    numbered: Sequence[range],
    num_stages: int,
    stage: int,
    recompute_layers: Sequence[int] = (),
) -> list[Action]:
    """The cells of one stage in order, for groups whose chunks have the numbers `numbered`.

    `recompute_layers`: those of each chunk, in forward order (default none).
    """
    forwards = [chunk for chunks in numbered for chunk in chunks]
    backwards = [chunk for chunks in numbered for chunk in reversed(chunks)]
    layers = recompute_layers or [0] * len(forwards)
    cells: list[Action] = [
        Forward(chunk, stage, "all", count) for chunk, count in zip(forwards, layers, strict=True)
    ]
    num_ahead = count_ahead([len(chunks) for chunks in numbered], num_stages, stage)
    paired: list[Action] = cells[:num_ahead]
    for place, chunk in enumerate(backwards):
        paired += cells[place + num_ahead : place + num_ahead + 1]
        paired.append(Backward(chunk, stage))
    return paired


def count_ahead(counts: Sequence[int], num_stages: int, stage: int) -> int:
    """Number of forwards before the first pair (Seq1F1B; InfiniPipe's Eq. 7 counts one more)."""
    return min(num_stages - 1 - stage + max(counts) - 1, sum(counts))


def backward_places(counts: Sequence[int]) -> list[int]:
    """Place in backward order of each chunk in forward order (InfiniPipe's f2b).

    `counts`: the chunks of each group, in the order in which they run.
    """
    places: list[int] = []
    for count in counts:
        places += range(len(places) + count - 1, len(places) - 1, -1)
    return places


def recompute_on_diagonals(
    layers: Sequence[int], counts: Sequence[int], num_stages: int
) -> list[list[int]]:
    """Values for recompute_layers[stage][chunk], equal along each diagonal of the schedule.

    `layers` has one value per diagonal, len(chunks) + num_stages - 1 of them (InfiniPipe, Eq. 15
    and 16). To recompute in one cell of a diagonal takes as long as in all of them.
    """
    return [
        [layers[place + num_stages - 1 - stage] for place in backward_places(counts)]
        for stage in range(num_stages)
    ]
