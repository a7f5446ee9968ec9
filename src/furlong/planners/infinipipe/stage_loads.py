"""Bytes that the stages of any pipeline hold, from one walk of the cost model over a batch.

InfiniPipe's Eqs. 5 to 10 with the bytes of `cost.memory` in the place of fitted constants. The
exact walk of one plan without checkpointing gives what every forward and every backward needs for
itself; the graphs, inputs, K,V and dK,dV that lie there beside it are added for each grouping into
pipelines. The sums are those of the walk (the tests compare), for a matrix product.

    P stages, K chunks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory.cells import StageBytes
from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.memory.stored_layers import stored_layers
from furlong.plan.values import Backward, ChunkPlan, Forward
from furlong.planners.infinipipe.checkpointing import Array, PipelineLoads, StageLoad
from furlong.planners.orders.seq1f1b import backward_places, count_ahead


@dataclass(frozen=True)
class BatchLoads:
    """Bytes of a batch's chunks on every stage, of the process of an sp group that needs most."""

    counts: tuple[int, ...]
    """Chunks of each group, in forward order."""
    heights: tuple[int, ...]
    kept_bytes: Array
    """(3, P, K) Bytes of stage input and graph, from forward to backward; of stored K,V, by the
    chunk that has a segment's first token; of the gradients of that K,V."""
    saved_bytes: Array
    """(P, K) Bytes less for each checkpointed layer."""
    again_bytes: Array
    """(P, K) Bytes more while a backward recomputes."""
    own_bytes: Array
    """(2, P, K) Static and transient bytes of a forward, and of a backward: weights, optimizer, all
    that works."""

    @classmethod
    def of(cls, plan: ChunkPlan, counts: Sequence[int], memory: PlanMemory) -> BatchLoads:
        """The loads of a plan of all groups in one pipeline with nothing checkpointed.

        All slices must lie alike on the processes of an sp group: sharded, or sp_size 1.
        """
        cells = [memory.cell(plan.stages, stage) for stage in range(len(plan.stages))]
        tokens = np.array([chunk.num_tokens for chunk in plan.chunks]) / plan.sp_size
        # the input of a later stage is the message that brought it
        inputs = [cell.message if stage else cell.input for stage, cell in enumerate(cells)]
        held = [(i + cell.graph()) * tokens for i, cell in zip(inputs, cells, strict=True)]
        kept = np.stack([np.array(held), *_stored(plan, cells, memory)])
        own = np.zeros((2, *kept.shape[1:]))
        for stage, actions in enumerate(plan.actions):
            # what the walk finds beside what is kept
            at = [i for i, a in enumerate(actions) if isinstance(a, (Forward, Backward))]
            walked = np.array(memory.peak_bytes_of_actions(plan, stage), dtype=float)[at]
            moments = _Moments(counts, len(plan.stages), stage)
            beside = walked - moments.kept_bytes(kept[:, stage])
            own[moments.is_backward.astype(int), stage, moments.acting] = beside
        return cls(
            tuple(counts), plan.stages, kept,
            np.array([_saved_per_layer(cell) * tokens for cell in cells]),
            np.array([max(cell.graph_layers) * tokens for cell in cells]), own,
        )  # fmt: skip

    def pipeline(self, first: int, stop: int, room_bytes: float | Array) -> PipelineLoads:
        """The pipeline of the groups [first, stop). `room_bytes`: of a rank, or of each."""
        counts = self.counts[first:stop]
        start = sum(self.counts[:first])
        chunks = slice(start, start + sum(counts))
        loads = []
        for stage, room in enumerate(np.broadcast_to(room_bytes, (len(self.heights),))):
            moments = _Moments(counts, len(self.heights), stage)
            own = self.own_bytes[moments.is_backward.astype(int), stage, start + moments.acting]
            again = self.again_bytes[stage, chunks][moments.acting] * moments.is_backward
            plain = moments.kept_bytes(self.kept_bytes[:, stage, chunks]) + own
            saved = self.saved_bytes[stage, chunks]
            alive = moments.alive[0]
            loads.append(StageLoad(alive, plain, moments.acting, again, saved, float(room)))
        return PipelineLoads(counts, self.heights, tuple(loads))


class _Moments:
    """The cells of one stage of a pipeline in the order in which they run (W of them)."""

    def __init__(self, counts: Sequence[int], num_stages: int, stage: int) -> None:
        number = sum(counts)
        ahead = count_ahead(counts, num_stages, stage)
        chunks = np.arange(number)
        starts = np.where(chunks < ahead, chunks, 2 * chunks - ahead)
        places = np.array(backward_places(counts))
        stops = np.where(places + ahead < number, ahead + 2 * places + 1, number + places)
        self.acting: NDArray[np.int64] = np.zeros(2 * number, dtype=np.int64)
        self.acting[starts], self.acting[stops] = chunks, chunks
        self.is_backward = np.zeros(2 * number, dtype=bool)
        self.is_backward[stops] = True
        bounds = np.concatenate([[0], np.cumsum(counts)])
        # a sequence's K,V come as one with its first forward, their gradients with its first
        # backward
        kv_starts = np.repeat(starts[bounds[:-1]], counts)
        gradient_starts = np.repeat(stops[bounds[1:] - 1], counts)
        begins = np.stack([starts, kv_starts, gradient_starts])[:, None]
        moment = np.arange(2 * number)[:, None]
        self.alive: NDArray[np.bool_] = (begins <= moment) & (moment <= stops)
        """(3, W, K) Whether each kind of what is kept is there."""

    def kept_bytes(self, kept_bytes: Array) -> Array:
        """(W,) Bytes of what is kept for later at each moment, of (3, K)."""
        total: Array = sum(alive @ own for alive, own in zip(self.alive, kept_bytes, strict=True))
        return total


def _saved_per_layer(cell: StageBytes) -> float:
    """Bytes per token by which the graph shrinks with each checkpointed layer at least."""
    sizes = [cell.graph(count) for count in range(len(cell.graph_layers) + 1)]
    return min(
        ((sizes[0] - size) / count for count, size in enumerate(sizes) if count), default=0.0
    )


def _stored(
    plan: ChunkPlan, cells: Sequence[StageBytes], memory: PlanMemory
) -> tuple[Array, Array]:
    """(P, K) Bytes of the store's K,V and of their gradients on one process, by the chunk that
    holds a segment's first token; none where K,V are in another tier."""
    kv, gradients = np.zeros((2, len(cells), len(plan.chunks)))
    groups = plan.groups if plan.tiers.kv == "device" else {}
    for seq_id, group in groups.items():
        for stage, cell in enumerate(cells):
            for stored in stored_layers(
                memory.shape, plan, cell, seq_id, stage, 0, memory.device_type
            ):
                for size, pieces in zip(stored.sizes, stored.pieces, strict=True):
                    tokens = size * len(stored.layers)
                    kv[stage, group[pieces[0]]] += tokens * stored.kv_token_bytes
                    gradients[stage, group[pieces[0]]] += tokens * stored.gradient_token_bytes
    return kv, gradients
