"""The order of actions for one group of chunks at one stage (ChunkFlow, Algorithm 2, corrected).

Forwards ascend, and all but the last `num_retained` chunks drop their graphs; then backwards
descend and recompute what was dropped. The paper's listing retains the wrong chunks and recomputes
in ascending order, where dK,dV of a chunk would be incomplete; its text has it right.
"""

from __future__ import annotations

from collections.abc import Sequence

from furlong.plan.values import Action, Backward, Forward, Keep, RebuildKV, Recompute


def schedule_group(
    chunks: Sequence[int],
    *,
    num_retained: int,
    keep: Keep,
    backward: bool = True,
    stage: int = 0,
    recompute_layers: int = 0,
) -> list[Action]:
    """Actions for `chunks`: all pieces of one sequence in order, or one packed chunk.

    The last `num_retained` keep their whole graphs, the others what `keep` says; the first
    `recompute_layers` layers of every graph keep only their input. Without backward nothing
    outlives its last reader, and none of this matters.
    """
    if not backward:
        return [Forward(chunk, stage, "input") for chunk in chunks]
    num_dropped = 0 if keep == "all" else max(0, len(chunks) - num_retained)
    dropped, retained = chunks[:num_dropped], chunks[num_dropped:]
    actions: list[Action] = [Forward(chunk, stage, keep) for chunk in dropped]
    actions += [Forward(chunk, stage, "all", recompute_layers) for chunk in retained]
    if keep == "input":
        # Every Backward reads the K,V of all earlier chunks, those of retained chunks too, so all
        # that later chunks read is rebuilt first; the group's last chunk has no reader.
        actions += [RebuildKV(chunk, stage) for chunk in dropped if chunk != chunks[-1]]
    actions += [Backward(chunk, stage) for chunk in reversed(retained)]
    for chunk in reversed(dropped):
        actions += [Recompute(chunk, stage, recompute_layers), Backward(chunk, stage)]
    return actions
