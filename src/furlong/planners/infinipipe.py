"""InfiniPipe: elastic pipelines over chunks of equal time, with checkpointing chosen per cell.

Wang et al., arXiv 2509.21275. The longest sequence is cut into `num_slices` slices of equal time
and the batch with it (`mesh`); chunks run in token-level 1F1B (`orders.seq1f1b`), those of the
longest sequences first; how many layers each cell recomputes is the least that fits
(`checkpointing`), and where two pipelines in a row are cheaper than one, sequences are parted
(`grouping`). Slice numbers are tried from the smallest that fits with everything recomputed; the
plan that the simulator finds fastest is returned.

Bytes and seconds are the cost model's own. The times that balance chunks are a fit to them of the
paper's form, a1 x^2 + a2 x.

InfiniPipe's sequence processor: chunks that take equal time and hold about equal tokens.

Wang et al. (arXiv 2509.21275), Algorithm 1. The longest sequence is cut into slices of equal time,
the mesh; longer ones than its first slice are cut by the same mesh, and what is left of each is its
tail. Short sequences are packed with each other or behind a tail. Three rules are not the paper's:
the threshold of time is only raised over buckets that have room (as printed it can fall, and the
loop never ends); it is raised by a tenth at most, then a new bucket is opened (as printed buckets
of tails grow until their tokens are full, to half as much time again; steps that take 1 to 2.5 %
less in simulation); and the last slice of a sequence counts as its tail also where the mesh fits
exactly.

The paper's form of a chunk's time, fitted to the cost model (InfiniPipe, Eqs. 1 and 4).

Elastic pipelines: the best plan that InfiniPipe knows of given chunks.

Wang et al. (arXiv 2509.21275), 3.3: chunks run in token-level 1F1B, sequences of most chunks first,
in one pipeline or in several, one after the other; each cell recomputes as few layers as fit.

Bytes that the stages of any pipeline hold, from one walk of the cost model over a batch.

InfiniPipe's Eqs. 5 to 10 with the bytes of `cost.memory` in the place of fitted constants. The
exact walk of one plan without checkpointing gives what every forward and every backward needs for
itself; the graphs, inputs, K,V and dK,dV that lie there beside it are added for each grouping into
pipelines. The sums are those of the walk (the tests compare), for a matrix product.

    P stages, K chunks

InfiniPipe's adaptive checkpointing: how many layers each cell of a pipeline recomputes.

Wang et al. (arXiv 2509.21275), Eqs. 15 to 20. Cells on one diagonal of the schedule recompute the
same number of layers: what one of them adds to the step, the others hide in the bubble that it
makes. So one integer per diagonal is asked for, n + P - 1 of them (n chunks, P stages), with the
smallest sum for which no stage ever holds more than it has room for.

Stages may differ in height: a diagonal has at most as many layers as the tallest stage, and a lower
stage on it recomputes all that it has. For the solver a diagonal's number is a sum of one integer
per level of height, and a stage feels the levels up to its own.

    W moments, K chunks of the pipeline in forward order

Divides the sequences of a batch among pipelines (InfiniPipe, Eqs. 12 to 14).

Pipelines run one after the other. Each costs a warm-up and a cool-down, and sequences of few chunks
beside one of many inherit its wider window, so that more must be recomputed. Sequences of equally
many chunks stay together; the classes are in a row by their number of chunks, a pipeline is a
stretch of that row, and the best cut is a shortest path. An integer program is solved only for
stretches that can still be on it: all others are left at what is already proven of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp, nnls

from furlong.cost.memory import PlanMemory, StageBytes, stored_layers
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
    Place,
    Slice,
    Tiers,
)
from furlong.planners.budget import DoesNotFitError
from furlong.planners.chunks import Groups, refuse_unusable, shard, split_equal_work
from furlong.planners.layouts import cut_layers, mean_attended_keys
from furlong.planners.orders import (
    assemble,
    backward_places,
    count_ahead,
    number_chunks,
    plan_seq1f1b,
    recompute_on_diagonals,
    seq1f1b_cells,
    with_messages,
)
from furlong.simulate.clock import time_actions
from furlong.units import count_words

EqualBy = Literal["time", "tokens"]

_PATIENCE = 3
"""Slice numbers in a row that bring nothing before the search ends."""


class NotFasterError(ConfigError):
    """Error where no plan is faster than the one that is to be beaten."""


def plan_infinipipe(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    num_stages: int,
    sp_size: int = 1,
    budget_bytes: int | None = None,
    stages: Sequence[int] | None = None,
    tiers: Tiers = ON_DEVICE,
    balance: EqualBy = "time",
    checkpointing: Mode = "adaptive",
    max_slices: int = 64,
    mip_gap: float = 0.02,
    max_nodes: int = 10_000,
    max_tried: int = 64,
    beat_s: float = inf,
    enough_s: float = 0.0,
    first_slices: int | None = None,
) -> InfiniPipePlan:
    """A checked plan of one replica of num_stages x sp_size devices that fits `budget_bytes` each.

    `stages`: layers per stage, default those that balance the stages' work; rank s holds stage s.
    With sp_size > 1 every slice is sharded over the sp group. `balance` and `checkpointing` switch
    parts of the method off. `mip_gap`: how much of the overhead may be too much (0: proven least);
    `max_nodes`: nodes of the tree of each integer program; `max_tried`: slice numbers that are
    worked out once one fits. Work is bounded by counts, never by a clock: equal questions have
    equal answers. `beat_s`: a step that it has to beat; `enough_s`: one that ends the search;
    `first_slices`: a slice number to try before all others.

    Raises DataError for unusable lengths, NotFasterError where no plan can beat `beat_s`, and
    DoesNotFitError for the plan that lacks least if no slice number up to `max_slices` fits.
    """
    refuse_unusable(seq_lens)
    setting = PipelineSetting(
        seq_lens=tuple(seq_lens), model=model, memory=model.memory(budget_bytes),
        stages=tuple(stages or cut_layers(model.shape, num_stages, mean_attended_keys(seq_lens))),
        sp_size=sp_size, tiers=tiers, mode=checkpointing, mip_gap=mip_gap, max_nodes=max_nodes,
    )  # fmt: skip
    most = min(max_slices, max(seq_lens))
    numbers = [*([] if first_slices is None else [min(first_slices, most)]), *slice_numbers(most)]
    return _search(setting, balance, numbers, max_tried, beat_s, enough_s)


def _search(
    setting: PipelineSetting,
    balance: EqualBy,
    numbers: Sequence[int],
    max_tried: int,
    beat_s: float,
    enough_s: float,
) -> InfiniPipePlan:
    """Tries slice numbers until some in a row bring nothing, or one is good enough."""
    best: InfiniPipePlan | None = None
    nearest: tuple[NoRoom, int] | None = None
    tried: list[tuple[int, float]] = []
    least_s, without_gain = inf, 0
    for num_slices in numbers:
        if without_gain >= _PATIENCE or len(tried) >= max_tried or beat_s <= enough_s:
            break
        found = plan_elastic(setting, _chunks(setting, balance, num_slices), beat_s=beat_s)
        without_gain += best is not None or isinstance(found, float)
        if isinstance(found, float):
            if best is None and found < least_s:
                least_s, without_gain = found, 0
        elif isinstance(found, InfiniPipePlan):
            tried.append((num_slices, found.predicted_s))
            if found.predicted_s < beat_s:
                best, beat_s, without_gain = found, found.predicted_s, 0
                best = replace(best, num_slices=num_slices)
        elif nearest is None or found.lacking_bytes < nearest[0].lacking_bytes:
            nearest = found, num_slices
    if best is not None:
        check(best.plan, setting.memory)
        return replace(best, tried=tuple(tried))
    if least_s < inf:
        raise NotFasterError(
            given=f"a step of at least {least_s:.3g} s however it is cut",
            required=f"less than {beat_s:.3g} s",
            source="the step that InfiniPipe's plan has to beat",
            change="take the other plan",
        )
    assert nearest is not None
    raise _no_room(setting, *nearest)


def _chunks(setting: PipelineSetting, balance: EqualBy, num_slices: int) -> Groups:
    work = EQUAL_TOKENS
    if balance == "time":
        work = fit_work(setting.model, max(setting.seq_lens), num_slices, **setting.layout)
    return shard(cut_and_pack(setting.seq_lens, num_slices, work), setting.sp_size)


def slice_numbers(most: int) -> Iterator[int]:
    """Slice numbers to try: 1, 2, 3, .. and from 8 on by about a fifth more each time, up to
    `most`."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (number + 2) // 5)


