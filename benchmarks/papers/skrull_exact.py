"""Skrull's joint problem (Eqs. 1 to 11) solved exactly; the yardstick of its heuristics.

A mixed-integer program for HiGHS, for a handful of sequences: every sequence gets a micro-batch of
a replica, and there a rank or all ranks. Times are those of the paper's own forms (`skrull_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from furlong.errors import DataError
from furlong.plan.plan import Place
from furlong.planners.skrull import MicroBatch
from papers.skrull_forms import TimeFit, flops, volume_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SkrullProblem:
    """One global batch on one cluster."""

    seq_lens: tuple[int, ...]
    fit: TimeFit
    dp_size: int
    sp_size: int
    bucket_tokens: int
    hidden_size: int
    kv_size: int
    num_micro_batches: int
    """Most micro-batches of a replica."""


def solve_skrull(problem: SkrullProblem, *, limit_s: float = 60.0) -> list[list[MicroBatch]]:
    """The micro-batches of each replica with the least `step_s`; a replica may be idle.

    Raises DataError where the sequences do not fit, or nothing was found within `limit_s`.
    """
    rows = _Rows(problem)
    rows.assign()
    for slot in range(rows.num_slots):
        rows.fit_memory(slot)
        rows.bound_compute(slot)
        rows.bound_communication(slot)
        rows.add_up(slot)
    rows.bound_replicas()
    objective = np.zeros(rows.num_columns)
    objective[rows.makespan] = 1.0
    binary = np.arange(rows.num_columns) < rows.num_binary
    found = milp(
        objective,
        constraints=rows.constraint(),
        integrality=binary.astype(int),
        bounds=Bounds(0.0, np.where(binary, 1.0, np.inf)),
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise DataError(
            given=f"{sum(problem.seq_lens)} tokens in {len(problem.seq_lens)} sequences",
            required=f"{rows.num_slots} micro-batches of {problem.sp_size} x "
            f"{problem.bucket_tokens} tokens that hold them",
            source=f"the integer program: {found.message}",
            change="allow more micro-batches, larger buckets or a longer limit",
        )
    return rows.schedule(found.x)


def step_s(
    schedule: Sequence[Sequence[MicroBatch]],
    seq_lens: Sequence[int],
    seconds: Callable[[Sequence[int], Sequence[int]], float],
) -> float:
    """Skrull's objective (Eqs. 8 and 11): the slowest replica's sum over its micro-batches;
    `seconds` of lengths on places."""
    return max(
        sum(seconds([seq_lens[i] for i in batch.seq_ids], batch.places) for batch in replica)
        for replica in schedule
    )


class _Rows:
    """The program row by row. A slot is a micro-batch of a replica; seconds are scaled so that all
    computation together is 100, which keeps them far from the solver's tolerances."""

    def __init__(self, problem: SkrullProblem) -> None:
        self._p = problem
        self._fit = problem.fit
        sizes = problem.hidden_size, problem.kv_size
        work = [flops(seq_len, *sizes) for seq_len in problem.seq_lens]
        self._scale = 100.0 / (self._fit.seconds_per_flop * sum(work) or 1.0)
        self._work_s = [self._scale * self._fit.seconds_per_flop * each for each in work]
        self._bytes = [volume_bytes(seq_len, problem.kv_size) for seq_len in problem.seq_lens]
        self.num_slots = problem.dp_size * problem.num_micro_batches
        self._num_places = problem.sp_size + 1
        num_placed = len(problem.seq_lens) * self.num_slots * self._num_places
        self._busy = num_placed  # (slot, rank): has a local sequence
        self._linear = self._busy + self.num_slots * problem.sp_size
        self._fixed = self._linear + self.num_slots
        self.num_binary = self._fixed + self.num_slots
        self._overlapped = self.num_binary
        self._time = self._overlapped + self.num_slots
        self.makespan = self._time + self.num_slots
        self.num_columns = self.makespan + 1
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def _placed(self, seq_id: int, slot: int, place: int) -> int:
        return (seq_id * self.num_slots + slot) * self._num_places + place

    def _sharded(self, seq_id: int, slot: int) -> int:
        return self._placed(seq_id, slot, self._p.sp_size)

    def _add(self, row: Mapping[int, float], lower: float = -np.inf, upper: float = np.inf) -> None:
        self._entries += [(len(self._lower), column, value) for column, value in row.items()]
        self._lower.append(lower)
        self._upper.append(upper)

    def constraint(self) -> LinearConstraint:
        rows, columns, values = zip(*self._entries, strict=True)
        shape = len(self._lower), self.num_columns
        return LinearConstraint(
            coo_array((values, (rows, columns)), shape=shape).tocsr(), self._lower, self._upper
        )

    def assign(self) -> None:
        """Eqs. 6 and 9."""
        for seq_id in range(len(self._p.seq_lens)):
            slots, places = range(self.num_slots), range(self._num_places)
            self._add({self._placed(seq_id, s, r): 1.0 for s in slots for r in places}, 1.0, 1.0)

    def fit_memory(self, slot: int) -> None:
        """Eq. 7 times N; its sum over the ranks is Eq. 10."""
        size = self._p.sp_size
        for rank in range(size):
            row = {}
            for seq_id, seq_len in enumerate(self._p.seq_lens):
                row[self._placed(seq_id, slot, rank)] = float(seq_len * size)
                row[self._sharded(seq_id, slot)] = float(seq_len)
            self._add(row, upper=float(self._p.bucket_tokens * size))

    def bound_compute(self, slot: int) -> None:
        """Eqs. 2, 3 and 14: the overlapped part is at least each rank's local computation."""
        constant_s = self._scale * self._fit.compute_constant_s
        for rank in range(self._p.sp_size):
            busy = self._busy + slot * self._p.sp_size + rank
            row = {self._overlapped + slot: 1.0, busy: -constant_s}
            for seq_id, work_s in enumerate(self._work_s):
                place = self._placed(seq_id, slot, rank)
                row[place] = -work_s
                self._add({busy: 1.0, place: -1.0}, lower=0.0)
            self._add(row, lower=0.0)

    def bound_communication(self, slot: int) -> None:
        """Eqs. 5 and 16: a fixed time below the threshold, a line from it on."""
        fit, fixed, linear = self._fit, self._fixed + slot, self._linear + slot
        unit = max(self._bytes)
        volume = {self._sharded(i, slot): each / unit for i, each in enumerate(self._bytes)}
        most = sum(self._bytes) / unit
        for column in volume:
            self._add({fixed: 1.0, linear: 1.0, column: -1.0}, lower=0.0)
        self._add({fixed: 1.0, linear: 1.0}, upper=1.0)
        largest_fixed = min(most, max(0, ceil(fit.threshold_bytes) - 1) / unit)
        self._add({**volume, fixed: -largest_fixed, linear: -most}, upper=0.0)
        self._add({**volume, linear: -fit.threshold_bytes / unit}, lower=0.0)
        overlapped = self._overlapped + slot
        self._add({overlapped: 1.0, fixed: -self._scale * fit.fixed_s}, lower=0.0)
        # switched off by `most` volumes where the line does not hold
        slope = self._scale * fit.seconds_per_byte * unit
        constant = self._scale * fit.transfer_constant_s + slope * most
        row = {column: -slope * share for column, share in volume.items()}
        self._add({**row, overlapped: 1.0, linear: -constant}, lower=-slope * most)

    def add_up(self, slot: int) -> None:
        """Eqs. 2 and 4: a micro-batch takes its overlapped part and that of sharded sequences."""
        row = {self._time + slot: 1.0, self._overlapped + slot: -1.0}
        for column in (self._fixed + slot, self._linear + slot):
            row[column] = -self._scale * self._fit.compute_constant_s
        for seq_id, work_s in enumerate(self._work_s):
            row[self._sharded(seq_id, slot)] = -work_s / self._p.sp_size
        self._add(row, lower=0.0)

    def bound_replicas(self) -> None:
        """Eq. 8; a replica's micro-batches come by falling time, since their order is free."""
        count = self._p.num_micro_batches
        for replica in range(self._p.dp_size):
            times = [self._time + replica * count + i for i in range(count)]
            self._add({self.makespan: 1.0, **dict.fromkeys(times, -1.0)}, lower=0.0)
            for one, other in pairwise(times):
                self._add({one: 1.0, other: -1.0}, lower=0.0)

    def schedule(self, solution: Sequence[float]) -> list[list[MicroBatch]]:
        count = self._p.num_micro_batches
        found: list[list[tuple[int, Place]]] = [[] for _ in range(self.num_slots)]
        for seq_id in range(len(self._p.seq_lens)):
            for slot in range(self.num_slots):
                for place in range(self._num_places):
                    if solution[self._placed(seq_id, slot, place)] > 0.5:
                        size = self._p.sp_size
                        own = Place(place, 1) if place < size else Place(0, size)
                        found[slot].append((seq_id, own))
        batches = [MicroBatch(tuple(i for i, _ in own), tuple(p for _, p in own)) for own in found]
        replicas = [batches[i : i + count] for i in range(0, len(batches), count)]
        return [[batch for batch in own if batch.seq_ids] for own in replicas]
