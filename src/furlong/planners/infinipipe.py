"""InfiniPipe: elastic pipelines over chunks of equal time, with checkpointing chosen per cell.

Wang et al., arXiv 2509.21275. The longest sequence is cut into slices of equal time, the mesh, and
longer ones than its first slice by the same mesh; short ones are packed with each other or behind
tails (Algorithm 1). Chunks run in token-level 1F1B, sequences of most chunks first
(`orders.plan_seq1f1b`). Cells on one diagonal of that schedule recompute the same number of layers:
what one of them adds to the step, the others hide in the bubble that it makes. So one integer per
diagonal is asked for, n + P - 1 of them (n chunks, P stages), with the smallest sum for which no
stage ever holds more than it has room for (Eqs. 15 to 20). Slice numbers are tried from the
smallest; the plan that the event simulation finds fastest is returned.

Ours: `adaptive` finds the layers greedily; the paper's integer program is the mode `exact`. The
batch is parted among two pipelines at most, one after the other (Eqs. 12 to 14; "usually at most
two" in the paper's runs). Bytes and seconds are the cost model's; only the time by which the
mesh is cut is a fit to it, of the paper's form a1 x^2 + a2 x (Eqs. 1 and 4).

Errata: as printed the threshold of Algorithm 1 can fall, and its loop never ends: here it is only
raised over buckets that have room, and by a tenth at most, then a new bucket is opened (as printed
buckets of tails grow to half as much time again; steps that take 1 to 2.5 % less in simulation).
The last slice of a sequence counts as its tail also where the mesh fits exactly.

    P stages, W moments of a stage, K chunks of a pipeline in forward order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp, nnls

from furlong.cost.memory import PlanMemory, StageBytes
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import (
    ON_DEVICE,
    Action,
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Layout,
    Place,
    Slice,
    Tiers,
)
from furlong.planners.chunks import Groups, refuse_unusable, shard, split_equal_work
from furlong.planners.layouts import cut_layers, mean_attended_keys
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    assemble,
    backward_places,
    count_ahead,
    number_chunks,
    recompute_on_diagonals,
    seq1f1b_cells,
    with_messages,
)
from furlong.planners.question import Candidate, DoesNotFitError, Question
from furlong.simulate.clock import time_actions
from furlong.units import count_words

Mode = Literal["adaptive", "exact", "none", "full"]
"""Layers recomputed: chosen per diagonal, greedily or by integer program; none; all."""
Array = NDArray[np.float64]
Part = tuple[range, tuple[int, ...]]
"""A pipeline: its groups, and the layers that the cells of each of its diagonals recompute."""

_PATIENCE = 3
"""Slice numbers in a row that bring nothing before the search ends."""
_FEW_SLICE_NUMBERS = 4
"""Slice numbers that a search works out: a plan is made while a step runs."""
_MAX_REPAIRS = 3
_ROUNDING_BYTES = 8
"""Bytes of slack: the memory simulation rounds each part. What that hides, that of the plan itself
finds."""
MAX_GROWTH = 1.1
"""Multiple of its first value to which the threshold of time may grow; infinite in the paper."""
_MAX_NODES = 10_000
"""Nodes of the tree of each integer program: a count, so that equal questions have equal answers,
which a limit of seconds would not give."""


class NotFasterError(ConfigError):
    """Error where no plan is faster than the one that is to be beaten."""


@dataclass(frozen=True, kw_only=True)
class InfiniPipePlan:
    """A plan of InfiniPipe's."""

    plan: ChunkPlan
    pipelines: tuple[Part, ...]
    """Those that run one after the other."""
    predicted_s: float
    """Seconds of the step by the event simulation."""
    num_slices: int = 0
    """Chunks of the longest sequence."""

    @property
    def recomputed_layers(self) -> int:
        """Sum of the layers of all diagonals (Eq. 17)."""
        return sum(sum(layers) for _, layers in self.pipelines)


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """One for a pipeline: its plans search by themselves, and have to beat `question.beat_s`."""
    if layout.pp == 1:
        return
    model, stages = question.model_of(layout), question.stages_of(layout)

    def plan_of(seq_lens: Sequence[int]) -> ChunkPlan:
        return plan_infinipipe(
            seq_lens, model, num_stages=layout.pp, sp_size=layout.sp, stages=stages,
            budget_bytes=question.limits.limit_bytes, max_tried=_FEW_SLICE_NUMBERS,
            beat_s=question.beat_s,
        ).plan  # fmt: skip

    yield Candidate("infinipipe", layout, ChunkOptions(), 0.0, plan_of)