def _no_room(setting: PipelineSetting, nearest: NoRoom, num_slices: int) -> DoesNotFitError:
    number = "no" if setting.mode == "none" else "every"
    return DoesNotFitError(
        nearest.rank,
        setting.memory.curve(nearest.plan, nearest.rank).peak,
        setting.memory.device_budget_bytes,
        setting.model.training,
        num_devices=len(setting.stages) * setting.sp_size,
        with_what=f"the longest sequence of {count_words(max(setting.seq_lens), 'token')} cut into "
        f"{count_words(num_slices, 'chunk')} and {number} layer recomputed",
    )


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


MAX_GROWTH = 1.1
"""Multiple of its first value to which the threshold of time may grow; infinite in the paper."""


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
    *,
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


_ROUNDING_BYTES = 8
"""Bytes of slack: the walk rounds each part; what that hides, the walk of the plan itself finds."""
_MAX_REPAIRS = 3


@dataclass(frozen=True, kw_only=True)
class InfiniPipePlan:
    """A plan of InfiniPipe's, with what is proven of it."""

    plan: ChunkPlan
    pipelines: tuple[Checkpointing, ...]
    """Checkpointed layers of each of the pipelines that run one after the other."""
    predicted_s: float
    """Simulated seconds of the step."""
    overhead_s: float
    """The paper's objective (Eq. 13) for these chunks: warm-ups, cool-downs and recomputation."""
    overhead_bound_s: float
    """Seconds that no grouping and no checkpointing of these chunks undercuts."""
    num_slices: int = 0
    """Chunks of the longest sequence."""
    tried: tuple[tuple[int, float], ...] = ()
    """(num_slices, predicted_s) of every candidate that was worked out."""

    @property
    def recomputed_layers(self) -> int:
        """Sum of the layers of all diagonals (Eq. 17)."""
        return sum(pipeline.total for pipeline in self.pipelines)

    @property
    def recomputed_layers_bound(self) -> float:
        """Sum of layers that is proven to be the least for this grouping."""
        return sum(pipeline.bound for pipeline in self.pipelines)

    @property
    def gap(self) -> float:
        """Share of the overhead that may be too much, for these chunks, 0..1."""
        excess_s = max(0.0, self.overhead_s - self.overhead_bound_s)
        return excess_s / self.overhead_s if self.overhead_s else 0.0


