"""Seq1F1B (Sun et al., 2024): a pipeline over slices of sequences, in token-level 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.plan import ON_DEVICE, Action, ChunkPlan, Forward, Offload
from furlong.planners.chunks import Groups
from furlong.planners.orders import assemble, number_chunks, seq1f1b_cells, with_messages


def plan_seq1f1b(
    seq_lens: Sequence[int],
    groups: Groups,
    *,
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    offload: Offload = ON_DEVICE,
    sp_size: int = 1,
    frozen_stages: int = 0,
) -> ChunkPlan:
    """A checked plan of any groups in token-level 1F1B, in the order in which they are listed.

    `stages`: layers per stage; rank s holds stage s. `recompute_layers[stage][chunk]`: how many
    layers of the cell are checkpointed, each by its own input (default none). The first
    `frozen_stages`, with nothing to train in them or below, only run forward.
    """
    lists = token_level_lists(number_chunks(groups), stages, recompute_layers, frozen_stages)
    return assemble(
        seq_lens,
        groups,
        stages,
        lists,
        offload=offload,
        sp_size=sp_size,
        frozen_stages=frozen_stages,
    )


def token_level_lists(
    numbered: Sequence[range],
    stages: Sequence[int],
    recompute_layers: Sequence[Sequence[int]] = (),
    frozen_stages: int = 0,
) -> list[list[Action]]:
    """The list of every rank for groups whose chunks have the numbers `numbered`."""
    num_stages, lists = len(stages), []
    for stage, row in enumerate(recompute_layers or [()] * num_stages):
        cells = seq1f1b_cells(numbered, num_stages, stage, row)
        if stage < frozen_stages:
            cells = [Forward(chunk, stage, "input") for chunks in numbered for chunk in chunks]
        lists.append(with_messages(cells, stage, num_stages, frozen_stages))
    return lists