def plan_infinipipe(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    num_stages: int,
    sp_size: int = 1,
    budget_bytes: int | None = None,
    stages: Sequence[int] | None = None,
    tiers: Tiers = ON_DEVICE,
    balance: Literal["time", "tokens"] = "time",
    checkpointing: Mode = "adaptive",
    max_slices: int = 64,
    max_tried: int = 64,
    beat_s: float = inf,
) -> InfiniPipePlan:
    """A checked plan of one replica of num_stages x sp_size devices that fits `budget_bytes` each.

    `stages`: layers per stage, default those that balance the stages' work; rank s holds stage s.
    With sp_size > 1 every slice is sharded over the sp group. `balance` and `checkpointing` switch
    parts of the method off. `max_tried`: slice numbers that are worked out once one fits; `beat_s`:
    a step that the plan has to beat.

    Raises DataError for unusable lengths, NotFasterError where no plan can beat `beat_s`, and
    DoesNotFitError for the plan that lacks least if no slice number up to `max_slices` fits.
    """
    refuse_unusable(seq_lens)
    batch = _Batch(
        tuple(seq_lens), model, model.memory(budget_bytes),
        tuple(stages or cut_layers(model.shape, num_stages, mean_attended_keys(seq_lens))),
        sp_size, tiers, checkpointing,
    )  # fmt: skip
    longest, best, lacking = max(seq_lens), None, []
    least_s, num_tried, without_gain = inf, 0, 0
    for num_slices in slice_numbers(min(max_slices, longest)):
        if without_gain >= _PATIENCE or num_tried >= max_tried:
            break
        work = EQUAL_TOKENS
        if balance == "time":
            work = fit_work(model, longest, num_slices, batch.stages, sp_size, tiers)
        groups = shard(cut_and_pack(seq_lens, num_slices, work), sp_size)
        found = batch.plan_of(groups, beat_s)
        without_gain += best is not None or isinstance(found, float)
        if isinstance(found, float):
            if best is None and found < least_s:
                least_s, without_gain = found, 0
        elif isinstance(found, InfiniPipePlan):
            num_tried += 1
            if found.predicted_s < beat_s:
                best, beat_s, without_gain = found, found.predicted_s, 0
                best = replace(best, num_slices=num_slices)
            least_s = min(least_s, found.predicted_s)
        else:
            lacking.append((*found, num_slices, groups))
    if best is not None:
        check(best.plan, batch.memory)
        return best
    if least_s < inf:
        raise NotFasterError(
            given=f"a step of at least {least_s:.3g} s however it is cut",
            required=f"less than {beat_s:.3g} s",
            source="the step that InfiniPipe's plan has to beat",
            change="take the other plan",
        )
    raise batch.no_room(*min(lacking, key=lambda one: one[0]))