@dataclass(frozen=True)
class NoRoom:
    """Chunks that fit in no way."""

    plan: ChunkPlan
    """The closest attempt: each class in a pipeline of its own, as checkpointed as may be."""
    lacking_bytes: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class PipelineSetting:
    """Facts and limits that all candidate plans of one batch share."""

    seq_lens: tuple[int, ...]
    model: CostModel
    memory: PlanMemory
    stages: tuple[int, ...]
    sp_size: int = 1
    tiers: Tiers = ON_DEVICE
    mode: Mode = "adaptive"
    mip_gap: float = 0.02
    max_nodes: int = 10_000
    """Nodes of the tree of each integer program."""

    @property
    def layout(self) -> dict[str, Any]:
        """Keywords of those who make plans of groups."""
        return {"stages": self.stages, "sp_size": self.sp_size, "tiers": self.tiers}


def plan_elastic(
    setting: PipelineSetting, groups: Groups, *, beat_s: float = inf
) -> InfiniPipePlan | NoRoom | float:
    """The best plan of these groups, which are listed by falling numbers of chunks; instead of one
    that cannot take less than `beat_s`, the seconds that it takes at least."""
    memory, num_stages = setting.memory, len(setting.stages)
    counts = [len(group) for group in groups]
    plain = plan_seq1f1b(setting.seq_lens, groups, **setting.layout)
    if beat_s < inf:
        least_s = time_actions(plain, setting.model.costs(plain)).duration_s
        if least_s >= beat_s:
            return least_s
    cells_s = setting.model.cell_seconds(
        plain.chunks, setting.stages, sp_size=setting.sp_size, kv=setting.tiers.kv
    )
    loads = BatchLoads.of(plain, counts, memory)
    room = np.full(num_stages, float(memory.device_budget_bytes + _ROUNDING_BYTES))
    times_s = {
        "ends_s": (num_stages - 1) * float(cells_s.sum(axis=2).mean()),
        "layer_s": float(cells_s[..., 0].mean()) * num_stages / sum(setting.stages),
    }
    starts = [i for i, n in enumerate(counts) if not i or n != counts[i - 1]] + [len(counts)]
    for _ in range(_MAX_REPAIRS):
        grouping = _group(setting, loads, starts, room, times_s)
        if grouping is None:
            break
        ranges = [(starts[first], starts[stop]) for first, stop in grouping.stretches]
        plan = in_a_row(setting, groups, ranges, grouping.chosen)
        used = [max(memory.peak_bytes_of_actions(plan, rank)) for rank in range(num_stages)]
        excess = np.array(used) - memory.device_budget_bytes
        if excess.max() <= 0:
            return InfiniPipePlan(
                plan=plan, pipelines=grouping.chosen,
                predicted_s=time_actions(plan, setting.model.costs(plan)).duration_s,
                overhead_s=grouping.overhead_s, overhead_bound_s=grouping.bound_s,
            )  # fmt: skip
        room -= np.maximum(excess, 0)
    return _least_lacking(setting, groups, loads, starts)


