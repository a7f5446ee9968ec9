"""InfiniPipe: elastic pipelines over chunks of equal time, with checkpointing chosen per cell.

The planner of Wang et al., arXiv 2509.21275, in four steps:

1. Cut the longest sequence into slices of equal time (the mesh), and all sequences longer than the
   mesh's first slice by the same mesh. Pack short sequences with each other, or into the last
   chunks (tails) of long ones (Algorithm 1: `cut_and_pack`).
2. Run chunks in token-level 1F1B, sequences with most chunks first (`orders.seq1f1b_cells`).
3. Choose the layers that each cell recomputes. Cells on one diagonal of the schedule run at the
   same time, so recomputing a diagonal takes as long as recomputing one of its cells (Eqs. 15 and
   16). So there is one integer per diagonal, K + P - 1 for K chunks and P stages. Their sum is
   minimized so that each stage fits in memory (Eqs. 17 to 20: `choose_layers`).
4. Several pipelines may run one after the other, with sequences of equally many chunks in the same
   one. The division of least overhead is a shortest path (Eqs. 12 to 14: `_pipelines`).

Numbers of slices are tried from the smallest; the plan that is fastest in simulation is chosen.

Differences to the paper: layers are chosen greedily, not by an integer program. Bytes come from the
memory simulation, instead of Eqs. 5 to 10, and seconds from the cost model; only for the mesh is
the paper's form a1 x^2 + a2 x (Eqs. 1 and 4) fitted to the cost model.

Errata:

- The window of Eq. 7 (chunks that a stage holds) is one more than the forwards ahead.
- Eq. 11 divides its time by the sequence-parallel degree, though it is that of one stage already.
- As printed, the threshold of Algorithm 1 can fall, so that its loop never ends. Here it only
  rises, until a bucket with room for the tokens can take the sequence, and by at most a tenth. If
  this is not enough, a new bucket is opened. Without the limit, buckets of tails would grow by half
  in time; with it, simulated steps take 1 to 2.5 % less.
- The last slice of a sequence counts as its tail also if the mesh fits exactly: no slice reads its
  K,V.

    P stages, K chunks, D = K + P - 1 diagonals of a pipeline, R rows of `Loads`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise, takewhile
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.seconds import Array
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Action, Backward, Chunk, ChunkPlan, Forward, Place, Slice
from furlong.plan.segments import row_step
from furlong.planners.candidates import ByteBound
from furlong.planners.chunks import Groups, refuse_unusable, shard_all, split_equal_work
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import (
    assemble,
    number_chunks,
    recompute_on_diagonals,
    seq1f1b_cells,
    with_messages,
)
from furlong.planners.question import Candidate, DoesNotFitError, Space
from furlong.simulate.clock import time_actions
from furlong.units import count_words

Integers = NDArray[np.int64]
GroupsOfPipeline = tuple[range, Sequence[int]]
"""(groups of a pipeline, layers that the cells of each diagonal recompute)."""

_GRADIENTS = PARTS.index("gradients")
_MOST_SLICES = 64
"""Most slices of the longest sequence."""
_PATIENCE = 3
"""Numbers of slices in a row without improvement that end the search."""
_MOST_CELLS = 10_000
"""Cells over all tried numbers of slices that end the search; four times as many while no plan
fits."""
_ROUNDING_BYTES = 16
"""Bytes to leave free, as the memory simulation rounds each part."""
_MAX_REPAIRS = 3
"""Most attempts at a plan that fits; the bytes that one lacks are added to the next one's margin.
"""
_FEW_DIAGONALS = 8
MAX_GROWTH = 1.1
"""Most growth of the time threshold, as a multiple of its first value; infinite in the paper."""


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield one candidate for a layout with a pipeline; for `auto` only if the longest sequence may
    fit. The candidate's planner returns plans whose step takes less than `space.beat_s` seconds,
    and raises ConfigError if there are none."""
    question, model = space.question, space.model
    if space.layout.pp == 1 or (question.method == "auto" and not _may_fit(space)):
        return
    plan_of = partial(
        plan_infinipipe, model=model, stages=space.stages, sp_size=space.layout.sp,
        budget_bytes=question.limits.limit_bytes, beat_s=space.beat_s, recent=question.recent,
    )  # fmt: skip
    options = ChunkOptions(reshard=model.training.passes_gather)
    yield Candidate("infinipipe", space, options, 0.0, plan_of)


