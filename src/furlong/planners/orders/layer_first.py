"""The layer-first walk: one stage for all chunks of a group, then the next; back in reverse.

All stages are on one rank (or one sp group), so nothing is sent. Between forward and backward a
cell keeps its stage input; K,V live for one stage at a time, and are rebuilt when the backward
comes to it. The last stage turns around on the spot: its K,V are still there.

With one stage this is SeCO's walk, with one layer per stage FPDT's (Yao et al., 2024), whose own
backward walks K,V outside and queries inside; here chunks descend, with the same gradients, and
grouped heads spare the backward's loads too. In between, a stage of h of L
layers holds L/h hidden states and h layers of K,V with their gradients per token: the peak is
lowest near h = sqrt(L * hidden bytes / K,V bytes per layer).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from furlong.plan.values import Action, Backward, Forward, Keep, RebuildKV, Recompute, Reduce


def stage_heights(num_layers: int, stage_layers: int) -> tuple[int, ...]:
    """Layers per stage: as few stages as hold at most `stage_layers` each, of even height."""
    if num_layers < 1 or stage_layers < 1:
        raise ValueError(f"no stages of {stage_layers} of {num_layers} layers")
    num_stages = -(-num_layers // stage_layers)
    low, num_higher = divmod(num_layers, num_stages)
    return (low + 1,) * num_higher + (low,) * (num_stages - num_higher)


def walk_layer_first(
    chunks: Sequence[int],
    stages: Sequence[int],
    *,
    keep: Keep,
    num_retained: int = 0,
    recompute_layers: int = 0,
    frozen_stages: int = 0,
    backward: bool = True,
    reduces: bool = False,
    only: Collection[int] | None = None,
) -> list[Action]:
    """Actions for one group: all pieces of one sequence in order, or one packed chunk.

    `stages`: layers of each. `keep`: input and attention drop K,V after their stage (attention also
    keeps each layer's attention output, so that a recompute runs no attention); kv and all hold
    those of all stages. `num_retained`: that many last chunks keep their graph at the last stage,
    whose backward comes next; at any other stage a graph would be held through all stages behind
    it, which is what the walk spares (with `keep="all"` every cell does). `recompute_layers`: as
    many first layers of a cell's graph keep only their input. `frozen_stages`: first stages without
    a backward, for there is nothing to train in them or below. `reduces`: this is a rank's last
    group, and each stage is reduced behind its last Backward. `only`: those stages alone, for who
    wants the time of one stage of each kind. Without backward nothing outlives its last reader, and
    none of this matters.
    """
    last = len(stages) - 1
    walked = [stage for stage in range(last + 1) if only is None or stage in only]
    if not backward:
        return [Forward(c, stage, "input") for stage in walked for c in chunks]
    retained = frozenset(chunks[max(0, len(chunks) - num_retained) :])
    layers = [min(recompute_layers, height) for height in stages]

    def forward(chunk: int, stage: int) -> Forward:
        if stage < frozen_stages:
            return Forward(chunk, stage, "input")
        if keep == "all" or (stage == last and chunk in retained):
            return Forward(chunk, stage, "all", layers[stage])
        # the last stage's K,V are there until its backward, which comes next
        return Forward(chunk, stage, "kv" if keep == "input" and stage == last else keep)

    actions: list[Action] = [forward(c, stage) for stage in walked for c in chunks]
    for stage in reversed(walked):
        if stage < frozen_stages:
            break
        if stage < last and keep in ("input", "attention"):
            # the last chunk of a group has no reader
            actions += [RebuildKV(chunk, stage) for chunk in chunks[:-1]]
        for chunk in reversed(chunks):
            if keep != "all" and not (stage == last and chunk in retained):
                actions.append(Recompute(chunk, stage, layers[stage]))
            actions.append(Backward(chunk, stage))
        if reduces:
            actions.append(Reduce(stage))
    return actions
