"""Places: whole sequences in micro-batches, each on processes of its own of one pool; ours.

A sequence is on one process of a sequence-parallel group or on an aligned run of them, its place; a
micro-batch runs on all processes at once, and is as slow as its slowest. Every number of
checkpointed layers says how many tokens a process holds at a time, and so how many micro-batches
there must be. These settings are tried by rising lower bound: first their starts (dual
approximation, greedy), then the best of them are improved by tabu search, or all divisions looked
at where they are few.

FlexSP (Wang et al., ASPLOS 2025) and Megatron-Core's hybrid context parallelism choose places too:
the one on disjoint groups per micro-batch, the other by length alone. Here each sequence's place is
free, and all is priced by the cost model: loads add, and its `pass_seconds` prices them, for many
ways to place a sequence at once.

    F sums of a load, K sequences, Z sizes of places, P parts of a step's passes,
    M micro-batches, W processes, N divisions
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from furlong.cost.memory import gathered_tokens
from furlong.cost.model import CostModel
from furlong.cost.seconds import Array, ChunkTable, attention_calls, cell_parts, computed_keys
from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.plan import Chunk, ChunkPlan, Layout, Place, Slice, place_sizes
from furlong.planners.chunks import (
    by_place,
    chunk_by_chunk,
    does_not_fit,
    fitting_tokens,
    refuse_unusable,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.question import Candidate, Question

_LARGEST_POOL = 128
"""Devices of a pool on which whole sequences are placed: it takes minutes to place them on more."""
_NUM_IMPROVED = 6
"""Starts, the best ones, that are improved a little; then the best of them goes on."""
_FEW_TRIES = 240
_NUM_TRIES = 2400
"""Sequences that it tries to move or swap."""
_NUM_TRIES_OF_A_STEP = 60
"""The same while a step runs: far more would make the steps wait, and gain a percent."""
_MOST_SPOTS = 2**18
"""Most sequences times processes times micro-batches for which every spot of each is looked at,
unless there is no other start."""


@dataclass(frozen=True, slots=True)
class _Start:
    step_s: float
    setting: Setting
    num_micro_batches: int
    spots: Spots
    is_roomy: bool = False
    """Whether no process holds half of what it could."""


def candidates(question: Question, layout: Layout) -> Iterator[Candidate]:
    """One for a pool of several devices on one stage: its plans fit by themselves."""
    if layout.pp > 1 or not 1 < layout.sp <= _LARGEST_POOL:
        return
    model, limit_bytes = question.model_of(layout), question.limits.limit_bytes

    def plan_of(seq_lens: Sequence[int]) -> ChunkPlan:
        return plan_places(
            seq_lens, model, pool_size=layout.sp, budget_bytes=limit_bytes,
            num_tries=_NUM_TRIES_OF_A_STEP,
        )  # fmt: skip

    yield Candidate("places", layout, ChunkOptions(), 0.0, plan_of)


def plan_places(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    pool_size: int,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
    num_tries: int = _NUM_TRIES,
) -> ChunkPlan:
    """A checked plan of one rank, a pool of `pool_size` devices.

    `budget_bytes` of a device: None takes the hardware's. `recompute_layers`: checkpointed layers;
    None tries every number. `num_tries`: how long improvement goes on, in sequences.
    Raises ConfigError where the longest sequence fits on no place.
    """
    refuse_unusable(seq_lens)
    batch = PoolBatch.of(seq_lens, model, pool_size)
    num_layers = model.shape.num_layers
    if len(seq_lens) == 1:
        num_tries = 0  # a start has compared all its places
    tried = range(num_layers + 1) if recompute_layers is None else [recompute_layers]
    starts = _starts(settings(batch, budget_bytes, tried))
    if not starts:
        raise nothing_fits(batch, tried[-1], budget_bytes)
    few = [_improved(start, min(_FEW_TRIES, num_tries)) for start in starts[:_NUM_IMPROVED]]
    best = min(few, key=lambda start: start.step_s)
    best = _optimum(best) or _improved(best, num_tries)
    return plan_of(batch, best.spots, best.setting.rates.recompute_layers, budget_bytes)


def _optimum(start: _Start) -> _Start | None:
    """The fastest division in the setting of a start with one micro-batch; None where there are
    more micro-batches, or too many divisions to know."""
    if start.num_micro_batches > 1:
        return None
    division = Division(start.setting, 1)
    spots = fastest_spots(division, start.step_s)
    if spots is None:
        return None
    division.reset(spots or start.spots)
    return replace(start, step_s=division.step_s(), spots=division.spots)


def _improved(start: _Start, num_tries: int) -> _Start:
    setting, count = start.setting, start.num_micro_batches
    division = Division(setting, count)
    division.reset(start.spots)
    step_s = improve(division, num_tries)
    return _Start(step_s, setting, count, dict(division.spots))


def _starts(found: Sequence[Setting]) -> list[_Start]:
    """The starts of every setting whose bound is below the best of all, fastest first."""
    roomy: dict[int, int] = {}
    queue = [
        (setting.least_s(setting.fewest), number, setting.fewest)
        for number, setting in enumerate(found)
    ]
    heapq.heapify(queue)
    starts: list[_Start] = []
    best_s = inf
    while queue:
        bound_s, number, count = heapq.heappop(queue)
        if bound_s >= best_s:
            break
        setting = found[number]
        if number > roomy.get(count, number):
            continue  # what it adds to the room was not needed
        own = _starts_of(setting, count)
        if own:
            starts += own
            best_s = min(best_s, *(start.step_s for start in own))
            if any(start.is_roomy for start in own):
                roomy[count] = min(number, roomy.get(count, number))
        elif count < len(setting.rates.batch.seq_lens):
            heapq.heappush(queue, (setting.least_s(count + 1), number, count + 1))
    return sorted(starts, key=lambda start: start.step_s)


def _starts_of(setting: Setting, num_micro_batches: int) -> list[_Start]:
    """The best start that every way to start has in a setting; improvement ends elsewhere from
    each."""
    division, batch = Division(setting, num_micro_batches), setting.rates.batch
    num_spots = len(batch.seq_lens) * batch.pool_size * num_micro_batches
    found: list[_Start] = []
    for way in (by_targets, by_length, uniform, greedy):
        if way is greedy and found and num_spots > _MOST_SPOTS:
            continue
        own: list[_Start] = []
        for spots in way(division):
            division.reset(spots)
            roomy = 2 * setting.held(division.loads).max() <= setting.device_tokens
            own.append(_Start(division.step_s(), setting, num_micro_batches, spots, bool(roomy)))
        found += sorted(own, key=lambda start: start.step_s)[:1]
    return found


TOKENS, _CALLS, GATHERED = range(3)
"""Sums of a load that do not depend on sizes or windows: tokens, calls of attention, and tokens of
which K,V come beyond the process's own part (`cost.memory.stored_layers.gathered_tokens`)."""
_NUM_PLAIN = 3
_A_LITTLE = 1e-6
"""Tokens of a process that has next to nothing to do."""