def slice_numbers(most: int) -> Iterator[int]:
    """Slice numbers to try: 1, 2, 3, .. and from 8 on by about a fifth more each time, up to
    `most`."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (number + 2) // 5)


@dataclass(frozen=True)
class _Batch:
    """Facts and limits that all candidate plans of one batch share."""

    seq_lens: tuple[int, ...]
    model: CostModel
    memory: PlanMemory
    stages: tuple[int, ...]
    sp_size: int
    tiers: Tiers
    mode: Mode

    def plan_of(self, groups: Groups, beat_s: float) -> InfiniPipePlan | float | tuple[float, int]:
        """The best plan of these groups, which are listed by falling numbers of chunks; the seconds
        that one takes at least, where these are not below `beat_s`; or, where none fits, the bytes
        that lack with all that the mode may recompute, and the rank that lacks them."""
        if beat_s < inf:
            plain = self._in_a_row(groups, [(range(len(groups)), ())], checked=False)
            least_s = time_actions(plain, self.model.costs(plain)).duration_s
            if least_s >= beat_s:
                return least_s
        budget = self.memory.device_budget_bytes
        room = np.full(len(self.stages), float(budget + _ROUNDING_BYTES))
        for _ in range(_MAX_REPAIRS):
            if (parts := self._parts(groups, room)) is None:
                break
            plan = self._in_a_row(groups, parts, checked=False)
            excess = np.array(self._used_bytes(plan)) - budget
            if excess.max() <= 0:
                seconds = time_actions(plan, self.model.costs(plan)).duration_s
                return InfiniPipePlan(plan=plan, pipelines=tuple(parts), predicted_s=seconds)
            room -= np.maximum(excess, 0)
        used = self._used_bytes(self._smallest(groups))
        return max((most - budget, rank) for rank, most in enumerate(used))

    def no_room(
        self, lacking_bytes: float, rank: int, num_slices: int, groups: Groups
    ) -> DoesNotFitError:
        number = "no" if self.mode == "none" else "every"
        return DoesNotFitError(
            rank,
            self.memory.curve(self._smallest(groups), rank).peak,
            self.memory.device_budget_bytes,
            self.model.training,
            num_devices=len(self.stages) * self.sp_size,
            with_what=f"the longest sequence of {count_words(max(self.seq_lens), 'token')} cut "
            f"into {count_words(num_slices, 'chunk')} and {number} layer recomputed",
        )

    def _smallest(self, groups: Groups) -> ChunkPlan:
        """All groups in one pipeline, with all recomputed that the mode may."""
        number = 0 if self.mode == "none" else max(self.stages)
        layers = (number,) * (sum(map(len, groups)) + len(self.stages) - 1)
        return self._in_a_row(groups, [(range(len(groups)), layers)])

    def _in_a_row(
        self, groups: Groups, parts: Sequence[Part], *, checked: bool = True
    ) -> ChunkPlan:
        return in_a_row(
            self.seq_lens, groups, parts, self.stages, sp_size=self.sp_size, tiers=self.tiers,
            checked=checked,
        )  # fmt: skip

    def _used_bytes(self, plan: ChunkPlan) -> list[int]:
        return [max(self.memory.peak_bytes_of_actions(plan, s)) for s in range(len(self.stages))]

    def _parts(self, groups: Groups, room: Array) -> list[Part] | None:
        """All groups in one pipeline, or parted in two, sequences of equally many chunks together,
        whichever has less overhead; None where they do not fit. A pipeline costs a warm-up and a
        cool-down, and each of its layers a forward (Eq. 13)."""
        counts = [len(group) for group in groups]
        cells_s = self.model.cell_seconds(
            [chunk for group in groups for chunk in group], self.stages, sp_size=self.sp_size,
            kv=self.tiers.kv,
        )  # fmt: skip
        ends_s = (len(self.stages) - 1) * float(cells_s.sum(axis=2).mean())
        layer_s = float(cells_s[..., 0].mean()) * len(self.stages) / sum(self.stages)
        least_s, best = inf, None
        cuts = [i for i in range(1, len(counts)) if counts[i] != counts[i - 1]]
        for edges in ([0, len(counts)], *([0, cut, len(counts)] for cut in cuts)):
            overhead_s, parts = (len(edges) - 1) * ends_s, list[Part]()
            if overhead_s >= least_s:
                break
            ranges = [range(a, b) for a, b in pairwise(edges)]
            for own, pipeline in zip(ranges, self._loads(groups, ranges, room), strict=True):
                if (layers := choose_layers(pipeline, self.mode)) is None:
                    break
                overhead_s += layer_s * sum(layers)
                parts.append((own, layers))
            if len(parts) == len(ranges) and overhead_s < least_s:
                least_s, best = overhead_s, parts
        return best

    def _loads(
        self, groups: Groups, ranges: Sequence[range], room: Array
    ) -> Iterator[PipelineLoads]:
        """The stages' loads in pipelines of these groups, one after the other, by the memory
        simulation with nothing recomputed."""
        plain = self._in_a_row(groups, [(own, ()) for own in ranges], checked=False)
        tokens = np.array([c.num_tokens for c in plain.chunks]) / self.sp_size
        cells = [self.memory.cell(self.stages, stage) for stage in range(len(self.stages))]
        used = []  # (2 K) of each stage: at each forward and each backward
        for stage, actions in enumerate(plain.actions):
            walked = self.memory.peak_bytes_of_actions(plain, stage)
            pairs = zip(walked, actions, strict=True)
            used.append(np.array([n for n, a in pairs if isinstance(a, Forward | Backward)], float))
        start = 0
        for own in ranges:
            counts = [len(groups[i]) for i in own]
            stop = start + sum(counts)
            loads = []
            for stage, cell in enumerate(cells):
                acting, is_backward, alive = moments_of(counts, len(cells), stage)
                plain_bytes = used[stage][2 * start : 2 * stop]
                again = (max(cell.graph_layers) * tokens[start:stop])[acting] * is_backward
                full = plain_bytes + again > room[stage]  # at other moments all fits in any case
                loads.append(
                    StageLoad(
                        alive[full].astype(float), plain_bytes[full], acting[full], again[full],
                        _saved_per_layer(cell) * tokens[start:stop], float(room[stage]),
                    )
                )  # fmt: skip
            yield PipelineLoads(tuple(counts), self.stages, tuple(loads))
            start = stop


def in_a_row(
    seq_lens: Sequence[int],
    groups: Groups,
    parts: Sequence[Part],
    stages: tuple[int, ...],
    *,
    sp_size: int = 1,
    tiers: Tiers = ON_DEVICE,
    checked: bool = True,
) -> ChunkPlan:
    """Token-level 1F1B of each part of the groups, one part after the other; no layers: none."""
    numbered, num_stages = number_chunks(groups), len(stages)
    cells: list[list[Action]] = [[] for _ in stages]
    for own, layers in parts:
        part = numbered[own.start : own.stop]
        counts = [len(chunks) for chunks in part]
        spread = recompute_on_diagonals(layers, counts, stages) if layers else [[]] * num_stages
        for stage in range(num_stages):
            cells[stage] += seq1f1b_cells(part, num_stages, stage, spread[stage])
    lists = [with_messages(own, stage, num_stages) for stage, own in enumerate(cells)]
    return assemble(seq_lens, groups, stages, lists, sp_size=sp_size, tiers=tiers, checked=checked)


def moments_of(
    counts: Sequence[int], num_stages: int, stage: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The cells of one stage of a pipeline in the order in which they run: (W,) the chunk, (W,)
    whether it is a backward, (W, K) whether a chunk's graph is there."""
    number, ahead = sum(counts), count_ahead(counts, num_stages, stage)
    chunks, places = np.arange(number), np.array(backward_places(counts))
    starts = np.where(chunks < ahead, chunks, 2 * chunks - ahead)
    stops = np.where(places + ahead < number, ahead + 2 * places + 1, number + places)
    acting = np.zeros(2 * number, dtype=np.int64)
    acting[starts], acting[stops] = chunks, chunks
    is_backward = np.isin(np.arange(2 * number), stops)
    moment = np.arange(2 * number)[:, None]
    return acting, is_backward, (starts <= moment) & (moment <= stops)


