"""A plan without the backwards of chunks that were not drawn (SpaCO, Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from furlong.plan.check import check
from furlong.plan.values import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Send,
)
from furlong.planners.sampling.rules import Factors, Sampling, draw_chunks

_Cells = Mapping[tuple[int, int], int]


def sampled(plan: ChunkPlan, sampling: Sampling, labelled: Collection[int] = ()) -> ChunkPlan:
    """A checked plan of the same walk with a draw of its chunks; `labelled` as for
    `draw_chunks`."""
    drawn = draw_chunks(plan, sampling, labelled)
    return sample_backwards(plan, drawn, report_loss=sampling.report_loss)


def sample_backwards(
    plan: ChunkPlan, drawn: Mapping[int, Factors], *, report_loss: bool = False
) -> ChunkPlan:
    """A checked plan in which only the `drawn` chunks of `plan`, which trains all, get a backward.

    Works on any plan, also on pipelines and on layer-first walks: what a chunk that is not drawn
    would do in the backward falls away, with its messages; without `report_loss` so does the whole
    of one that no drawn chunk reads. Where `plan` retains the graphs of a sequence's last chunks,
    those of as many of its last drawn chunks are retained, as long as they have no more tokens: a
    draw needs no more memory than `plan`. A rank on which nothing is drawn trains its smallest
    chunk with factors 0, so that it has a gradient (of zeros) to reduce.
    """
    trained = dict(drawn)
    for actions in plan.actions:
        own = {action.chunk for action in actions if isinstance(action, Forward)}
        if own and own.isdisjoint(trained):
            smallest = min(own, key=lambda chunk: (plan.chunks[chunk].num_tokens, chunk))
            trained[smallest] = Factors(0.0, 0.0)
    read = {
        earlier
        for chunk in trained
        for seq_id, position in plan.links[chunk]
        for earlier in plan.groups[seq_id][:position]
    }
    computed = range(len(plan.chunks)) if report_loss else read | trained.keys()
    retained = _retained(plan, trained)
    found = replace(
        plan,
        actions=tuple(
            tuple(
                kept
                for action in actions
                if (kept := _sampled_action(action, trained, read, computed, retained))
            )
            for actions in plan.actions
        ),
        sampled=True,
        report_loss=report_loss,
    )
    check(found)
    return found


def _retained(plan: ChunkPlan, trained: Mapping[int, Factors]) -> _Cells:
    """The cells of cut sequences that keep their graph, with the layers of it that run again."""
    every = [action for actions in plan.actions for action in actions]
    again = {(a.chunk, a.stage): a.recompute_layers for a in every if isinstance(a, Recompute)}
    graphs = again | {
        (a.chunk, a.stage): a.recompute_layers
        for a in every
        if isinstance(a, Forward) and a.keep == "all"
    }
    retained = {}
    for group in plan.groups.values():
        own = [chunk for chunk in group if chunk in trained]
        for stage in range(len(plan.stages)):
            kept = [c for c in group if (c, stage) in graphs and (c, stage) not in again]
            room = sum(plan.chunks[c].num_tokens for c in kept)
            for chunk in own[max(0, len(own) - len(kept)) :][::-1]:
                room -= plan.chunks[chunk].num_tokens
                if room < 0:
                    break
                if (chunk, stage) in graphs:
                    retained[chunk, stage] = graphs[chunk, stage]
    return retained


def _sampled_action(
    action: Action,
    trained: Mapping[int, Factors],
    read: Collection[int],
    computed: Collection[int],
    retained: _Cells,
) -> Action | None:
    """The action that takes the place of one; None where it falls away."""
    match action:
        case Forward(chunk) | Send("activation", chunk) | Recv("activation", chunk) if (
            chunk not in computed
        ):
            return None
        case Forward(chunk, stage) if (chunk, stage) in retained:
            return Forward(chunk, stage, "all", retained[chunk, stage])
        case Forward(chunk, stage, "all") if chunk not in trained:
            # its K,V stay, and the graph that nobody consumes is never made
            return Forward(chunk, stage, "kv")
        case Recompute(chunk, stage) if (chunk, stage) in retained:
            return None
        case Backward(chunk, stage) if chunk in trained:
            factors = trained[chunk]
            return Backward(chunk, stage, factors.loss_factor, factors.relay_factor)
        case RebuildKV(chunk, stage) if chunk not in read or (chunk, stage) in retained:
            return None  # what keeps its graph has not dropped its K,V
        case Backward(chunk) | Recompute(chunk) if chunk not in trained:
            return None
        case Send("gradient", chunk) | Recv("gradient", chunk) if chunk not in trained:
            return None
    return action