@dataclass(frozen=True)
class PoolBatch:
    """Whole sequences that are to be placed in a pool."""

    seq_lens: tuple[int, ...]
    model: CostModel
    pool_size: int
    sizes: tuple[int, ...]
    """Sizes of places, rising from 1: powers of two that divide the pool."""
    added: Array
    """(K, Z, F) what each sequence adds to every process of a place of each size."""

    @classmethod
    def of(cls, seq_lens: Sequence[int], model: CostModel, pool_size: int) -> PoolBatch:
        sizes = tuple(n for n in place_sizes(pool_size) if n & (n - 1) == 0)
        added = np.array([[_added(n, size, sizes, model) for size in sizes] for n in seq_lens])
        return cls(tuple(seq_lens), model, pool_size, sizes, added)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.model.shape.windows))

    @property
    def exchange_rows(self) -> slice:
        """Sums of a load: tokens of the slices on the process's place of each size but 1; sums of
        attended keys follow."""
        return slice(_NUM_PLAIN, _NUM_PLAIN + len(self.sizes) - 1)

    def table(self, loads: Array) -> ChunkTable:
        """Loads (F, ...) as the cost model takes them."""
        exchanged = self.exchange_rows
        shared = exchanged.stop + len(self.windows)
        return ChunkTable(
            tokens=loads[TOKENS],
            num_slices=loads[_CALLS],
            exchanged_tokens=dict(zip(self.sizes[1:], loads[exchanged], strict=True)),
            local_keys=dict(zip(self.windows, loads[exchanged.stop : shared], strict=True)),
            shared_keys=dict(zip(self.windows, loads[shared:], strict=True)),
            prefix_tokens={},
            prefix_keys={},
        )