def _saved_per_layer(cell: StageBytes) -> float:
    """Bytes per token by which the graph shrinks with each checkpointed layer at least."""
    sizes = [cell.graph(count) for count in range(len(cell.graph_layers) + 1)]
    return min(
        ((sizes[0] - size) / count for count, size in enumerate(sizes) if count), default=0.0
    )


@dataclass(frozen=True)
class StageLoad:
    """Bytes that one stage of one pipeline holds, at each moment when it may hold too many."""

    alive: Array
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

    def excess_bytes(self, layers: NDArray[np.int64]) -> Array:
        """(W,) Bytes above the room with those layers of each chunk recomputed."""
        used = self.plain_bytes - self.alive @ (self.saved_bytes * layers)
        excess: Array = used + self.again_bytes * (layers[self.acting] > 0) - self.room_bytes
        return excess


@dataclass(frozen=True)
class PipelineLoads:
    """One pipeline: its groups' numbers of chunks, its stages' layers, what each stage holds."""

    counts: tuple[int, ...]
    heights: tuple[int, ...]
    loads: tuple[StageLoad, ...]

    @property
    def num_diagonals(self) -> int:
        return sum(self.counts) + len(self.heights) - 1

    def lacking_bytes(self, layers: Sequence[int]) -> float:
        """Bytes by which the fullest stage exceeds its room; at most 0 where all fit."""
        spread = np.array(recompute_on_diagonals(layers, self.counts, self.heights))
        pairs = zip(self.loads, spread, strict=True)
        return max(float(load.excess_bytes(own).max(initial=-inf)) for load, own in pairs)