def _group(
    setting: PipelineSetting,
    loads: BatchLoads,
    starts: Sequence[int],
    room: Array,
    times_s: dict[str, float],
) -> Grouping | None:
    @cache
    def pipeline(stretch: Stretch) -> PipelineLoads:
        return loads.pipeline(starts[stretch[0]], starts[stretch[1]], room)

    def least(stretch: Stretch) -> float:
        return least_layers(pipeline(stretch), mode=setting.mode)

    def solve(stretch: Stretch) -> Checkpointing | None:
        return choose_layers(
            pipeline(stretch), setting.mode, mip_gap=setting.mip_gap, max_nodes=setting.max_nodes
        )

    return group_classes(len(starts) - 1, least=least, solve=solve, gap=setting.mip_gap, **times_s)


def in_a_row(
    setting: PipelineSetting,
    groups: Groups,
    ranges: Sequence[tuple[int, int]],
    chosen: Sequence[Checkpointing],
) -> ChunkPlan:
    """Token-level 1F1B of each range of groups, one after the other."""
    numbered = number_chunks(groups)
    num_stages = len(setting.stages)
    parts = [numbered[first:stop] for first, stop in ranges]
    spread = [
        found.on_stages([len(chunks) for chunks in part], setting.stages)
        for part, found in zip(parts, chosen, strict=True)
    ]
    lists = []
    for stage in range(num_stages):
        cells: list[Action] = []
        for part, layers in zip(parts, spread, strict=True):
            cells += seq1f1b_cells(part, num_stages, stage, layers[stage])
        lists.append(with_messages(cells, stage, num_stages))
    return assemble(setting.seq_lens, groups, lists=lists, **setting.layout)


