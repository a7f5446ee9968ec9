"""InfiniPipe: elastic pipelines over chunks of equal time, with checkpointing chosen per cell.

Wang et al., arXiv 2509.21275. The longest sequence is cut into slices of equal time, the mesh, and
longer ones than its first slice by the same mesh; short ones are packed with each other or behind
tails (Algorithm 1: `cut_and_pack`). Chunks run in token-level 1F1B, sequences of most chunks first
(`orders.seq1f1b_cells`). Cells on one diagonal of that schedule recompute the same number of
layers: what one of them adds to the step, the others hide in the bubble that it makes (Eqs. 15 and
16). So one integer per diagonal is asked for, K + P - 1 of them (K chunks, P stages), with the
smallest sum for which no stage ever holds more than it has room for (Eqs. 17 to 20:
`choose_layers`). Several pipelines may run one after the other: sequences of equally many chunks
stay together, and the division of least overhead is a shortest path (Eqs. 12 to 14: `_pipelines`).
Slice numbers are tried from the smallest; the plan that the event simulation finds fastest wins.

Ours: the layers are found greedily; the paper's integer program is the mode `exact`. Bytes are the
memory simulation's, in place of Eqs. 5 to 10, and seconds the cost model's; only the time by which
the mesh is cut is a fit to it, of the paper's form a1 x^2 + a2 x (Eqs. 1 and 4).

Errata: the window of Eq. 7 is one chunk more than the forwards ahead; Eq. 11 divides by the
sequence-parallel degree a time that is of one stage already. As printed the threshold of
Algorithm 1 can fall, and its loop never ends: here it is only raised over buckets that have room,
and by a tenth at most, then a new bucket is opened (as printed buckets of tails grow to half as
much time again; steps that take 1 to 2.5 % less in simulation). The last slice of a sequence counts
as its tail also where the mesh fits exactly, so that its K,V have no reader.

    P stages, K chunks, D = K + P - 1 diagonals of a pipeline, R moments of any of its stages
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.model import CostModel
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Action, Backward, Chunk, ChunkPlan, Forward, Layout, Place, Slice
from furlong.plan.segments import row_step
from furlong.planners.candidates import ByteBound
from furlong.planners.chunks import Groups, refuse_unusable, shard, split_equal_work
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    assemble,
    number_chunks,
    recompute_on_diagonals,
    seq1f1b_cells,
    with_messages,
)
from furlong.planners.question import Candidate, DoesNotFitError, Question
from furlong.simulate.clock import time_actions
from furlong.units import count_words

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Pipeline = tuple[range, Sequence[int]]
"""Its groups, and the layers that the cells of each of its diagonals recompute."""

_GRADIENTS = PARTS.index("gradients")
_MOST_SLICES = 64
"""Pieces of the longest sequence."""
_PATIENCE = 3
"""Slice numbers in a row that bring nothing before the search ends."""
_MOST_CELLS = 10_000
"""Cells of all slice numbers together after which none is tried any more; four times as many while
none of their plans fits."""
_ROUNDING_BYTES = 16
"""Room that is left: the memory simulation rounds each part."""
_MAX_REPAIRS = 3
"""Times that a plan which needs more than its loads said is made again with so much more left."""
_FEW_DIAGONALS = 8
MAX_GROWTH = 1.1
"""Multiple of its first value to which the threshold of time may grow; infinite in the paper."""
_MAX_NODES = 10_000
"""Nodes of the tree of each integer program: a count, so that equal questions have equal answers,
which a limit of seconds would not give."""


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """One for a pipeline: its plans search by themselves, and have to beat `question.beat_s`."""
    if layout.pp == 1:
        return
    model, stages = question.model_of(layout), question.stages_of(layout)
    if question.method == "auto" and not _may_fit(question, layout, model, stages):
        return

    def plan_of(seq_lens: Sequence[int]) -> ChunkPlan:
        return plan_infinipipe(
            seq_lens, model, stages=stages, sp_size=layout.sp,
            budget_bytes=question.limits.limit_bytes, beat_s=question.beat_s,
            recent=question.recent,
        )  # fmt: skip

    options = ChunkOptions(reshard=model.training.passes_gather)
    yield Candidate("infinipipe", layout, options, 0.0, plan_of)


def _may_fit(question: Question, layout: Layout, model: CostModel, stages: tuple[int, ...]) -> bool:
    """Whether the longest sequence may fit in the finest slices, with every layer recomputed."""
    # slices of equal time are longer than half of the mean
    size = max(1, question.longest // (2 * _MOST_SLICES))
    options = ChunkOptions(size=size, keep="all", recompute_layers=max(stages))
    bounds = (
        ByteBound(model, question.longest, size, layout=layout, stages=stages, stage=stage)
        for stage in (0, len(stages) - 1)
    )
    return all(question.limits.hold(bound.needs(options)) for bound in bounds)


def plan_infinipipe(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    stages: Sequence[int],
    sp_size: int = 1,
    budget_bytes: int | None = None,
    exact: bool = False,
    beat_s: float = inf,
    recent: deque[_Batch] | None = None,
) -> ChunkPlan:
    """A checked plan of one replica of len(stages) x sp_size devices that fits `budget_bytes` each.

    `stages`: layers per stage; rank s holds stage s. With sp_size > 1 every slice is sharded over
    the sp group. `beat_s`: a step that the plan has to beat. `recent`: keeps what was found of a
    batch for the next call, which may have another step to beat.

    Raises DataError for unusable lengths, ConfigError where no plan can beat `beat_s`, and
    DoesNotFitError for the plan that lacks least where no slice number fits.
    """
    refuse_unusable(seq_lens)
    memory = model.memory(budget_bytes)
    batch = _Batch(tuple(seq_lens), model, memory, tuple(stages), sp_size, exact)
    if recent is not None:
        batch = next((known for known in recent if known == batch), batch)
        recent.append(batch)
    best: ChunkPlan | None = None
    refused: list[ChunkPlan] = []
    least_s, without_gain, num_cells = inf, 0, 0
    for num_slices in slice_numbers(min(_MOST_SLICES, max(seq_lens))):
        if without_gain == _PATIENCE or num_cells > _MOST_CELLS * (1 if best else 4):
            break
        cut = batch.cut(num_slices)
        num_cells += sum(map(len, cut.groups)) * len(batch.stages)
        step_s = cut.bare_s  # with recomputed layers it takes longer
        gains = step_s < least_s
        if step_s < beat_s:
            found = None if best is None else cut.fitting_plan
            plan = found or cut.one_pipeline(layers=max(batch.stages))
            if found is None and not batch.has_room(plan):
                # whatever recomputes less does not fit either
                without_gain += best is not None
                refused.append(plan)
                continue
            if best is None:
                plan = cut.fitting_plan or plan
            step_s = batch.step_s(plan)
            gains = step_s < least_s
            if step_s < beat_s:
                best, beat_s = plan, step_s
        without_gain = 0 if gains else without_gain + 1
        least_s = min(least_s, step_s)
    if best is not None:
        check(best, memory)
        return best
    if refused and least_s == inf:
        raise batch.no_room(min(refused, key=lambda plan: max(batch.used_bytes(plan))))
    raise ConfigError(
        given=f"a step of at least {least_s:.3g} s however it is cut",
        required=f"less than {beat_s:.3g} s",
        source="the step that InfiniPipe's plan has to beat",
        change="take the other plan",
    )


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
    exact: bool
    _cuts: dict[int, _Cut] = field(init=False, repr=False, compare=False, default_factory=dict)

    def cut(self, num_slices: int) -> _Cut:
        """The batch with its longest sequence in so many slices."""
        if num_slices not in self._cuts:
            longest, step = max(self.seq_lens), row_step(self.model.device_type, self.sp_size)
            work = fit_work(self.model, longest, num_slices, self.stages, self.sp_size)
            groups = shard(cut_and_pack(self.seq_lens, num_slices, work, step), self.sp_size)
            self._cuts[num_slices] = _Cut(self, groups)
        return self._cuts[num_slices]

    def step_s(self, plan: ChunkPlan) -> float:
        return time_actions(plan, self.model.costs(plan)).duration_s

    def used_bytes(self, plan: ChunkPlan) -> list[int]:
        """(P,) the most that each rank needs."""
        return [max(self.memory.peak_bytes_of_actions(plan, s)) for s in range(len(self.stages))]

    def has_room(self, plan: ChunkPlan) -> bool:
        """Whether a plan fits; not all of the ranks are walked of one that does not."""
        walks = (self.memory.peak_bytes_of_actions(plan, s) for s in range(len(self.stages)))
        return all(max(used) <= self.memory.device_budget_bytes for used in walks)

    def no_room(self, plan: ChunkPlan) -> DoesNotFitError:
        """Return the error for a plan with every layer recomputed, of those the closest to fit."""
        used = self.used_bytes(plan)
        rank, num_slices = used.index(max(used)), max(map(len, plan.groups.values()), default=1)
        return DoesNotFitError(
            rank, self.memory.curve(plan, rank).peak, self.memory.device_budget_bytes,
            self.model.training, num_devices=len(self.stages) * self.sp_size,
            with_what=f"the longest sequence of {count_words(max(self.seq_lens), 'token')} cut "
            f"into {count_words(num_slices, 'chunk')} and every layer recomputed",
        )  # fmt: skip


@dataclass(frozen=True)
class _Cut:
    """A batch in chunks, with what no step to beat changes."""

    batch: _Batch
    groups: Groups

    @cached_property
    def bare_s(self) -> float:
        """Seconds of a step that recomputes nothing."""
        return self.batch.step_s(self.one_pipeline())

    @cached_property
    def _chunks(self) -> ChunkPlan:
        """The plan without actions, of which all others have what follows from its chunks."""
        return self._in_a_row([])

    def _in_a_row(self, pipelines: Sequence[Pipeline]) -> ChunkPlan:
        batch = self.batch
        return in_a_row(
            batch.seq_lens, self.groups, pipelines, batch.stages, sp_size=batch.sp_size,
            regathers=batch.model.training.passes_gather, checked=False,
        )  # fmt: skip

    def plan(self, pipelines: Sequence[Pipeline]) -> ChunkPlan:
        return self._chunks.with_actions(self._in_a_row(pipelines).actions)

    def one_pipeline(self, own: range | None = None, layers: int = 0) -> ChunkPlan:
        """The plan of one pipeline of all groups, or its `own`, each diagonal with the same number
        of layers."""
        own = range(len(self.groups)) if own is None else own
        num_diagonals = sum(len(self.groups[i]) for i in own) + len(self.batch.stages) - 1
        return self.plan([(own, [layers] * num_diagonals)])

    @cached_property
    def fitting_plan(self) -> ChunkPlan | None:
        """The plan with least overhead, the groups of most chunks first; None where none was found
        that fits."""
        spare_bytes, budget = _ROUNDING_BYTES, self.batch.memory.device_budget_bytes
        for _ in range(_MAX_REPAIRS):
            pipelines = self._pipelines(spare_bytes)
            if pipelines is None:
                break
            plan = self.plan(pipelines)
            lacking_bytes = max(self.batch.used_bytes(plan)) - budget
            if lacking_bytes <= 0:
                return plan
            spare_bytes += lacking_bytes
        return None

    def _pipelines(self, spare_bytes: int) -> list[Pipeline] | None:
        """The pipelines of least overhead; None where nothing fits. Each costs a warm-up and a
        cool-down, and each of its layers a forward (Eq. 13)."""
        batch, groups, stages = self.batch, self.groups, self.batch.stages
        cells_s = batch.model.cell_seconds(
            [chunk for group in groups for chunk in group], stages, sp_size=batch.sp_size
        )  # (P, K, 2)
        ends_s = (len(stages) - 1) * float(cells_s.sum(axis=2).mean())
        layer_s = float(cells_s[..., 0].mean()) * len(stages) / sum(stages)
        last = len(groups)
        edges: list[int] = []  # where groups have at most half the chunks of those before
        for i, group in enumerate(groups):
            if 2 * len(group) <= len(groups[edges[-1] if edges else 0]):
                edges.append(i)
        stretches = [
            (start, stop)
            for stop in (*edges, last)
            for start in (0, *edges)
            if start < stop and stop - start < last
        ]

        def kinds_and_loads(own: range) -> tuple[Integers, Loads]:
            kinds = kinds_of([groups[i] for i in own], len(stages))
            return kinds, loads_of(self.one_pipeline(own), batch.memory, kinds, spare_bytes)

        found: dict[int, tuple[float, list[Pipeline]]] = {0: (0.0, [])}  # of the first groups
        whole = kinds_and_loads(range(last))
        bound_s = ends_s + layer_s * whole[1].least_sum
        # one pipeline comes last where others may be better: to choose its layers takes longest
        stretches.insert(0 if bound_s <= 2 * ends_s else len(stretches), (0, last))
        for start, stop in stretches:
            if start not in found:
                continue
            before_s, before = found[start]
            least_s = before_s + ends_s * (1 if stop == last else 2)
            own, is_whole = range(start, stop), stop - start == last
            least_s = bound_s if is_whole else least_s
            if last in found and least_s >= found[last][0]:
                continue
            kinds, loads = whole if is_whole else kinds_and_loads(own)
            layers = choose_layers(loads, batch.exact)
            if layers is None:
                continue
            layers = layers[kinds]
            overhead_s = before_s + ends_s + layer_s * float(layers.sum())
            if stop not in found or overhead_s < found[stop][0]:
                found[stop] = overhead_s, [*before, (own, layers.tolist())]
        return found[last][1] if last in found else None


def in_a_row(
    seq_lens: Sequence[int],
    groups: Groups,
    pipelines: Sequence[Pipeline],
    stages: tuple[int, ...],
    *,
    sp_size: int = 1,
    regathers: bool = False,
    checked: bool = True,
) -> ChunkPlan:
    """Token-level 1F1B of each pipeline, one after the other."""
    numbered, num_stages = number_chunks(groups), len(stages)
    cells: list[list[Action]] = [[] for _ in stages]
    for own, layers in pipelines:
        chunks = numbered[own.start : own.stop]
        rows = recompute_on_diagonals(layers, [len(one) for one in chunks], stages)
        for stage, row in enumerate(rows):
            cells[stage] += seq1f1b_cells(chunks, num_stages, stage, row)
    lists = [with_messages(own, stage, num_stages) for stage, own in enumerate(cells)]
    return assemble(
        seq_lens, groups, stages, lists, sp_size=sp_size, regathers=regathers, checked=checked
    )


@dataclass(frozen=True)
class Loads:
    """Moments at which a stage of a pipeline may hold more bytes than it has room for.

    Diagonals of one kind recompute the same number of layers (`kinds_of`): G kinds, and moments
    that are equal are one.
    """

    excess_bytes: Array
    """(R,) Bytes above the room with nothing recomputed."""
    saved_bytes: Array
    """(R, G) Bytes less for each layer that a kind recomputes, of graphs that are there."""
    again_bytes: Array
    """(R,) Bytes more if the acting chunk recomputes: the layer at work in its backward."""
    acting: Integers
    """(R,) The kind of the chunk whose forward or backward runs."""
    heights: Integers
    """(R,) Layers of the stage, which recomputes no more of them."""
    counts: Integers
    """(G,) Diagonals of each kind."""

    def lacking_bytes(self, layers: Integers) -> Array:
        """(R,) Bytes above the room with that many layers of each kind (G,) recomputed."""
        felt = np.minimum(layers, self.heights[:, None])  # (R, G)
        lacking: Array = self.excess_bytes - np.einsum("rd,rd->r", self.saved_bytes, felt)
        lacking += self.again_bytes * (layers[self.acting] > 0)
        return lacking

    def fit(self, layers: Integers) -> bool:
        """Whether every stage has room all the time."""
        return bool(self.lacking_bytes(layers).max(initial=-inf) <= 0)

    @property
    def least_sum(self) -> float:
        """Layers of which no choice has fewer, over all diagonals: those of moments with no graph
        in common, each at the best rates of its own."""
        most = self.counts * self.heights[:, None]
        order = np.argsort(-self.saved_bytes / self.counts, axis=1)
        relief = np.take_along_axis(self.saved_bytes * self.heights[:, None], order, axis=1)
        relief, layers = (
            np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))
            for rows in (relief, np.take_along_axis(most, order, axis=1))
        )
        felt, num_kinds = self.saved_bytes > 0, len(self.counts)
        starts, stops = felt.argmax(axis=1), num_kinds - felt[:, ::-1].argmax(axis=1)
        needed = map(np.interp, self.excess_bytes, relief, layers)
        least = np.zeros(num_kinds + 1)  # of moments whose graphs are of the first kinds
        rows = sorted(zip(stops.tolist(), starts.tolist(), needed, strict=True))
        at = 0
        for stop, start, count in rows:
            least[at + 1 : stop + 1] = least[at]
            at = stop
            least[stop] = max(least[stop], least[start] + count)
        return float(least[at])

    def at(self, moments: NDArray[np.bool_]) -> Loads:
        """These loads at some moments alone."""
        return Loads(
            self.excess_bytes[moments], self.saved_bytes[moments], self.again_bytes[moments],
            self.acting[moments], self.heights[moments], self.counts,
        )  # fmt: skip


def kinds_of(groups: Groups, num_stages: int) -> Integers:
    """(D,) the kind of each diagonal of a pipeline. Groups of equal chunks that follow each other
    make equal diagonals once as many of them have begun as there are stages: these are of a kind,
    so that the work of a choice does not grow with the number of equal sequences."""
    places: dict[tuple[Any, ...], int] = {}
    kinds: list[int] = []
    before: tuple[int, ...] = ()
    count = 0
    for group in groups:
        own = tuple(chunk.num_tokens for chunk in group)
        count = count + 1 if own == before else 0
        before = own
        number = min(count, num_stages)
        key = (own, number) if number == num_stages else (len(kinds),)
        kinds += [places.setdefault((*key, i), len(places)) for i in range(len(group))]
    return np.array([*kinds, *range(len(places), len(places) + num_stages - 1)])


def loads_of(
    plan: ChunkPlan, memory: PlanMemory, kinds: Integers | None = None, spare_bytes: int = 0
) -> Loads:
    """The loads of a plan's only pipeline, which recomputes nothing, by the memory simulation. It
    may be of some chunks alone: buffers are as large as all of them ask for. `kinds`: of its
    diagonals; None: each is its own."""
    backwards = np.array([a.chunk for a in plan.actions[0] if isinstance(a, Backward)])
    places, first = np.argsort(backwards), backwards.min()
    last, num_diagonals = len(plan.stages) - 1, len(backwards) + len(plan.stages) - 1
    kinds = np.arange(num_diagonals) if kinds is None else kinds
    counts = np.bincount(kinds)
    found: dict[tuple[Any, ...], tuple[float, Array, float, int, int]] = {}
    for stage, (height, actions) in enumerate(zip(plan.stages, plan.actions, strict=True)):
        cell = memory.cell(plan.stages, stage)
        means = np.cumsum(cell.graph_layers) / np.arange(1, height + 1)
        layer_bytes = means.min() - cell.message  # of a token, at least, saved by each layer
        alive = np.zeros(len(counts))  # bytes that a layer of each graph that is there would save
        curve = memory.curve(plan, stage)
        whole = curve.device[-1, _GRADIENTS] if first else 0  # of pipelines before
        for index, (action, parts) in enumerate(zip(actions, curve.device.tolist(), strict=True)):
            if not isinstance(action, Forward | Backward):
                continue
            kind = int(kinds[places[action.chunk - first] + last - stage])
            tokens = plan.chunks[action.chunk].num_tokens / plan.sp_size
            is_backward = isinstance(action, Backward)
            own = layer_bytes * tokens
            alive[kind] += 0.0 if is_backward else own
            more = max(cell.graph_layers) * tokens * is_backward
            lacks = sum(parts) + spare_bytes - memory.device_budget_bytes
            *late, made, added = curve.late.get(index, (0.0, 0.0, 0.0, 0.0))
            lacks += made if first and is_backward else max(0, whole - parts[_GRADIENTS])
            others = alive
            if is_backward:
                others = alive.copy()  # moments of now keep theirs
                others[kind] = max(0.0, alive[kind] - own)
            top = max(0.0, *late) if made else max(0.0, added)
            start, moments = lacks - top, list[tuple[float, float, Array]]()
            if is_backward and stage == last:
                # the loss runs before a layer recomputes, and is over when one is at work
                loss = memory.loss_bytes(cell, tokens, backward=True)
                at_work = tokens * (cell.working + cell.exchange * (plan.sp_size > 1))
                if parts[PARTS.index("logits")]:
                    start = lacks - loss + at_work
                moments = [(start - at_work + loss, 0.0, alive)]
            moments.append((start, more, alive))
            # when the gradients are there, one layer of the graph is left, and then none
            beside = zip(late, (own, 0.0), strict=True) if made and not first else ()
            for beyond, gone in beside:
                moments.append((start + beyond, more - gone, others))
            if is_backward and not stage and (first or not made):
                moments.append((start + added, 0.0, others))
            for lacks, more, saves in moments:
                if lacks + more > 0:  # at other moments all fits in any case
                    key = lacks, more, kind, height, saves.tobytes()
                    found[key] = lacks, saves.copy(), more, kind, height
            alive = others
    columns = zip(*found.values(), strict=True) if found else [()] * 5
    excess, saved, again, acting, tops = columns
    return Loads(
        np.array(excess, float), np.array(saved).reshape(-1, len(counts)), np.array(again, float),
        np.array(acting, int), np.array(tops, int), counts,
    )  # fmt: skip


def choose_layers(loads: Loads, exact: bool = False) -> Integers | None:
    """(G,) the layers that the diagonals of each kind recompute so that every stage has room, of
    least sum over all diagonals where `exact`; None: there are none.

    Greedily: a layer more on the diagonals that relieve most for each of them, until no stage lacks
    room; then fewer where later ones have made them needless. The better of two ways to weigh
    relief: bytes, and shares of what a moment lacks; of few diagonals, where a layer is a percent
    of a step, also without each of them.
    """
    found = _least_layers(loads) if exact and len(loads.heights) else None
    if found is None:
        tried = [_relieved(loads, by_shares) for by_shares in (False, True)]
        num_diagonals = loads.saved_bytes.shape[1]
        if len(loads.heights) and num_diagonals <= _FEW_DIAGONALS:
            for one in np.eye(num_diagonals):
                others = replace(loads, saved_bytes=loads.saved_bytes * (1 - one))
                tried.append(_relieved(others, by_shares=False))
        fitting = (layers for layers in tried if layers is not None)
        found = min(fitting, key=lambda layers: int(layers @ loads.counts), default=None)
    return found


def _relieved(loads: Loads, by_shares: bool) -> Integers | None:
    layers = np.zeros(loads.saved_bytes.shape[1], dtype=np.int64)
    lacking = loads.lacking_bytes(layers)
    columns = np.ascontiguousarray(loads.saved_bytes.T)
    reliefs, gains = np.zeros_like(loads.saved_bytes), np.zeros(len(layers))
    """(R, G) relief of one layer more on a kind of diagonals, and (G,) its sums, per diagonal."""
    felt = loads.saved_bytes > 0
    felt[np.arange(len(lacking)), loads.acting] = True
    firsts, ends = felt.argmax(axis=1), len(layers) - felt[:, ::-1].argmax(axis=1)
    felt = np.ascontiguousarray(felt.T)

    def weigh(touched: NDArray[np.bool_]) -> None:
        """Weigh anew what is left of some moments, and the sums that they are part of."""
        rows = np.flatnonzero(touched & (is_weighed | (lacking > 0)))
        if not len(rows):
            return
        first, end = firsts[rows].min(), ends[rows].max()
        lacks, acting = np.maximum(lacking[rows, None], 0.0), loads.acting[rows]
        relief = loads.saved_bytes[rows, first:end]
        relief *= layers[first:end] < loads.heights[rows, None]
        # who recomputes for the first time needs bytes for it
        acts = np.arange(len(rows)), acting - first
        own, more = relief[acts], np.where(layers[acting] > 0, 0.0, loads.again_bytes[rows])
        np.minimum(relief, lacks, out=relief)
        relief[acts] = np.clip(own - more, 1e-3 * own, lacks[:, 0])
        if by_shares:
            np.divide(relief, lacks, out=relief, where=lacks > 0)
        reliefs[rows, first:end] = relief
        is_weighed[rows] = lacking[rows] > 0
        gains[first:end] = reliefs[:, first:end].sum(axis=0) / loads.counts[first:end]

    is_weighed = np.zeros(len(lacking), dtype=bool)
    weigh(lacking > 0)
    while lacking.max(initial=-inf) > 0:
        chosen = int(gains.argmax())
        if gains[chosen] <= 0:
            return None
        gain, gains[chosen] = gains[chosen], 0.0
        is_first, saved = not layers[chosen], columns[chosen]
        # the others' gains fall, too, but where one that recomputes for the first time needs bytes
        least, gains[chosen] = gains.max() * loads.counts[chosen], gain
        while True:
            lacking -= saved * (layers[chosen] < loads.heights)
            layers[chosen] += 1
            if is_first or lacking.max(initial=-inf) <= 0:
                lacking += loads.again_bytes * (loads.acting == chosen) * is_first
                break
            # by now it recomputes anyway, so that a layer more needs no bytes for it
            lacks = np.maximum(lacking, 0.0)
            relief = np.minimum(saved * (layers[chosen] < loads.heights), lacks)
            if by_shares:
                relief = np.divide(relief, lacks, out=relief, where=lacks > 0)
            if relief.sum() <= least:
                break
        weigh(felt[chosen])
    for diagonal in np.argsort(layers, kind="stable"):
        those = loads.at(felt[diagonal])
        while layers[diagonal]:
            layers[diagonal] -= 1
            if not those.fit(layers):
                layers[diagonal] += 1
                break
    return layers


def _least_layers(loads: Loads) -> Integers | None:
    """The layers of least sum (Eq. 20) by one integer program; None where the solver has none.

    Variables: the layers of each diagonal, as a sum of one integer per level of the stages'
    heights, of which a stage feels those up to its own; and whether the diagonal has any.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to import

    num_diagonals = loads.saved_bytes.shape[1]
    tops = np.unique(loads.heights)
    most = np.diff(tops, prepend=0).astype(float)
    again = np.zeros_like(loads.saved_bytes)
    again[range(len(again)), loads.acting] = loads.again_bytes
    felt = [loads.saved_bytes * (top <= loads.heights[:, None]) for top in tops]
    scale = np.maximum(loads.saved_bytes.max(axis=1, keepdims=True), 1.0)
    room = LinearConstraint(np.hstack([*felt, -again]) / scale, lb=loads.excess_bytes / scale[:, 0])
    # a level of a diagonal is used only if the diagonal is
    eye = np.eye(num_diagonals)
    linked = np.hstack([np.kron(-np.eye(len(tops)), eye), np.kron(most, eye).T])
    found = milp(
        np.concatenate([*[loads.counts] * len(tops), np.zeros(num_diagonals)]),
        constraints=[room, LinearConstraint(linked, lb=0)],
        bounds=Bounds(0, np.repeat([*most, 1.0], num_diagonals)),
        integrality=np.ones((len(tops) + 1) * num_diagonals),
        options={"node_limit": _MAX_NODES, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    levels = np.rint(found.x).astype(np.int64).reshape(-1, num_diagonals)[:-1]
    layers: Integers = levels.sum(axis=0)
    return layers if loads.fit(layers) else None


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Coefficients of work: tokens up to x of a sequence take quadratic * x^2 + linear * x (Eq. 1,
    one stage)."""

    quadratic: float
    linear: float

    def of(self, start: int, stop: int) -> float:
        """Work of the tokens [start, stop) of a sequence."""
        return self.quadratic * (stop**2 - start**2) + self.linear * (stop - start)


def cut_and_pack(
    seq_lens: Sequence[int], num_slices: int, work: SliceWork, step: int = 1
) -> list[list[Chunk]]:
    """Groups of chunks, those of most chunks first, then those of most tokens.

    A group is the pieces of one sequence longer than the mesh's first slice, the last of them with
    short sequences behind it where they fit, or one chunk of short sequences. The longest sequence
    becomes `num_slices` chunks (fewer if it has fewer tokens), cut at multiples of `step`.
    """
    refuse_unusable(seq_lens)
    longest = max(seq_lens)
    slices = split_equal_work(
        0, longest, num_slices, quadratic=work.quadratic, linear=work.linear, step=step
    )
    mesh = [piece.num_tokens for piece in slices]
    most_tokens = max(mesh)
    long = [cut(i, n, mesh) for i, n in enumerate(seq_lens) if n > most_tokens]
    tails = [own[-1] for own in long]
    behind = pack_balanced(
        {i: n for i, n in enumerate(seq_lens) if n <= most_tokens},
        [(tail.num_tokens, work.of(tail.start, tail.stop)) for tail in tails],
        work,
        most_tokens=most_tokens,
        most_work=max(work.of(0, longest) / len(mesh), work.of(0, most_tokens)),
    )
    short = [tuple(Slice(i, 0, seq_lens[i]) for i in seq_ids) for seq_ids in behind]
    groups = [
        [*(Chunk((piece,)) for piece in own[:-1]), Chunk((own[-1], *packed))]
        for own, packed in zip(long, short, strict=False)
    ]
    groups += [[Chunk(packed)] for packed in short[len(tails) :]]
    return sorted(groups, key=lambda own: (-len(own), -sum(chunk.num_tokens for chunk in own)))


def cut(seq_id: int, seq_len: int, mesh: Sequence[int]) -> list[Slice]:
    """Slices of the mesh's sizes while tokens remain behind them, and the tail."""
    bounds = takewhile(lambda bound: bound < seq_len, accumulate(mesh, initial=0))
    return [Slice(seq_id, start, stop) for start, stop in pairwise([*bounds, seq_len])]


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
    model: CostModel, longest: int, num_slices: int, stages: tuple[int, ...], sp_size: int = 1
) -> SliceWork:
    """The paper's a1 and a2 for the slowest stage, forward and backward together, from equal pieces
    of a sequence of `longest` tokens, about `num_slices` of them: efficiencies depend on their
    size. What a chunk costs however few its tokens is fitted too and left out."""
    from scipy.optimize import nnls  # half a second to import

    slices = []
    for count in (max(1, num_slices // 2), num_slices, 2 * num_slices):
        bounds = np.unique(np.linspace(0, longest, count + 1).astype(int)).tolist()
        slices += [Slice(0, start, stop, Place(0, sp_size)) for start, stop in pairwise(bounds)]
    chunks = [Chunk((piece,)) for piece in slices]
    seconds = model.cell_seconds(chunks, stages, sp_size=sp_size).sum(axis=2)  # (P, K)
    seconds = seconds[seconds.sum(axis=1).argmax()]  # (K,)
    terms = np.array([(s.stop**2 - s.start**2, s.num_tokens, 1) for s in slices], dtype=float)
    scale = terms.max(axis=0)
    # errors count relative to the piece's own time
    found, _ = nnls(terms / scale / seconds[:, None], np.ones_like(seconds))
    quadratic, linear, _ = (found / scale).tolist()
    return SliceWork(quadratic, linear) if quadratic or linear else SliceWork(0.0, 1.0)