def _added(seq_len: int, size: int, sizes: Sequence[int], model: CostModel) -> list[float]:
    """(F,) what a sequence adds to each process of a place."""
    windows = dict.fromkeys(model.shape.windows)
    tile_tokens = model.hardware.tile_tokens
    keys = [computed_keys(0, seq_len, window, tile_tokens) / size for window in windows]
    exchanged = [seq_len * float(size == other) for other in sizes[1:]]
    nothing = [0.0] * len(keys)
    own = [*keys, *nothing] if size == 1 else [*nothing, *keys]
    piece, calls = Slice(0, 0, seq_len, Place(0, size)), attention_calls(model.shape, size)
    gathered = gathered_tokens(piece, 0, model.shape)
    return [seq_len / size, calls, gathered, *exchanged, *own]


class Rates:
    """Seconds of loads, with one number of checkpointed layers."""

    def __init__(self, batch: PoolBatch, recompute_layers: int) -> None:
        self.batch = batch
        self.recompute_layers = recompute_layers
        model = batch.model
        stages, layout = (model.shape.num_layers,), Layout(sp=batch.pool_size)
        self._parts = sum(cell_parts(stages, 0, recompute_layers), ())
        self._floored = model.stage_seconds(stages, 0, layout=layout, ranks=(0,))
        zero_stage = min(2, model.training.zero_stage)
        floorless = replace(
            model,
            hardware=replace(model.hardware, layer_launch_s=0.0, pass_launch_s=0.0),
            # experts are read once, whatever visits them
            shape=replace(
                model.shape,
                layers=tuple(replace(n, num_experts=n.num_active) for n in model.shape.layers),
            ),
            training=replace(model.training, zero_stage=zero_stage),
        )
        self._floorless = floorless.stage_seconds(stages, 0, layout=layout, ranks=(0,))
        little = np.where(batch.added[0] > 0, _A_LITTLE, 0.0).T
        little[batch.exchange_rows.stop :] = 0.0  # no keys
        self.least_s: Array = self.seconds(little)[:, 0]
        """(P,) of a micro-batch, whatever is in it."""
        self.fixed_s: Array = self.seconds(little, floors=False).sum(axis=0)
        """(Z,) what a process takes that has anything to do on a place, before its first token and
        without what has a floor: launches and gathered weights."""
        alone = self.seconds(batch.added.transpose(2, 0, 1), floors=False).sum(axis=0)
        self.alone_s: Array = alone - self.fixed_s
        """(K, Z) what each sequence adds to that on every process of its place."""

    def seconds(self, loads: Array, *, floors: bool = True) -> Array:
        """(P, ...) seconds of every part of the passes for loads (F, ...)."""
        seconds = self._floored if floors else self._floorless
        return seconds.pass_seconds(self._parts, self.batch.table(loads))