def _least_lacking(
    setting: PipelineSetting, groups: Groups, loads: BatchLoads, starts: Sequence[int]
) -> NoRoom:
    ranges = list(pairwise(starts))
    chosen, lacking = [], []
    for first, stop in ranges:
        pipeline = loads.pipeline(first, stop, setting.memory.device_budget_bytes)
        layers = pipeline.all_layers(0 if setting.mode == "none" else max(setting.stages))
        chosen.append(Checkpointing(layers, 0.0))
        lacking += [(lack, rank) for rank, lack in enumerate(lacking_bytes(pipeline, layers))]
    return NoRoom(in_a_row(setting, groups, ranges, chosen), *max(lacking))


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


Stretch = tuple[int, int]
"""A run of classes, [first, stop)."""


@dataclass(frozen=True)
class Grouping:
    stretches: tuple[Stretch, ...]
    chosen: tuple[Checkpointing, ...]
    """Checkpointed layers of each stretch."""
    overhead_s: float
    """Seconds of warm-up, cool-down and recomputation of all pipelines (Eq. 13)."""
    bound_s: float
    """Seconds of overhead that no grouping of these chunks undercuts."""


@dataclass
class _Row:
    """Knowledge of every stretch of a row of classes, and its best paths."""

    num_classes: int
    ends_s: float
    layer_s: float
    least: dict[Stretch, float] = field(default_factory=dict)
    """Lower bounds of the layers that stretches recompute."""
    solved: dict[Stretch, Checkpointing] = field(default_factory=dict)

    def lowest(self) -> tuple[float, list[Stretch]]:
        """The path that is best by lower bounds."""
        return self._path(lambda stretch: self.least.get(stretch, 0.0))

    def known(self) -> tuple[float, list[Stretch]]:
        """The best path of solved stretches."""
        totals = {stretch: found.total for stretch, found in self.solved.items()}
        return self._path(lambda stretch: totals.get(stretch, inf))

    def _path(self, layers: Callable[[Stretch], float]) -> tuple[float, list[Stretch]]:
        best = [0.0] + [inf] * self.num_classes
        starts = [0] * (self.num_classes + 1)
        for stop in range(1, self.num_classes + 1):
            for first in range(stop):
                cost_s = best[first] + self.ends_s + self.layer_s * layers((first, stop))
                if cost_s < best[stop]:
                    best[stop], starts[stop] = cost_s, first
        bounds = [self.num_classes]
        while bounds[-1]:
            bounds.append(starts[bounds[-1]])
        return best[-1], list(pairwise(reversed(bounds)))


def group_classes(
    num_classes: int,
    *,
    ends_s: float,
    layer_s: float,
    least: Callable[[Stretch], float],
    solve: Callable[[Stretch], Checkpointing | None],
    gap: float = 0.0,
) -> Grouping | None:
    """The grouping of least overhead, within `gap` of it, or None if no stretch path is feasible.

    `ends_s`: warm-up and cool-down of a pipeline (delta); `layer_s`: a layer's forward of one chunk
    (F-hat). `least` gives a lower bound of the layers that a stretch must recompute, `solve` the
    layers themselves.
    """
    row = _Row(num_classes, ends_s, layer_s)
    while True:
        bound_s, path = row.lowest()
        if bound_s == inf:
            return None
        known_s, known_path = row.known()
        is_proven = known_s < inf and known_s - bound_s <= gap * known_s
        open_ones = [stretch for stretch in path if stretch not in row.solved]
        if is_proven or not open_ones:  # the solver's own gap may be all that is missing
            chosen = tuple(row.solved[stretch] for stretch in known_path)
            return Grouping(tuple(known_path), chosen, known_s, bound_s)
        if new := [stretch for stretch in path if stretch not in row.least]:
            row.least |= {stretch: least(stretch) for stretch in new}
            continue
        for stretch in open_ones:
            if (found := solve(stretch)) is None:
                row.least[stretch] = inf
            else:
                row.solved[stretch] = found
                row.least[stretch] = max(row.least[stretch], found.bound)