def choose_layers(pipeline: PipelineLoads, mode: Mode) -> tuple[int, ...] | None:
    """The layers that each diagonal recomputes so that every stage has room; None: there are
    none. With `exact` their sum is the least."""
    none, full = ((n,) * pipeline.num_diagonals for n in (0, max(pipeline.heights)))
    if mode != "full" and pipeline.lacking_bytes(none) <= 0:
        return none
    found = _least_layers(pipeline) if mode == "exact" else None
    if mode == "adaptive" or (mode == "exact" and found is None):
        found = _greedy_layers(pipeline)
    if found is None and mode != "none" and pipeline.lacking_bytes(full) <= 0:
        return full
    return found


def _greedy_layers(pipeline: PipelineLoads) -> tuple[int, ...] | None:
    """A layer more on the diagonal that relieves most, until no stage lacks room; then fewer where
    later ones have made them needless. The better of two ways to weigh relief: bytes, and shares of
    what a moment lacks."""
    found = [_relieved(pipeline, shares) for shares in (False, True)]
    return min((layers for layers in found if layers is not None), key=sum, default=None)


def _relieved(pipeline: PipelineLoads, shares: bool) -> tuple[int, ...] | None:
    last = len(pipeline.heights) - 1
    layers = np.zeros(pipeline.num_diagonals, dtype=np.int64)
    places = np.array(backward_places(pipeline.counts))
    while True:
        gain, fits = np.zeros(len(layers)), True
        for stage, (load, height) in enumerate(zip(pipeline.loads, pipeline.heights, strict=True)):
            diagonals = places + last - stage  # (K,)
            own = np.minimum(layers[diagonals], height)
            excess = load.excess_bytes(own)
            rows = np.flatnonzero(excess > 0)
            if len(rows):
                fits, lacks = False, excess[rows, None]
                relief = saved = load.alive[rows] * load.saved_bytes
                acting = load.acting[rows]  # who recomputes for the first time needs bytes for it
                costs = np.where(own[acting] > 0, 0.0, load.again_bytes[rows])
                relief = relief - costs[:, None] * (acting[:, None] == np.arange(len(own)))
                relief = np.clip(relief, 1e-3 * saved, lacks) / (lacks if shares else 1.0)
                gain[diagonals] += relief.sum(axis=0) * (own < height)
        if fits:
            break
        if gain.max() <= 0:
            return None
        layers[int(gain.argmax())] += 1
    for diagonal in np.argsort(layers, kind="stable"):
        while layers[diagonal]:
            layers[diagonal] -= 1
            if pipeline.lacking_bytes(layers.tolist()) > 0:
                layers[diagonal] += 1
                break
    return tuple(layers.tolist())