class Setting:
    """A number of checkpointed layers, with the tokens that a process can then hold at a time."""

    def __init__(
        self, batch: PoolBatch, recompute_layers: int, device_tokens: int, gather_weight: float
    ) -> None:
        self.rates = Rates(batch, recompute_layers)
        self.device_tokens = device_tokens
        self._gather_weight = gather_weight
        num_tokens = sum(batch.seq_lens)
        self.fewest = -(-num_tokens // (batch.pool_size * device_tokens))
        """Micro-batches."""

    def held(self, loads: Array) -> Array:
        """(...) tokens of `device_tokens` that loads (F, ...) take up: K and V that are gathered
        from other processes count as so many tokens as take equal bytes."""
        weighted: Array = loads[TOKENS] + self._gather_weight * loads[GATHERED]
        return weighted

    def even_s(self, num_micro_batches: int) -> Array:
        """(P,) seconds of the step's parts with all work spread evenly over all processes."""
        batch = self.rates.batch
        load = batch.added[:, 0].sum(axis=0)[:, None] / (batch.pool_size * num_micro_batches)
        even_s: Array = num_micro_batches * self.rates.seconds(load)[:, 0]
        return even_s

    def least_s(self, num_micro_batches: int) -> float:
        """About the seconds that no step undercuts: neither is it shorter than all work spread
        evenly, nor than any one sequence on its best place, with empty other micro-batches."""
        rates = self.rates
        alone_s = (rates.alone_s + rates.fixed_s).min(axis=1).max()
        others_s = (num_micro_batches - 1) * rates.least_s.sum()
        return float(max(self.even_s(num_micro_batches).sum(), alone_s + others_s))


def settings(
    batch: PoolBatch, budget_bytes: int | None, recompute_layers: Iterable[int]
) -> list[Setting]:
    """The settings in which the longest sequence has room."""
    model, pool_size, largest = batch.model, batch.pool_size, batch.sizes[-1]
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    share = model.shape.kv_share(largest) * largest
    """K,V that a process of the largest place keeps, over its own part."""
    whole = max((n for n in batch.sizes if model.shape.kv_share(n) * n == 1), default=1)
    longest = batch.added[np.argmax(batch.seq_lens)].T
    found = []
    for layers in recompute_layers:
        own, gathered = (
            fitting_tokens(
                model, budget, dp_size=1, sp_size=pool_size, recompute_layers=layers,
                place_size=size,
            )
            for size in (whole, largest)
        )  # fmt: skip
        # bytes grow on straight lines: what lies between two loads that fit does too
        weight = (own / max(1, gathered) - 1) / (share - 1) if share > 1 else 0.0
        setting = Setting(batch, layers, own, weight) if own else None
        if setting is not None and setting.held(longest).min() <= own:
            found.append(setting)
    return found


_ALIKE = 1e-9
"""Share of the tokens that a process can hold below which two are equal."""
_POWER = 96
"""Exponent of the norm that stands for a maximum: the larger, the nearer to it."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a sequence is: micro-batch, number of the size of its place, first process."""

    micro_batch: int
    kind: int
    first: int


Spots = dict[int, Spot]
"""Where each sequence is."""


class Division:
    """Sequences on spots; it is changed in place."""

    def __init__(self, setting: Setting, num_micro_batches: int) -> None:
        self.setting = setting
        self.rates = setting.rates
        self.spots: Spots = {}
        self._seconds: Array | None = None
        batch = setting.rates.batch
        self.loads = np.zeros((batch.added.shape[2], num_micro_batches, batch.pool_size))

    def put(self, seq_id: int, spot: Spot) -> None:
        self.spots[seq_id], self._seconds = spot, None
        self.loads[self._slots(spot)] += self.rates.batch.added[seq_id, spot.kind][:, None]

    def take(self, seq_id: int) -> Spot:
        """The spot that it leaves."""
        spot, self._seconds = self.spots.pop(seq_id), None
        self.loads[self._slots(spot)] -= self.rates.batch.added[seq_id, spot.kind][:, None]
        return spot

    def reset(self, spots: Spots) -> None:
        """To other spots of all sequences."""
        self.spots, self._seconds = {}, None
        self.loads[:] = 0.0
        for seq_id, spot in spots.items():
            self.put(seq_id, spot)

    def seconds(self) -> Array:
        """(P, M, W) of every slot."""
        if self._seconds is None:
            self._seconds = self.rates.seconds(self.loads)
        return self._seconds

    def step_s(self) -> float:
        return float(self.seconds().max(axis=2).sum())

    def norm_s(self) -> float:
        """The same with a norm in the place of every maximum over processes: it falls, too, where
        one of several that are about as slow gets faster."""
        return float(_norms(self.seconds()[:, None])[0])

    def best_spot(self, seq_id: int, but: Spot | None = None) -> tuple[Spot, float] | None:
        """The spot with the least norm for an absent sequence, and that norm; `but` is left out.
        None where no spot has room."""
        batch, before = self.rates.batch, self.seconds()
        loads = self.loads[:, None] + batch.added[seq_id].T[:, :, None, None]
        after = self.rates.seconds(loads)  # (P, Z, M, W)
        scale = after.max(axis=(1, 2, 3)).reshape(-1, 1, 1)
        powers = (before / scale) ** _POWER
        grown = (after / scale[:, None]) ** _POWER - powers[:, None]
        sums = powers.sum(axis=2, keepdims=True)
        now_s = scale * sums ** (1 / _POWER)
        held, room = self.setting.held(loads), self.setting.device_tokens * (1 + _ALIKE)
        best: tuple[Spot, float] | None = None
        for kind, size in enumerate(batch.sizes):
            there = sums + _by_place(grown[:, kind], size).sum(axis=-1)
            more_s = (scale * there ** (1 / _POWER) - now_s).sum(axis=0)
            more_s[_by_place(held[kind], size).max(axis=-1) > room] = np.inf
            if but is not None and but.kind == kind:
                more_s[but.micro_batch, but.first // size] = np.inf
            number, place = divmod(int(more_s.argmin()), more_s.shape[1])
            least_s = float(more_s[number, place])
            if np.isfinite(least_s) and (best is None or least_s < best[1]):
                best = Spot(number, kind, place * size), least_s
        return best and (best[0], best[1] + float(now_s.sum()))

    def swap_norms(self, seq_id: int, others: Sequence[int]) -> Array:
        """(N,) each if `seq_id` and one of the others changed spots; infinite where that has no
        room."""
        added, here = self.rates.batch.added, self.spots[seq_id]
        loads = np.repeat(self.loads[:, None], len(others), axis=1)
        for i, other in enumerate(others):
            there = self.spots[other]
            for spot, comes, goes in ((here, other, seq_id), (there, seq_id, other)):
                batch, first, kind = spot.micro_batch, spot.first, spot.kind
                change = added[comes, kind] - added[goes, kind]
                loads[:, i, batch, first : first + self.rates.batch.sizes[kind]] += change[:, None]
        most = self.setting.held(loads).max(axis=(1, 2))
        fits = most <= self.setting.device_tokens * (1 + _ALIKE)
        return np.where(fits, _norms(self.rates.seconds(loads)), np.inf)

    def swap(self, one: int, other: int) -> None:
        here, there = self.take(one), self.take(other)
        self.put(one, there)
        self.put(other, here)

    def _slots(self, spot: Spot) -> tuple[slice, int, slice]:
        stop = spot.first + self.rates.batch.sizes[spot.kind]
        return slice(None), spot.micro_batch, slice(spot.first, stop)


def _norms(seconds: Array) -> Array:
    """(P, N, M, W) seconds of N divisions -> (N,) the sums of their norms over processes."""
    most = np.maximum(seconds.max(axis=-1, keepdims=True), 1e-30)
    powers = ((seconds / most) ** _POWER).sum(axis=-1)
    norms: Array = (most[..., 0] * powers ** (1 / _POWER)).sum(axis=(0, 2))
    return norms


def _by_place(values: Array, size: int) -> Array:
    """(..., W) -> (..., W / size, size): the processes of every place of a size."""
    return values.reshape(*values.shape[:-1], -1, size)


_STEPS_PER_DOUBLING = 4
"""Numbers of tokens per device that are tried between one and twice as many."""
_TARGETS = tuple(1 + 0.02 * step for step in range(8))
"""Multiples of the mean seconds of a slot that are tried as a target."""


def greedy(division: Division) -> Iterator[Spots]:
    """Every sequence, the longest first, where the step's norm grows least; nothing where one
    finds no room."""
    division.reset({})
    lens = division.rates.batch.seq_lens
    for seq_id in sorted(range(len(lens)), key=lambda i: -lens[i]):
        found = division.best_spot(seq_id)
        if found is None:
            return
        division.put(seq_id, found[0])
    yield dict(division.spots)


def by_targets(division: Division) -> Iterator[Spots]:
    """Dual approximation (Turek, Ludwig, Tiwari 1994): if no process may take longer than a target,
    every sequence has a smallest place; those on large places go first, to where they end earliest.
    Aligned places of falling sizes leave no holes."""
    rates = division.rates
    num_slots = division.loads.shape[1] * division.loads.shape[2]
    mean_s = float(rates.alone_s[:, 0].sum()) / num_slots
    seen: set[tuple[int, ...]] = set()
    for target in _TARGETS:
        kinds = _smallest_kinds(division, target * mean_s)
        if tuple(kinds) in seen:
            continue
        seen.add(tuple(kinds))
        found = earliest_first(division, kinds)
        if found is not None:
            yield found


def uniform(division: Division) -> Iterator[Spots]:
    """All sequences on places of one size, as static sequence parallelism has them."""
    batch = division.rates.batch
    ways = (earliest_first(division, [k] * len(batch.seq_lens)) for k in range(len(batch.sizes)))
    yield from (spots for spots in ways if spots is not None)


def by_length(division: Division) -> Iterator[Spots]:
    """Sizes by length alone, as Megatron-Core's hybrid context parallelism chooses them: the next
    power of two of length / N, for numbers N of tokens per device that give other sizes, those
    first whose sequences take least: as long as the others may be faster, and only what fits."""
    rates, batch = division.rates, division.rates.batch
    lens, last = np.array(batch.seq_lens), len(batch.sizes) - 1
    queue: dict[tuple[int, ...], float] = {}
    for step in range(_STEPS_PER_DOUBLING * last + 1):
        most = lens.max() / 2 ** (step / _STEPS_PER_DOUBLING)
        kinds = np.ceil(np.log2(lens / most)).clip(0, last).astype(int)
        alone_s = rates.alone_s[range(len(lens)), kinds]
        spread_s = (alone_s * np.array(batch.sizes)[kinds]).sum() / batch.pool_size
        queue[tuple(kinds.tolist())] = max(spread_s, (alone_s + rates.fixed_s[kinds]).max())
    best_s = inf
    for sizes, bound_s in sorted(queue.items(), key=lambda one: one[1]):
        if bound_s >= best_s:
            break
        found = earliest_first(division, sizes)
        if found is not None:
            division.reset(found)
            best_s = min(best_s, division.step_s())
            yield found


def _smallest_kinds(division: Division, target_s: float) -> list[int]:
    """For each sequence the number of the smallest size that holds it within the target."""
    rates, setting = division.rates, division.setting
    short = rates.fixed_s + rates.alone_s <= target_s
    fits = setting.held(rates.batch.added.transpose(2, 0, 1)) <= setting.device_tokens
    last = len(rates.batch.sizes) - 1
    chosen = np.where((short & fits).any(axis=1), (short & fits).argmax(axis=1), last)
    kinds: list[int] = chosen.tolist()
    return kinds


def earliest_first(division: Division, kinds: Sequence[int]) -> Spots | None:
    """Sequences on places of given sizes, or larger ones where those have no room, the largest
    places first and of those the longest work, each to where it ends earliest; None where one finds
    no room."""
    rates, setting = division.rates, division.setting
    held = setting.held(rates.batch.added.transpose(2, 0, 1))
    _, num_batches, pool_size = division.loads.shape
    busy_s, tokens = np.zeros((num_batches, pool_size)), np.zeros((num_batches, pool_size))
    work_s = rates.alone_s[range(len(kinds)), kinds]
    spots: Spots = {}
    for seq_id in sorted(range(len(kinds)), key=lambda i: (-kinds[i], -work_s[i])):
        for kind in range(kinds[seq_id], len(rates.batch.sizes)):
            size, share = rates.batch.sizes[kind], held[seq_id, kind]
            until = busy_s.reshape(num_batches, -1, size).max(axis=2)
            full = tokens.reshape(num_batches, -1, size).max(axis=2) + share
            until[full > setting.device_tokens] = np.inf
            batch, place = divmod(int(until.argmin()), until.shape[1])
            if np.isfinite(until[batch, place]):
                where = batch, slice(place * size, (place + 1) * size)
                busy_s[where] += rates.alone_s[seq_id, kind]
                tokens[where] += share
                spots[seq_id] = Spot(batch, kind, place * size)
                break
        else:
            return None
    return spots


_NUM_TRIED = 6
"""Sequences whose moves are compared for every change."""
_NUM_PARTNERS = 16
"""Sequences that one is tried against in a swap."""
_TENURE = 6
"""Changes, at least, for which a sequence that has moved stays; at most nearly twice as many."""


def improve(division: Division, num_tries: int) -> float:
    """Seconds of the step of the best division that is found with so many tries, each of one
    sequence's moves or swaps; `division` is that one afterwards."""
    draw = random.Random(0)
    best_s, best_spots = division.step_s(), dict(division.spots)
    stays: dict[int, int] = {}
    """Until which change each sequence that has moved stays."""
    tried = change = 0
    while tried < num_tries:
        change += 1
        free = [i for i in _slowest(division) if stays.get(i, 0) < change] or [*division.spots]
        chosen = draw.sample(free, min(_NUM_TRIED, len(free)))
        tried += len(chosen) + 1
        for seq_id in _change(division, chosen, stays, change):
            stays[seq_id] = change + _TENURE + draw.randrange(_TENURE)
        step_s = division.step_s()
        if step_s < best_s:
            best_s, best_spots = step_s, dict(division.spots)
    division.reset(best_spots)
    return best_s


def _change(
    division: Division, chosen: list[int], stays: dict[int, int], change: int
) -> tuple[int, ...]:
    """Makes the best of the moves of the chosen sequences and of the swaps of the first one;
    returns those that have moved."""
    least_s = np.inf
    best: tuple[int, Spot] | None = None
    for seq_id in chosen:
        spot = division.take(seq_id)
        found = division.best_spot(seq_id, but=spot)
        division.put(seq_id, spot)
        if found is not None and found[1] < least_s:
            least_s, best = found[1], (seq_id, found[0])
    others = [i for i in _partners(division, chosen[0]) if stays.get(i, 0) < change]
    norms_s = division.swap_norms(chosen[0], others)
    if others and norms_s.min() < least_s:
        division.swap(chosen[0], partner := others[norms_s.argmin()])
        return chosen[0], partner
    if best is None:
        return ()
    division.take(best[0])
    division.put(*best)
    return best[:1]


def _slowest(division: Division) -> list[int]:
    """Sequences on the slowest process of any part of any micro-batch, most work first."""
    rates, slowest = division.rates, division.seconds().argmax(axis=2)
    slots = {(batch, int(slot)) for row in slowest for batch, slot in enumerate(row)}
    found = [
        seq_id
        for seq_id, spot in division.spots.items()
        if any(
            (spot.micro_batch, process) in slots
            for process in range(spot.first, spot.first + rates.batch.sizes[spot.kind])
        )
    ]
    return sorted(found, key=lambda i: -rates.alone_s[i, division.spots[i].kind])


def _partners(division: Division, seq_id: int) -> list[int]:
    """The sequences whose exchange with `seq_id` would make both places' seconds most alike."""
    rates, here = division.rates, division.spots[seq_id]
    busy_s = division.seconds().sum(axis=0)
    by_kind = [_by_place(busy_s, size).max(axis=-1) for size in rates.batch.sizes]
    at = np.array([(s.micro_batch, s.kind, s.first) for _, s in sorted(division.spots.items())])
    busy_there = np.array([by_kind[k][m, f // rates.batch.sizes[k]] for m, k, f in at.tolist()])
    kinds, alone_s, ids = at[:, 1], rates.alone_s, range(len(at))
    gains_s = alone_s[seq_id, here.kind] - alone_s[:, here.kind]
    costs_s = alone_s[seq_id, kinds] - alone_s[ids, kinds]
    after_s = np.abs(busy_there[seq_id] - gains_s - busy_there - costs_s)
    after_s[(gains_s <= 0) | (at == at[seq_id]).all(axis=1)] = np.inf
    nearest: list[int] = after_s.argsort(kind="stable")[:_NUM_PARTNERS].tolist()
    return [other for other in nearest if np.isfinite(after_s[other])]


_MOST_TRIED = 2**20
"""Loads of processes that are looked at: about a second."""


def fastest_spots(division: Division, step_s: float) -> Spots | None:
    """The spots of the fastest division in one micro-batch; empty where none takes less than
    `step_s` seconds, None where there are too many to know."""
    setting, batch = division.setting, division.rates.batch
    width, even_s = batch.pool_size, setting.even_s(1)[:, None]
    places = [
        Spot(0, kind, first)
        for kind, size in enumerate(batch.sizes)
        for first in range(0, width, size)
    ]
    loads, taken = np.zeros((batch.added.shape[2], 1, width)), np.zeros((1, 0), dtype=int)
    steps_s, left = np.zeros(1), _MOST_TRIED
    order = sorted(range(len(batch.seq_lens)), key=lambda i: -batch.seq_lens[i])
    for seq_id in order:
        grown: list[tuple[Array, NDArray[np.int64], Array]] = []
        for number, spot in enumerate(places):
            rows = _first_alike(loads, batch.sizes, spot)
            left -= width * int(rows.sum())
            if left < 0:
                return None
            after = loads[:, rows]
            there = slice(spot.first, spot.first + batch.sizes[spot.kind])
            after[..., there] += batch.added[seq_id, spot.kind][:, None, None]
            # more load is never faster, and no part of a step is faster than all work spread evenly
            parts_s = np.maximum(setting.rates.seconds(after).max(axis=2), even_s).sum(axis=0)
            fits = setting.held(after).max(axis=1) <= setting.device_tokens
            kept = fits & (parts_s < step_s)
            own = np.full((int(kept.sum()), 1), number)
            grown.append((after[:, kept], np.hstack([taken[rows][kept], own]), parts_s[kept]))
        loads = np.concatenate([one[0] for one in grown], axis=1)
        taken = np.concatenate([one[1] for one in grown])
        steps_s = np.concatenate([one[2] for one in grown])
        if not len(taken):
            return {}
    fastest: list[int] = taken[steps_s.argmin()].tolist()
    return {seq_id: places[number] for seq_id, number in zip(order, fastest, strict=True)}


def _first_alike(loads: Array, sizes: Sequence[int], spot: Spot) -> NDArray[np.bool_]:
    """(N,) whether no place before `spot` is like it: neither its own loads nor those of a larger
    place that it is in are those of a neighbour within the next larger one."""
    first = np.ones(loads.shape[1], dtype=bool)
    for size, larger in pairwise((*sizes[spot.kind :], loads.shape[2])):
        start = spot.first // size * size
        for other in range(spot.first // larger * larger, start, size):
            alike = loads[..., other : other + size] == loads[..., start : start + size]
            first &= ~alike.all(axis=(0, 2))
    return first


def plan_of(
    batch: PoolBatch, spots: Spots, recompute_layers: int, budget_bytes: int | None
) -> ChunkPlan:
    """The checked plan of one rank, the pool; a chunk for every micro-batch, most tokens first."""
    slices: dict[int, list[Slice]] = {}
    for seq_id, spot in sorted(spots.items()):
        place = Place(spot.first, batch.sizes[spot.kind])
        piece = Slice(seq_id, 0, batch.seq_lens[seq_id], place)
        slices.setdefault(spot.micro_batch, []).append(piece)
    chunks = sorted(
        (Chunk(by_place(own)) for own in slices.values()), key=lambda chunk: -chunk.num_tokens
    )
    plan = chunk_by_chunk(
        batch.seq_lens, [chunks], num_layers=batch.model.shape.num_layers,
        sp_size=batch.pool_size, recompute_layers=recompute_layers,
    )  # fmt: skip
    check(plan, batch.model.memory(budget_bytes))
    return plan


def nothing_fits(batch: PoolBatch, recompute_layers: int, budget_bytes: int | None) -> ConfigError:
    """The error for a longest sequence that no place holds."""
    model, largest = batch.model, batch.sizes[-1]
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    return does_not_fit(
        batch.seq_lens, model, budget, dp_size=batch.pool_size // largest, sp_size=largest,
        recompute_layers=recompute_layers,
    )  # fmt: skip
