"""InfiniPipe's adaptive checkpointing: how many layers each cell of a pipeline recomputes.

Wang et al. (arXiv 2509.21275), Eqs. 15 to 20. Cells on one diagonal of the schedule recompute the
same number of layers: what one of them adds to the step, the others hide in the bubble that it
makes. So one integer per diagonal is asked for, n + P - 1 of them (n chunks, P stages), with the
smallest sum for which no stage ever holds more than it has room for.

Stages may differ in height: a diagonal has at most as many layers as the tallest stage, and a lower
stage on it recomputes all that it has. For the solver a diagonal's number is a sum of one integer
per level of height, and a stage feels the levels up to its own.

    W moments, K chunks of the pipeline in forward order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from furlong.planners.orders.seq1f1b import backward_places, recompute_on_diagonals

Array = NDArray[np.float64]
Mode = Literal["adaptive", "none", "full"]
"""Ways to checkpoint: layers chosen per diagonal; none recomputed; all recomputed."""


@dataclass(frozen=True)
class StageLoad:
    """Bytes that one stage of one pipeline holds, at each moment when it may hold most."""

    alive: NDArray[np.bool_]
    """(W, K) Whether a chunk is between the start of its forward and the end of its backward."""
    plain_bytes: Array
    """(W,) Bytes with nothing checkpointed."""
    acting: NDArray[np.int64]
    """(W,) The chunk whose forward or backward runs."""
    again_bytes: Array
    """(W,) Bytes more if the acting chunk recomputes: the layer at work in its backward."""
    saved_bytes: Array
    """(K,) Bytes less for each checkpointed layer."""
    room_bytes: float


@dataclass(frozen=True)
class PipelineLoads:
    """One pipeline: its groups' numbers of chunks, its stages' layers, what each stage holds."""

    counts: tuple[int, ...]
    heights: tuple[int, ...]
    loads: tuple[StageLoad, ...]

    @property
    def num_diagonals(self) -> int:
        return sum(self.counts) + len(self.heights) - 1

    def all_layers(self, number: int) -> tuple[int, ...]:
        """The same number of layers on every diagonal."""
        return (number,) * self.num_diagonals


@dataclass(frozen=True)
class Checkpointing:
    """Layers recomputed on each diagonal (the paper's C), and what the solver proves of their sum.

    Chunk k of the pipeline on stage p (both counted from 0) is on diagonal
    backward place of k + P - 1 - p.
    """

    layers: tuple[int, ...]
    bound: float
    """Sum of layers that no choice within the budget undercuts."""

    @property
    def total(self) -> int:
        return sum(self.layers)

    def on_stages(self, counts: Sequence[int], heights: Sequence[int]) -> list[list[int]]:
        """Values for recompute_layers[stage][chunk] of `planners.orders.seq1f1b` (Eq. 16)."""
        spread = recompute_on_diagonals(self.layers, counts, len(heights))
        return [
            [min(count, height) for count in row]
            for row, height in zip(spread, heights, strict=True)
        ]


def peak_bytes(pipeline: PipelineLoads, layers: Sequence[int]) -> list[float]:
    """The most that each stage holds with those layers recomputed, as the loads count it."""
    spread = Checkpointing(tuple(layers), 0.0).on_stages(pipeline.counts, pipeline.heights)
    peaks = []
    for load, row in zip(pipeline.loads, spread, strict=True):
        counts = np.array(row)
        used = load.plain_bytes - load.alive @ (load.saved_bytes * counts)
        peaks.append(float((used + load.again_bytes * (counts[load.acting] > 0)).max()))
    return peaks


def lacking_bytes(pipeline: PipelineLoads, layers: Sequence[int]) -> list[float]:
    """Bytes by which each stage exceeds its room; at most 0 where it fits."""
    peaks = peak_bytes(pipeline, layers)
    return [peak - load.room_bytes for peak, load in zip(peaks, pipeline.loads, strict=True)]


def choose_layers(
    pipeline: PipelineLoads,
    mode: Mode = "adaptive",
    *,
    mip_gap: float = 0.0,
    max_nodes: int = 10_000,
) -> Checkpointing | None:
    """The layers of least sum within every stage's room, or None if there are none.

    `mip_gap`: how much of the sum may be too much; 0 asks for a proof of the least. After
    `max_nodes` of the solver's tree the best that is known is returned, full checkpointing at
    worst, with what has been proven.
    """
    none = pipeline.all_layers(0)
    if mode != "full" and max(lacking_bytes(pipeline, none)) <= 0:
        return Checkpointing(none, 0.0)
    if mode == "none" or _surely_too_large(pipeline):
        return None
    full = pipeline.all_layers(max(pipeline.heights))
    full_fits = max(lacking_bytes(pipeline, full)) <= 0
    if mode == "full":
        return Checkpointing(full, float(sum(full))) if full_fits else None
    for headroom in (0.0, 1e-6, 1e-5):
        found = _solve(pipeline, mip_gap, max_nodes, headroom)
        if found is not None and max(lacking_bytes(pipeline, found.layers)) <= 0:
            return found
    return Checkpointing(full, _linear_bound(pipeline)) if full_fits else None


def least_layers(pipeline: PipelineLoads, mode: Mode = "adaptive") -> float:
    """A lower bound of the sum of layers, infinite if none fits: the linear program, rounded up."""
    if mode != "adaptive":
        found = choose_layers(pipeline, mode=mode)
        return float("inf") if found is None else float(found.total)
    if _surely_too_large(pipeline):
        return float("inf")
    if max(lacking_bytes(pipeline, pipeline.all_layers(0))) <= 0:
        return 0.0
    return _linear_bound(pipeline)


def _surely_too_large(pipeline: PipelineLoads) -> bool:
    """Whether no choice of layers fits. Where all layers of every stage save more than the layer at
    work in the backward takes, full checkpointing tells."""
    for load, height in zip(pipeline.loads, pipeline.heights, strict=True):
        if (load.again_bytes > height * load.saved_bytes[load.acting]).any():
            return False
    return max(lacking_bytes(pipeline, pipeline.all_layers(max(pipeline.heights)))) > 0


def _linear_bound(pipeline: PipelineLoads) -> float:
    found = _milp(pipeline, integers=False)
    return float("inf") if found.x is None else float(np.ceil(found.fun - 1e-6))


def _solve(
    pipeline: PipelineLoads, mip_gap: float, max_nodes: int, headroom: float
) -> Checkpointing | None:
    options = {"mip_rel_gap": mip_gap, "node_limit": max_nodes}
    found = _milp(pipeline, headroom=headroom, options=options)
    if found.x is None:
        return None
    levels = np.rint(found.x).astype(int).reshape(-1, pipeline.num_diagonals)[:-1]
    layers = tuple(levels.sum(axis=0).tolist())
    bound = 0.0 if found.mip_dual_bound is None else float(np.ceil(found.mip_dual_bound - 1e-6))
    return Checkpointing(layers, max(0.0, bound))


def _milp(
    pipeline: PipelineLoads, *, integers: bool = True, headroom: float = 0.0, options: Any = None
) -> Any:
    """Minimize the sum of layers (Eq. 20). Variables: for every level of height the layers of each
    diagonal in it, then for each diagonal whether it has any (1) or not (0)."""
    tops = sorted(set(pipeline.heights))
    most = np.diff([0, *tops]).astype(float)
    coefficients, needed = _rows(pipeline, tops)
    diagonals = np.eye(pipeline.num_diagonals)
    # a level of a diagonal is used only if the diagonal is
    linked = np.concatenate([np.kron(-np.eye(len(tops)), diagonals), np.kron(most, diagonals).T], 1)
    num_layers = len(tops) * pipeline.num_diagonals
    weights = np.concatenate([np.ones(num_layers), np.zeros(pipeline.num_diagonals)])
    return milp(
        weights,
        constraints=[
            LinearConstraint(coefficients, lb=needed + headroom), LinearConstraint(linked, lb=0)
        ],
        bounds=Bounds(0, np.repeat([*most, 1.0], pipeline.num_diagonals)),
        integrality=np.full(len(weights), int(integers)),
        options=options,
    )  # fmt: skip


def _rows(pipeline: PipelineLoads, tops: Sequence[int]) -> tuple[Array, Array]:
    """Both sides of coefficients @ variables >= needed: no stage holds more than it has room for.

    Rows are scaled to a largest coefficient of 1. Left out are rows that hold with nothing
    checkpointed, and those that another row of their stage implies.
    """
    num_diagonals, num_stages = pipeline.num_diagonals, len(pipeline.heights)
    places = np.array(backward_places(pipeline.counts))
    coefficients, needed = [], []
    for stage, (load, height) in enumerate(zip(pipeline.loads, pipeline.heights, strict=True)):
        on_diagonal = places + num_stages - 1 - stage
        lacking = load.plain_bytes + load.again_bytes - load.room_bytes
        rows = np.flatnonzero(lacking > 0)
        saved = np.zeros((len(rows), num_diagonals))
        saved[:, on_diagonal] = load.alive[rows] * load.saved_bytes
        again = np.zeros_like(saved)
        again[np.arange(len(rows)), on_diagonal[load.acting[rows]]] = load.again_bytes[rows]
        least = (load.plain_bytes - load.room_bytes)[rows]
        kept = _without_implied(saved, again, least)
        felt = [saved[kept] * (top <= height) for top in tops]
        scale = np.maximum(saved[kept].max(axis=1, initial=0.0), 1.0)
        coefficients.append(np.concatenate([*felt, -again[kept]], axis=1) / scale[:, None])
        needed.append(least[kept] / scale)
    return np.concatenate(coefficients), np.concatenate(needed)


def _without_implied(saved: Array, again: Array, least: Array) -> list[int]:
    """Rows to keep; left out is row i where a row that is kept saves nowhere more, recomputes
    nowhere less and lacks no less."""
    kept: list[int] = []
    for i in np.argsort(-least, kind="stable"):
        implied = (saved[kept] <= saved[i]).all(axis=1) & (again[kept] >= again[i]).all(axis=1)
        if not implied.any():
            kept.append(int(i))
    return kept