def _least_layers(pipeline: PipelineLoads) -> tuple[int, ...] | None:
    """The layers of least sum (Eq. 20) by one integer program; None where the solver has none.

    Variables: the layers of each diagonal, as a sum of one integer per level of the stages'
    heights, of which a stage feels those up to its own; and whether the diagonal has any.
    """
    num_diagonals, num_stages = pipeline.num_diagonals, len(pipeline.heights)
    places = np.array(backward_places(pipeline.counts))
    tops = sorted(set(pipeline.heights))
    most = np.diff([0, *tops]).astype(float)
    coefficients, needed = [], []
    for stage, (load, height) in enumerate(zip(pipeline.loads, pipeline.heights, strict=True)):
        rows = np.flatnonzero(load.plain_bytes + load.again_bytes > load.room_bytes)
        saved, again = np.zeros((2, len(rows), num_diagonals))
        diagonals = places + num_stages - 1 - stage
        saved[:, diagonals] = load.alive[rows] * load.saved_bytes
        again[np.arange(len(rows)), diagonals[load.acting[rows]]] = load.again_bytes[rows]
        scale = np.maximum(saved.max(axis=1, initial=0.0), 1.0)[:, None]
        felt = [saved * (top <= height) for top in tops]
        coefficients.append(np.concatenate([*felt, -again], axis=1) / scale)
        needed.append((load.plain_bytes - load.room_bytes)[rows] / scale[:, 0])
    # a level of a diagonal is used only if the diagonal is
    eye = np.eye(num_diagonals)
    linked = np.concatenate([np.kron(-np.eye(len(tops)), eye), np.kron(most, eye).T], axis=1)
    found = milp(
        np.repeat([1.0] * len(tops) + [0.0], num_diagonals),
        constraints=[
            LinearConstraint(np.concatenate(coefficients), lb=np.concatenate(needed)),
            LinearConstraint(linked, lb=0),
        ],
        bounds=Bounds(0, np.repeat([*most, 1.0], num_diagonals)),
        integrality=np.ones((len(tops) + 1) * num_diagonals),
        options={"node_limit": _MAX_NODES, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    levels = np.rint(found.x).astype(int).reshape(-1, num_diagonals)[:-1]
    layers = tuple(levels.sum(axis=0).tolist())
    return layers if pipeline.lacking_bytes(layers) <= 0 else None


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Coefficients of work: tokens up to x of a sequence take quadratic * x^2 + linear * x (Eq. 1,
    one stage)."""

    quadratic: float
    linear: float

    def of(self, start: int, stop: int) -> float:
        """Work of the tokens [start, stop) of a sequence."""
        return self.quadratic * (stop**2 - start**2) + self.linear * (stop - start)


EQUAL_TOKENS = SliceWork(0.0, 1.0)
"""Work that balances tokens alone: the ablation without workload-balanced chunking."""


def cut_and_pack(
    seq_lens: Sequence[int],
    num_slices: int,
    work: SliceWork,
) -> list[list[Chunk]]:
    """Groups of chunks, those of most chunks first, then those of most tokens.

    A group is the pieces of one sequence longer than the mesh's first slice, the last of them with
    short sequences behind it where they fit, or one chunk of short sequences. The longest sequence
    becomes `num_slices` chunks (fewer if it has fewer tokens).
    """
    refuse_unusable(seq_lens)
    longest = max(seq_lens)
    mesh = [
        s.num_tokens
        for s in split_equal_work(
            0, longest, num_slices, quadratic=work.quadratic, linear=work.linear
        )
    ]
    most_tokens = max(mesh)
    pieces = {
        seq_id: cut(seq_id, seq_len, mesh)
        for seq_id, seq_len in enumerate(seq_lens)
        if seq_len > most_tokens
    }
    tails = [own[-1] for own in pieces.values()]
    buckets = pack_balanced(
        {seq_id: seq_len for seq_id, seq_len in enumerate(seq_lens) if seq_id not in pieces},
        [(tail.num_tokens, work.of(tail.start, tail.stop)) for tail in tails],
        work,
        most_tokens=most_tokens,
        most_work=max(work.of(0, longest) / len(mesh), work.of(0, most_tokens)),
    )
    packed = [
        tuple(Slice(seq_id, 0, seq_lens[seq_id]) for seq_id in seq_ids) for seq_ids in buckets
    ]
    groups = [
        [*(Chunk((piece,)) for piece in own[:-1]), Chunk((own[-1], *behind))]
        for own, behind in zip(pieces.values(), packed, strict=False)
    ]
    groups += [[Chunk(slices)] for slices in packed[len(tails) :]]
    return sorted(groups, key=lambda own: (-len(own), -sum(chunk.num_tokens for chunk in own)))


def cut(seq_id: int, seq_len: int, mesh: Sequence[int]) -> list[Slice]:
    """Slices of the mesh's sizes while tokens remain behind them, and the tail."""
    pieces: list[Slice] = []
    start = 0
    for size in mesh:
        if start + size >= seq_len:
            break
        pieces.append(Slice(seq_id, start, start + size))
        start += size
    return [*pieces, Slice(seq_id, start, seq_len)]


def pack_balanced(
    short: dict[int, int],
    tails: Sequence[tuple[int, float]],
    work: SliceWork,
    *,
    most_tokens: int,
    most_work: float,
    max_growth: float = MAX_GROWTH,
) -> list[list[int]]:
    """The seq_ids of the short sequences behind each tail, then of those in each new bucket.

    `short`: tokens by seq_id, none above `most_tokens`; `tails`: (tokens, work) of buckets that are
    begun. Longest first, each goes to the bucket of least work per token that has room for its
    tokens and for its work; where none has, `most_work` grows by as little as one needs, up to
    `max_growth` times its first value, beyond which a bucket is opened.
    """
    limit = max_growth * most_work
    tokens, loads = [n for n, _ in tails], [own for _, own in tails]
    found: list[list[int]] = [[] for _ in tails]
    for seq_id in sorted(short, key=lambda seq_id: (-short[seq_id], seq_id)):
        own = work.of(0, short[seq_id])
        roomy = [i for i, n in enumerate(tokens) if n + short[seq_id] <= most_tokens]
        least_work = min((loads[i] for i in roomy), default=0.0) + own
        if not roomy or least_work > limit:
            chosen = len(found)
            found.append([])
            tokens.append(0)
            loads.append(0.0)
        else:
            most_work = max(most_work, least_work)
            open_ones = [i for i in roomy if loads[i] + own <= most_work]
            chosen = min(open_ones, key=lambda i: (loads[i] / tokens[i], i))
        found[chosen].append(seq_id)
        tokens[chosen] += short[seq_id]
        loads[chosen] += own
    return found


def fit_work(
    model: CostModel,
    longest: int,
    num_slices: int,
    stages: tuple[int, ...],
    sp_size: int = 1,
    tiers: Tiers = ON_DEVICE,
) -> SliceWork:
    """The paper's a1 and a2 for the slowest stage, forward and backward together, from equal pieces
    of a sequence of `longest` tokens, about `num_slices` of them: efficiencies depend on their
    size. What a chunk costs however few its tokens is fitted too and left out."""
    place = Place(0, sp_size)
    slices = []
    cuts = (max(1, num_slices // 2), num_slices, 2 * num_slices)
    for seq_id, count in enumerate(cuts):
        bounds = np.unique(np.linspace(0, longest, count + 1).astype(int)).tolist()
        slices += [Slice(seq_id, start, stop, place) for start, stop in pairwise(bounds)]
    chunks = [Chunk((piece,)) for piece in slices]
    cells = model.cell_seconds(chunks, stages, sp_size=sp_size, kv=tiers.kv)
    seconds = cells.sum(axis=2)
    seconds = seconds[seconds.sum(axis=1).argmax()]
    start = np.array([piece.start for piece in slices], dtype=float)
    stop = np.array([piece.stop for piece in slices], dtype=float)
    terms = np.stack([stop**2 - start**2, stop - start, np.ones_like(start)], axis=1)
    scale = terms.max(axis=0)
    # errors count relative to the piece's own time
    (quadratic, linear, _), _ = nnls(terms / scale / seconds[:, None], np.ones_like(seconds))
    fitted = SliceWork(float(quadratic / scale[0]), float(linear / scale[1]))
    return fitted if fitted.quadratic or fitted.linear else EQUAL_TOKENS