def _may_fit(space: Space) -> bool:
    """Whether the longest sequence may fit, in the finest slices with all layers recomputed."""
    question, stages = space.question, space.stages
    # slices of equal time are longer than half of the mean
    size = max(1, question.longest // (2 * _MOST_SLICES))
    options = ChunkOptions(size=size, keep="all", recompute_layers=max(stages))
    bounds = (
        ByteBound(
            space.model, question.longest, size, layout=space.layout, stages=stages, stage=stage
        )
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
    beat_s: float = inf,
    recent: deque[_Batch] | None = None,
) -> ChunkPlan:
    """Return a checked plan of one replica on len(stages) x sp_size devices of `budget_bytes` each.

    `stages`: layers per stage; rank s holds stage s. Each slice is sharded over `sp_size`
    processes. `beat_s`: seconds below which the step must stay. `recent`: cache of the last batch,
    which may be planned again with another `beat_s`.

    Raises DataError for unusable lengths, ConfigError if no plan is faster than `beat_s`, and
    DoesNotFitError, for the plan closest to fitting, if no number of slices fits in memory.
    """
    refuse_unusable(seq_lens)
    memory = model.memory(budget_bytes)
    batch = _Batch(tuple(seq_lens), model, memory, tuple(stages), sp_size)
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
        step_s = cut.bare_s  # a lower bound: recomputed layers take additional time
        gains = step_s < least_s
        if step_s < beat_s:
            found = None if best is None else cut.fitting_plan
            plan = found or cut.one_pipeline(layers=max(batch.stages))
            if found is None and not batch.has_room(plan):
                # all layers are recomputed: with fewer it does not fit either
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
    """Yield the numbers of slices to try: 1, 2, 3, ..., rising by a fifth from 8 on, to `most`."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (number + 2) // 5)


@dataclass(frozen=True)
class _Batch:
    """The inputs that all plans of one batch share, and a cache of the batch as cut into slices."""

    seq_lens: tuple[int, ...]
    model: CostModel
    memory: PlanMemory
    stages: tuple[int, ...]
    sp_size: int
    _cuts: dict[int, _Cut] = field(init=False, repr=False, compare=False, default_factory=dict)

    def cut(self, num_slices: int) -> _Cut:
        """Return the batch in chunks, with its longest sequence cut into `num_slices` slices."""
        if num_slices not in self._cuts:
            longest, step = max(self.seq_lens), row_step(self.model.device_type, self.sp_size)
            work = fit_work(self.model, longest, num_slices, self.stages, self.sp_size)
            groups = shard_all(cut_and_pack(self.seq_lens, num_slices, work, step), self.sp_size)
            self._cuts[num_slices] = _Cut(self, groups)
        return self._cuts[num_slices]

    def step_s(self, plan: ChunkPlan) -> float:
        return time_actions(plan, self.model.costs(plan)).duration_s

    def used_bytes(self, plan: ChunkPlan) -> list[int]:
        """Return the peak bytes of a plan on each rank."""
        return [max(self.memory.peak_bytes_of_actions(plan, s)) for s in range(len(self.stages))]

    def has_room(self, plan: ChunkPlan) -> bool:
        """Whether a plan fits in memory; stops at the first rank where it does not."""
        walks = (self.memory.peak_bytes_of_actions(plan, s) for s in range(len(self.stages)))
        return all(max(used) <= self.memory.device_budget_bytes for used in walks)

    def no_room(self, plan: ChunkPlan) -> DoesNotFitError:
        """Return the error for the plan closest to fitting, with all layers recomputed."""
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
    """A batch cut into chunks, with cached plans and times that do not depend on `beat_s`."""

    batch: _Batch
    groups: Groups

    @cached_property
    def bare_s(self) -> float:
        """Seconds of a step without recomputation."""
        return self.batch.step_s(self.one_pipeline())

    @cached_property
    def _chunks(self) -> ChunkPlan:
        """A plan that has the chunks but no actions. Plans that add actions to it (`with_actions`)
        share its cached properties."""
        return self._in_a_row([])

    def _in_a_row(self, pipelines: Sequence[GroupsOfPipeline]) -> ChunkPlan:
        batch = self.batch
        return in_a_row(
            batch.seq_lens, self.groups, pipelines, batch.stages, sp_size=batch.sp_size,
            regathers=batch.model.training.passes_gather, checked=False,
        )  # fmt: skip

    def plan(self, pipelines: Sequence[GroupsOfPipeline]) -> ChunkPlan:
        return self._chunks.with_actions(self._in_a_row(pipelines).actions)

    def one_pipeline(self, own: range | None = None, layers: int = 0) -> ChunkPlan:
        """Return the plan of one pipeline of all groups of chunks, or of groups `own`. Each
        diagonal of its schedule recomputes `layers` layers."""
        own = range(len(self.groups)) if own is None else own
        num_diagonals = sum(len(self.groups[i]) for i in own) + len(self.batch.stages) - 1
        return self.plan([(own, [layers] * num_diagonals)])

    @cached_property
    def fitting_plan(self) -> ChunkPlan | None:
        """The plan with the least overhead among those that fit in memory; None if none fits."""
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

    def _pipelines(self, spare_bytes: int) -> list[GroupsOfPipeline] | None:
        """Return the division of the groups of chunks into pipelines that has the least overhead,
        or None if no division fits with `spare_bytes` free. The overhead of a pipeline is its
        warm-up and cool-down, and a forward of each recomputed layer (Eq. 13).

        The division is a shortest path. An edge (start, stop) is a pipeline of groups start to
        stop - 1, and `found[n]` is the best division of the first n groups. Only some groups may be
        the first of a pipeline: group 0, and each group that has at most half as many chunks as the
        previous one of these.
        """
        batch, groups, stages = self.batch, self.groups, self.batch.stages
        cells_s = batch.model.cell_seconds(
            [chunk for group in groups for chunk in group], stages, sp_size=batch.sp_size
        )  # (P, K, 2)
        ends_s = (len(stages) - 1) * float(cells_s.sum(axis=2).mean())
        layer_s = float(cells_s[..., 0].mean()) * len(stages) / sum(stages)
        last = len(groups)
        edges: list[int] = []  # where groups begin with at most half the chunks of those before
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

        found: dict[int, tuple[float, list[GroupsOfPipeline]]] = {0: (0.0, [])}
        whole = kinds_and_loads(range(last))
        bound_s = ends_s + layer_s * whole[1].least_sum
        # the single pipeline, whose layers take longest to choose, comes last if others may win
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
            layers = choose_layers(loads)
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
    pipelines: Sequence[GroupsOfPipeline],
    stages: tuple[int, ...],
    *,
    sp_size: int = 1,
    regathers: bool = False,
    checked: bool = True,
) -> ChunkPlan:
    """Return the plan of several pipelines in token-level 1F1B, which run one after the other."""
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
    """Bytes by which a pipeline exceeds the memory budget, and bytes that recomputation saves. Each
    row is a moment in a Forward or Backward of a stage at which the budget may be exceeded. Equal
    rows are merged.

    A diagonal is cells of the schedule that run at the same time. Diagonals of one kind recompute
    equally many layers (`kinds_of`). G is the number of kinds, R the number of rows.
    """

    excess_bytes: Array
    """(R,) Bytes above the budget without recomputation."""
    saved_bytes: Array
    """(R, G) Bytes saved per layer that a kind recomputes, over the graphs held at the action."""
    again_bytes: Array
    """(R,) Additional bytes if the running chunk recomputes: one layer's graph in its backward."""
    acting: Integers
    """(R,) Kind of the chunk whose forward or backward runs."""
    heights: Integers
    """(R,) Layers of the stage: the most that it can recompute."""
    counts: Integers
    """(G,) Number of diagonals of each kind."""

    def lacking_bytes(self, layers: Integers) -> Array:
        """Return the bytes above the budget (R,) if diagonals of each kind recompute `layers`
        (G,)."""
        felt = np.minimum(layers, self.heights[:, None])  # (R, G)
        lacking: Array = self.excess_bytes - np.einsum("rd,rd->r", self.saved_bytes, felt)
        lacking += self.again_bytes * (layers[self.acting] > 0)
        return lacking

    def fit(self, layers: Integers) -> bool:
        """Whether no row exceeds the budget if diagonals of each kind recompute `layers` (G,)."""
        return bool(self.lacking_bytes(layers).max(initial=-inf) <= 0)

    @property
    def least_sum(self) -> float:
        """Lower bound on the number of layers to recompute, summed over all diagonals.

        Each row alone needs a number of layers: the fewest that save its excess bytes, taken first
        from the kinds of diagonals that save most bytes per layer. If two rows depend on different
        kinds, both numbers are needed, so they are added. The bound is the largest such sum over
        any set of rows, by dynamic programming over the kinds.
        """
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
        least = np.zeros(num_kinds + 1)  # least[n]: of moments with graphs of the first n kinds
        rows = sorted(zip(stops.tolist(), starts.tolist(), needed, strict=True))
        at = 0
        for stop, start, count in rows:
            least[at + 1 : stop + 1] = least[at]
            at = stop
            least[stop] = max(least[stop], least[start] + count)
        return float(least[at])

    def at(self, moments: NDArray[np.bool_]) -> Loads:
        """Return the loads of the rows that the mask `moments` (R,) selects."""
        return Loads(
            self.excess_bytes[moments], self.saved_bytes[moments], self.again_bytes[moments],
            self.acting[moments], self.heights[moments], self.counts,
        )  # fmt: skip


def kinds_of(groups: Groups, num_stages: int) -> Integers:
    """Return the kind of each diagonal of a pipeline, as an array (D,) of numbers from 0. Diagonals
    of one kind must recompute equally many layers.

    Most diagonals have a kind of their own. The exception is a series of groups with equal chunks:
    the groups after its first `num_stages` all have the same kinds. So `choose_layers` has no more
    kinds to choose for in a longer series.
    """
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
    """Return by how many bytes a plan exceeds the memory budget, by the memory simulation, and what
    recomputation would save (`Loads`).

    `plan`: one pipeline without recomputation. It may run only some chunks of the batch, but
    buffers are sized for all of them. `kinds`: kind of each diagonal (D,); None: all differ.
    `spare_bytes`: bytes to leave free.
    """
    backwards = np.array([a.chunk for a in plan.actions[0] if isinstance(a, Backward)])
    places, first = np.argsort(backwards), backwards.min()
    last, num_diagonals = len(plan.stages) - 1, len(backwards) + len(plan.stages) - 1
    kinds = np.arange(num_diagonals) if kinds is None else kinds
    counts = np.bincount(kinds)
    found: dict[tuple[Any, ...], tuple[float, Array, float, int, int]] = {}
    for stage, (height, actions) in enumerate(zip(plan.stages, plan.actions, strict=True)):
        cell = memory.cell(plan.stages, stage)
        means = np.cumsum(cell.graph_layers) / np.arange(1, height + 1)
        layer_bytes = means.min() - cell.message  # least bytes per token saved by each layer
        alive = np.zeros(len(counts))  # bytes saved per layer, by kind, over graphs held now
        curve = memory.curve(plan, stage)
        whole = curve.device[-1, _GRADIENTS] if first else 0  # an earlier pipeline made them
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
                others = alive.copy()  # moments before keep the array `alive`
                others[kind] = max(0.0, alive[kind] - own)
            top = max(0.0, *late) if made else max(0.0, added)
            start, moments = lacks - top, list[tuple[float, float, Array]]()
            if is_backward and stage == last:
                # the loss runs before any layer recomputes, and its memory is free by then
                loss = memory.loss_bytes(cell, tokens, backward=True)
                at_work = tokens * (cell.working + cell.exchange * (plan.sp_size > 1))
                if parts[PARTS.index("logits")]:
                    start = lacks - loss + at_work
                moments = [(start - at_work + loss, 0.0, alive)]
            moments.append((start, more, alive))
            # when gradients are allocated, one layer of the graph is left, later none
            beside = zip(late, (own, 0.0), strict=True) if made and not first else ()
            for beyond, gone in beside:
                moments.append((start + beyond, more - gone, others))
            if is_backward and not stage and (first or not made):
                moments.append((start + added, 0.0, others))
            for lacks, more, saves in moments:
                if lacks + more > 0:  # other moments always fit
                    key = lacks, more, kind, height, saves.tobytes()
                    found[key] = lacks, saves.copy(), more, kind, height
            alive = others
    columns = zip(*found.values(), strict=True) if found else [()] * 5
    excess, saved, again, acting, tops = columns
    return Loads(
        np.array(excess, float), np.array(saved).reshape(-1, len(counts)), np.array(again, float),
        np.array(acting, int), np.array(tops, int), counts,
    )  # fmt: skip


def choose_layers(loads: Loads) -> Integers | None:
    """Return the number of layers (G,) that diagonals of each kind recompute so that each stage
    fits in memory, or None if no choice fits.

    A greedy search adds a layer to the kind that saves most per diagonal until all stages fit, then
    removes layers that have become needless. It runs twice, with savings in bytes and as a share of
    each row's excess, and the better result is returned. With few diagonals, where one layer is a
    percent of a step, it also runs with each kind excluded in turn.
    """
    tried = [_relieved(loads, by_shares) for by_shares in (False, True)]
    num_diagonals = loads.saved_bytes.shape[1]
    if len(loads.heights) and num_diagonals <= _FEW_DIAGONALS:
        for one in np.eye(num_diagonals):
            others = replace(loads, saved_bytes=loads.saved_bytes * (1 - one))
            tried.append(_relieved(others, by_shares=False))
    fitting = (layers for layers in tried if layers is not None)
    return min(fitting, key=lambda layers: int(layers @ loads.counts), default=None)


def _relieved(loads: Loads, by_shares: bool) -> Integers | None:
    layers = np.zeros(loads.saved_bytes.shape[1], dtype=np.int64)
    lacking = loads.lacking_bytes(layers)
    columns = np.ascontiguousarray(loads.saved_bytes.T)
    reliefs, gains = np.zeros_like(loads.saved_bytes), np.zeros(len(layers))
    """(R, G) bytes or shares that one more layer of a kind saves; (G,) their sum per diagonal."""
    felt = loads.saved_bytes > 0
    felt[np.arange(len(lacking)), loads.acting] = True
    firsts, ends = felt.argmax(axis=1), len(layers) - felt[:, ::-1].argmax(axis=1)
    felt = np.ascontiguousarray(felt.T)

    def weigh(touched: NDArray[np.bool_]) -> None:
        """Update `reliefs`, the savings of one more recomputed layer, in those `touched` rows that
        exceed the budget, or did so at the last update. Then update `gains`: the sum of each column
        of `reliefs`, divided by the number of the kind's diagonals."""
        rows = np.flatnonzero(touched & (is_weighed | (lacking > 0)))
        if not len(rows):
            return
        first, end = firsts[rows].min(), ends[rows].max()
        lacks, acting = np.maximum(lacking[rows, None], 0.0), loads.acting[rows]
        relief = loads.saved_bytes[rows, first:end]
        relief *= layers[first:end] < loads.heights[rows, None]
        # the first recomputed layer of a kind needs bytes in its own backward
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
        # other gains only fall meanwhile (unless a first recomputed layer needs bytes), so layers
        # are added to this kind until its gain is below the next one, without updating the others
        least, gains[chosen] = gains.max() * loads.counts[chosen], gain
        while True:
            lacking -= saved * (layers[chosen] < loads.heights)
            layers[chosen] += 1
            if is_first or lacking.max(initial=-inf) <= 0:
                lacking += loads.again_bytes * (loads.acting == chosen) * is_first
                break
            # it recomputes already, so one more layer needs no additional bytes
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


@dataclass(frozen=True, slots=True)
class SliceWork:
    """Coefficients of work: the first x tokens of a sequence take quadratic * x^2 + linear * x (for
    one stage, Eq. 1)."""

    quadratic: float
    linear: float

    def of(self, start: int, stop: int) -> float:
        """Return the work of tokens [start, stop) of a sequence."""
        return self.quadratic * (stop**2 - start**2) + self.linear * (stop - start)


def cut_and_pack(
    seq_lens: Sequence[int], num_slices: int, work: SliceWork, step: int = 1
) -> list[list[Chunk]]:
    """Return groups of chunks, sorted by falling number of chunks, then of tokens.

    The mesh is the longest sequence in `num_slices` slices of equal work (fewer if it has fewer
    tokens), cut at multiples of `step`. Each sequence longer than the mesh's first slice is cut by
    the mesh into a group of chunks, the last of which also takes short sequences as far as they
    fit. Any other chunk of short sequences is a group.
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
    """Cut a sequence into slices of the sizes in `mesh`; the last slice takes what remains."""
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
    """Pack short sequences into buckets, and return the seq_ids in each bucket.

    Buckets are chunks that take short sequences. The first ones are `tails`, the last chunks of
    long sequences, in the given order; new buckets follow. Sequences are packed longest first. Each
    goes to the bucket with least work per token among those that have room for its tokens and its
    work. If no bucket has room for its work, `most_work` is raised just enough. Once it would
    exceed `max_growth` times the given value, a new bucket is opened instead.

    `short`: seq_id -> tokens, at most `most_tokens`. `tails`: (tokens, work) of each.
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
    """Return the coefficients a1 and a2 of the paper's formula, a1 x^2 + a2 x for the first x
    tokens of a sequence. They are fitted to the seconds of forward and backward at the slowest
    stage.

    Pieces of different sizes run at different efficiency, so a sequence of `longest` tokens is
    timed in about `num_slices` equal pieces. A fixed cost per chunk is fitted, too, but not
    returned.
    """
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
    # minimize relative errors
    found, _ = nnls(terms / scale / seconds[:, None], np.ones_like(seconds))
    quadratic, linear, _ = (found / scale).tolist()
    return SliceWork(quadratic, linear) if quadratic or linear else SliceWork(0.0, 1.0)
