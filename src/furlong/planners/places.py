"""Planner `places` (not from a paper): whole sequences in micro-batches, each sequence on a
sequence-parallel group that is chosen for it.

This group is called the place of the sequence. It is one process of a pool, or an aligned run of
processes. A micro-batch runs on all processes at once, and is as slow as its slowest process.

A setting is a number of checkpointed layers. It determines how many tokens a process can hold at a
time, and so the least number of micro-batches. Settings are tried by rising lower bound on step
time. A division is a choice of micro-batch and place for each sequence. For each setting, dual
approximation and a greedy heuristic first make some divisions. Then tabu search improves the best
of them.

FlexSP (Wang et al., ASPLOS 2025) and Megatron-Core's hybrid context parallelism choose places, too:
FlexSP with disjoint groups per micro-batch, Megatron-Core by length alone. Here places are chosen
by predicted time. The load of a process is a vector (tokens, attended keys, ...), the sum over its
sequences. So one call of `pass_seconds` predicts the times of many placements.

    F entries of a load, K sequences, Z sizes of places, P parts of a step's passes,
    M micro-batches, W processes, N sequences that are moved in one call
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from furlong.cost.machine import AttentionCall
from furlong.cost.memory import gathered_tokens
from furlong.cost.model import CostModel
from furlong.cost.seconds import (
    Array,
    ChunkTable,
    StageSeconds,
    calls_of,
    cell_parts,
    chunk_table,
)
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
from furlong.planners.question import Candidate, Space

_LARGEST_POOL = 128
"""Most devices of a pool: placing sequences on more takes minutes."""
_NUM_IMPROVED = 8
"""Number of best initial divisions that are improved by `_FEW_CHANGES`."""
_MORE = 1.3
"""Multiple of the fewest micro-batches that is tried as well."""
_FEW_CHANGES = 60
_NUM_CHANGES = 600
"""Number of moves that then improve the best division."""
_NUM_CHANGES_OF_A_STEP = 20
"""The same during training: many more would delay steps, and gain a percent."""
_MOST_SPOTS = 2**18
"""Most positions (sequences * processes * micro-batches) for which the greedy heuristic runs,
unless the others find no division."""


def candidates(space: Space) -> Iterator[Candidate]:
    """Yield one candidate for a pool of several devices without a pipeline; its planner ensures
    that its plans fit in memory."""
    layout, limit_bytes = space.layout, space.question.limits.limit_bytes
    if layout.pp == 1 < layout.sp <= _LARGEST_POOL:
        plan_of = partial(
            plan_places, model=space.model, pool_size=layout.sp, budget_bytes=limit_bytes,
            num_changes=_NUM_CHANGES_OF_A_STEP,
        )  # fmt: skip
        yield Candidate("places", space, ChunkOptions(), 0.0, plan_of)


def plan_places(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    pool_size: int,
    budget_bytes: int | None = None,
    num_changes: int = _NUM_CHANGES,
) -> ChunkPlan:
    """Return a checked plan of one rank, a pool of `pool_size` devices. The planner chooses the
    number of checkpointed layers itself.

    `budget_bytes`: memory of a device; None: the machine's. `num_changes`: number of moves of
    sequences by which the best division is improved. Raises ConfigError if the longest sequence
    fits in memory on no group of the devices.
    """
    refuse_unusable(seq_lens)
    batch = PoolBatch.of(seq_lens, model, pool_size)
    num_layers = model.shape.num_layers
    starts = _starts(settings(batch, budget_bytes, range(num_layers + 1)))
    if not starts:
        raise does_not_fit(
            seq_lens, model, budget_bytes, sp_size=pool_size, recompute_layers=num_layers
        )
    for start in starts:
        improve(start, min(_FEW_CHANGES, num_changes))
    best = min(starts, key=Division.step_s)
    improve(best, num_changes)
    return plan_of(batch, best.spots, best.setting.recompute_layers, budget_bytes)


def _starts(found: Iterable[Setting]) -> list[Division]:
    """Return a few initial divisions of sequences, the fastest first.

    Settings (numbers of checkpointed layers) are tried in the order of their lower bounds on step
    time, as long as the bound is below the fastest division so far. Each setting is tried with the
    fewest possible micro-batches, and with more, since smaller ones balance better.
    """
    starts: list[Division] = []
    for setting in sorted(found, key=lambda setting: setting.least_s(setting.fewest)):
        last, is_first = len(setting.batch.seq_lens), True
        following = iter(range(setting.fewest, last + 1))
        while (count := next(following, last + 1)) <= last:
            if starts and setting.least_s(count) >= starts[0].step_s():
                break
            enough_s = starts[-1].step_s() if len(starts) == _NUM_IMPROVED else inf
            own = starts_of(setting, count, enough_s)
            starts = sorted(starts + own, key=Division.step_s)[:_NUM_IMPROVED]
            if own and is_first:
                following, is_first = iter([ceil(count * _MORE)]), False
    return starts


def starts_of(setting: Setting, num_micro_batches: int, enough_s: float = inf) -> list[Division]:
    """Return initial divisions of sequences for tabu search, at most two by each heuristic below.
    Tabu search ends in different optima from different heuristics.

    1. Sequence-parallel groups of one size for all sequences (static sequence parallelism).
    2. Dual approximation (Turek, Ludwig, Tiwari 1994), once with a target for the seconds of a
       process, once with one for its tokens: each sequence takes the smallest group that stays
       within the target.
    3. Greedy, which makes one division. It is left out of large batches if others exist.
    """
    batch, alone_s = setting.batch, setting.alone_s
    lens, sizes = np.array(batch.seq_lens), np.array(batch.sizes)
    mean_s = alone_s[:, 0].sum() / (num_micro_batches * batch.pool_size)
    most_tokens = [lens.max() / 2 ** (step / 4) for step in range(4 * len(sizes))]
    found: list[Division] = []
    for ways in (
        [(kind,) * len(lens) for kind in range(len(sizes))],
        [smallest(setting, setting.fixed_s + alone_s <= n * mean_s) for n in _TARGETS],
        [smallest(setting, lens[:, None] / sizes <= n) for n in most_tokens],
    ):
        tried = (earliest_first(setting, num_micro_batches, kinds) for kinds in dict.fromkeys(ways))
        own = [division for division in tried if division is not None]
        found += sorted(own, key=Division.step_s)[:2]
    num_spots = len(lens) * batch.pool_size * num_micro_batches
    if not found or num_spots <= _MOST_SPOTS:
        found += greedy(setting, num_micro_batches, enough_s if found else inf)
    return found


TOKENS, GATHERED = range(2)
"""Entries of a load that do not depend on sizes or windows: tokens, and tokens whose K,V are
gathered in addition to the process's own (`cost.memory.gathered_tokens`)."""
_NUM_PLAIN = 2
_A_LITTLE = 1e-6
"""Tokens of a process with next to no work, which shows its fixed costs."""


@dataclass(frozen=True)
class PoolBatch:
    """Whole sequences that are to be assigned to sequence-parallel groups of a pool."""

    seq_lens: tuple[int, ...]
    model: CostModel
    pool_size: int
    sizes: tuple[int, ...]
    """Sizes of places, ascending from 1."""
    added: Array
    """(K, Z, F): load that each sequence adds to each process of a place of each size."""

    @classmethod
    def of(cls, seq_lens: Sequence[int], model: CostModel, pool_size: int) -> PoolBatch:
        sizes = place_sizes(pool_size)
        pieces = [Slice(0, 0, n, Place(0, size)) for n in seq_lens for size in sizes]
        table = chunk_table(
            [Chunk((piece,)) for piece in pieces],
            model.shape, pool_size, model.hardware.tile_tokens,
        )  # fmt: skip
        gathered = [gathered_tokens(piece, 0, model.shape) for piece in pieces]
        counts = np.array([[piece.place.size == size for piece in pieces] for size in sizes])
        keys = [
            own * (table.local_keys if size == 1 else table.shared_keys)[window, "square"][0]
            for size, own in zip(sizes, counts, strict=True)
            for window in dict.fromkeys(model.shape.windows)
        ]
        exchanged = [each[0] for each in table.exchanged_tokens.values()]
        rows = [table.tokens[0], gathered, *counts, *exchanged, *keys]
        added = np.stack(rows, axis=-1).reshape(len(seq_lens), len(sizes), len(rows))
        return cls(tuple(seq_lens), model, pool_size, sizes, added)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.model.shape.windows))

    @property
    def exchange_rows(self) -> slice:
        """Slice of a load vector (F numbers) with the tokens that a process exchanges by
        all-to-all, one entry for each group size above 1. The entries before this slice are tokens,
        tokens of gathered K,V, and the number of sequences on groups of each size. The entries
        after it are attended keys."""
        first = _NUM_PLAIN + len(self.sizes)
        return slice(first, first + len(self.sizes) - 1)

    @cached_property
    def passes(self) -> tuple[StageSeconds, StageSeconds]:
        """(exact, additive): two predictors of the seconds of passes.

        `exact` counts everything. `additive` leaves out minimum times (launches, gathered weights),
        and reads only as many experts as one token uses. So its seconds of several sequences on a
        process are about the sum of the seconds of each.
        """
        model, layout = self.model, Layout(sp=self.pool_size)
        floorless = replace(
            model,
            hardware=replace(model.hardware, layer_launch_s=0.0, pass_launch_s=0.0),
            shape=replace(
                model.shape,
                layers=tuple(replace(n, num_experts=n.num_active) for n in model.shape.layers),
            ),
        )
        stages, ranks = (model.shape.num_layers,), (0,)
        return (
            model.stage_seconds(stages, 0, layout=layout, ranks=ranks),
            floorless.stage_seconds(stages, 0, layout=layout, ranks=ranks, free=["gathers"]),
        )

    def table(self, loads: Array) -> ChunkTable:
        """Return loads as a `ChunkTable`, from which the cost model computes seconds. `loads`: (F,
        ...), the load (tokens, attended keys, ...) of each of many processes."""
        exchanged, shape = self.exchange_rows, self.model.shape
        counts, windows = loads[_NUM_PLAIN : exchanged.start], self.windows
        keys = loads[exchanged.stop :].reshape(len(counts), len(windows), *counts.shape[1:])
        packed = np.where(counts[:, None] > 1, keys, 0.0)  # several slices of a place share a call
        calls: dict[AttentionCall, Array] = {"packed": packed, "square": keys - packed}
        local, shared = (
            {(w, call): own[of, i].sum(axis=0) for call, own in calls.items()
             for i, w in enumerate(windows)}
            for of in (slice(1), slice(1, None))
        )  # fmt: skip
        times = [calls_of(shape, size) for size in self.sizes]
        return ChunkTable(
            tokens=loads[TOKENS],
            num_slices=np.tensordot(times, counts, 1),
            exchanged_tokens=dict(zip(self.sizes[1:], loads[exchanged], strict=True)),
            local_keys=local,
            shared_keys=shared,
            prefix_tokens={},
        )


class Setting:
    """A number of checkpointed layers, with the tokens that a process can hold if so many layers
    are checkpointed (`device_tokens`), and predictions of the seconds of a pool's batch."""

    def __init__(
        self,
        batch: PoolBatch,
        recompute_layers: int,
        device_tokens: float = inf,
        gather_weight: float = 0.0,
    ) -> None:
        self.batch = batch
        self.recompute_layers = recompute_layers
        self.device_tokens = device_tokens
        self._gather_weight = gather_weight
        self._parts = sum(cell_parts((batch.model.shape.num_layers,), 0, recompute_layers), ())
        self.fewest = max(1, ceil(sum(batch.seq_lens) / (batch.pool_size * device_tokens)))
        """Fewest micro-batches that can hold all tokens."""
        added = batch.added.transpose(2, 0, 1)
        self.fits: NDArray[np.bool_] = self.held(added) <= device_tokens
        """(K, Z): whether each sequence fits on a place of each size."""
        little = np.where(batch.added[0] > 0, _A_LITTLE, 0.0).T
        little[batch.exchange_rows.stop :] = 0.0  # no keys
        self.floor_s: Array = self.seconds(little)[:, 0]
        """(P,): least seconds of a micro-batch, even without work."""
        self.fixed_s: Array = self.seconds(little, floors=False).sum(axis=0)
        """(Z,): seconds of a process with any work on a place, before its first token and without
        minimum times."""
        self.alone_s: Array = self.seconds(added, floors=False).sum(axis=0) - self.fixed_s
        """(K, Z): seconds that each sequence adds on each process of its place."""

    def seconds(self, loads: Array, *, floors: bool = True) -> Array:
        """Return the seconds (P, ...) of each part of the passes on processes with loads (F, ...).
        `floors`: whether minimum times, such as launches, count."""
        seconds = self.batch.passes[0 if floors else 1]
        return seconds.pass_seconds(self._parts, self.batch.table(loads))

    def held(self, loads: Array) -> Array:
        """Return how many of its `device_tokens` a process with loads (F, ...) uses. Gathered K,V
        count as the number of tokens with equal bytes."""
        weighted: Array = loads[TOKENS] + self._gather_weight * loads[GATHERED]
        return weighted

    def least_s(self, num_micro_batches: int) -> float:
        """Return about the least seconds that a step of this many micro-batches takes. Two times
        are computed, and the larger is returned: that of all work spread evenly over all processes;
        and that of the slowest sequence on the group that is best for it, while all other
        micro-batches are empty."""
        batch = self.batch
        load = batch.added[:, 0].sum(axis=0)[:, None] / (batch.pool_size * num_micro_batches)
        even_s = num_micro_batches * self.seconds(load).sum()
        alone_s = (self.alone_s + self.fixed_s).min(axis=1).max()
        return float(max(even_s, alone_s + (num_micro_batches - 1) * self.floor_s.sum()))


def settings(
    batch: PoolBatch, budget_bytes: int | None, recompute_layers: Iterable[int]
) -> list[Setting]:
    """Return a setting for each number of checkpointed layers with which the longest sequence fits
    in memory; stop at the first with which all sequences together fit on one process."""
    model, shape, pool_size = batch.model, batch.model.shape, batch.pool_size
    memory = model.memory(budget_bytes)
    gathering = [n for n in batch.sizes if shape.kv_share(n) * n > 1]
    whole = max(n for n in batch.sizes if n not in gathering)
    found = []
    for layers in recompute_layers:
        own, *gathered = (
            fitting_tokens(
                memory, dp_size=1, sp_size=pool_size, recompute_layers=layers, place_size=size
            )
            for size in (whole, *gathering)
        )  # fmt: skip
        # bytes are linear in loads, so loads between two that fit also fit
        weights = [
            (own / max(1, tokens) - 1) / (shape.kv_share(size) * size - 1)
            for size, tokens in zip(gathering, gathered, strict=True)
        ]
        if own:
            setting = Setting(batch, layers, own, max(weights, default=0.0))
            if setting.fits[np.argmax(batch.seq_lens)].any():
                found.append(setting)
            if setting.held(batch.added.max(axis=1).T).sum() <= setting.device_tokens:
                break  # more room gains nothing
    return found


_ALIKE = 1e-9
"""Relative tolerance of the tokens that a process can hold."""
_POWER = 96
"""Exponent of the p-norm that approximates a maximum."""


Scalar = TypeVar("Scalar", bound=np.generic)


class Spot(NamedTuple):
    """Where a sequence runs: its micro-batch, the index of the size of its sequence-parallel group,
    and the group's first process."""

    micro_batch: int
    kind: int
    first: int


Spots = Mapping[int, Spot]
"""seq_id -> its spot."""


class Division:
    """An assignment of sequences to spots (micro-batch and sequence-parallel group), changed in
    place. A slot is one process in one micro-batch."""

    def __init__(self, setting: Setting, num_micro_batches: int, spots: Spots) -> None:
        self.setting = setting
        num_sums, pool_size = setting.batch.added.shape[2], setting.batch.pool_size
        self.loads = np.zeros((num_sums, num_micro_batches, pool_size))
        self._seconds: Array | None = None
        self.reset(spots)

    def reset(self, spots: Spots) -> None:
        """Replace the whole assignment by `spots`."""
        self.spots, self._seconds = dict(spots), None
        self.loads[:] = 0.0
        for seq_id, spot in spots.items():
            self._change(self.loads, seq_id, spot)

    def put(self, seq_id: int, spot: Spot) -> None:
        """Move a sequence to `spot`, whether or not it has a spot already."""
        self._seconds = None
        if seq_id in self.spots:
            self._change(self.loads, seq_id, self.spots[seq_id], -1)
        self.spots[seq_id] = spot
        self._change(self.loads, seq_id, spot)

    def _change(self, loads: Array, seq_id: int, spot: Spot, times: int = 1) -> None:
        batch = self.setting.batch
        slots = slice(spot.first, spot.first + batch.sizes[spot.kind])
        loads[:, spot.micro_batch, slots] += times * batch.added[seq_id, spot.kind][:, None]

    def seconds(self) -> Array:
        """Return the seconds (P, M, W) of each part of the passes, by micro-batch and process."""
        if self._seconds is None:
            self._seconds = self.setting.seconds(self.loads)
        return self._seconds

    def step_s(self) -> float:
        return float(self.seconds().max(axis=2).sum())

    def moves(self, seq_ids: Sequence[int]) -> list[tuple[float, Spot]]:
        """Return, for each of `seq_ids`, the best move of this sequence alone, as (norm, spot).
        `spot` is where the sequence would move: the best spot other than its present one, if it has
        one. `norm` is the step's norm after the move; infinity if no spot has room.

        The norm is about the step time. It has a p-norm over processes where the step time has the
        maximum. So it also falls if only one of several equally slow processes gets faster.
        """
        batch = self.setting.batch
        before = np.repeat(self.loads[:, None], len(seq_ids), axis=1)  # (F, N, M, W)
        for i, seq_id in enumerate(seq_ids):
            if seq_id in self.spots:
                self._change(before[:, i], seq_id, self.spots[seq_id], -1)
        added = batch.added[seq_ids].transpose(2, 0, 1)  # (F, N, Z)
        nothing = np.zeros((*added.shape[:2], 1))
        # (F, N, 1 + Z, M, W): without the sequence, and with it on a place of each size
        loads = before[:, :, None] + np.concatenate([nothing, added], axis=2)[..., None, None]
        seconds, after = self.setting.seconds(loads), loads[:, :, 1:]
        before_s, after_s = seconds[:, :, 0], seconds[:, :, 1:]
        scale = after_s.max(axis=(2, 3, 4))[..., None, None]  # (P, N, 1, 1)
        powers = (before_s / scale) ** _POWER  # (P, N, M, W)
        grown = (after_s / scale[..., None]) ** _POWER - powers[:, :, None]  # (P, N, Z, M, W)
        sums = powers.sum(axis=-1, keepdims=True)
        now_s = scale * sums ** (1 / _POWER)  # (P, N, M, 1)
        fits = self.have_room(after)
        best = [(inf, Spot(0, 0, 0))] * len(seq_ids)
        for kind, size in enumerate(batch.sizes):
            there = sums + _by_place(grown[:, :, kind], size).sum(axis=-1)
            more_s = (scale * there ** (1 / _POWER) - now_s).sum(axis=0)  # (N, M, W / size)
            more_s[~_by_place(fits[:, kind], size).all(axis=-1)] = inf
            for i, seq_id in enumerate(seq_ids):
                own = self.spots.get(seq_id)
                if own is not None and own.kind == kind:
                    more_s[i, own.micro_batch, own.first // size] = inf
            num_places = more_s.shape[2]
            flat_s = more_s.reshape(len(seq_ids), -1)
            at = flat_s.argmin(axis=1)
            for i, least_s in enumerate(flat_s[range(len(at)), at].tolist()):
                number, place = divmod(int(at[i]), num_places)
                best[i] = min(best[i], (least_s, Spot(number, kind, place * size)))
        norms_s = now_s.sum(axis=(0, 2, 3)).tolist()
        # compared by differences, most of which are below the norm's floating-point precision
        return [(now + more, spot) for now, (more, spot) in zip(norms_s, best, strict=True)]

    def have_room(self, loads: Array) -> NDArray[np.bool_]:
        """Return, as an array (...), whether a process with loads (F, ...) has enough memory."""
        return self.setting.held(loads) <= self.setting.device_tokens * (1 + _ALIKE)

    def slowest(self) -> list[int]:
        """Return the sequences on the slowest process of any part of a micro-batch's passes."""
        slots = {(m, int(w)) for row in self.seconds().argmax(axis=2) for m, w in enumerate(row)}
        sizes = self.setting.batch.sizes
        return [
            seq_id
            for seq_id, (micro_batch, kind, first) in self.spots.items()
            if any((micro_batch, w) in slots for w in range(first, first + sizes[kind]))
        ]


def _by_place(values: NDArray[Scalar], size: int) -> NDArray[Scalar]:
    """Reshape (..., W) to (..., W / size, size), so that the W processes are in groups of
    `size`."""
    return values.reshape(*values.shape[:-1], -1, size)


Kinds = tuple[int, ...]
"""For each sequence, the index of its place's size."""
_TARGETS = tuple(1 + 0.02 * step for step in range(8))
"""Multiples of the mean seconds of a slot that are tried as targets."""


def greedy(setting: Setting, num_micro_batches: int, enough_s: float = inf) -> list[Division]:
    """Assign each sequence, the longest first, to the spot with the least norm (`Division.moves`).
    Return [division], or [] if a sequence does not fit or the step takes more than `enough_s`."""
    division = Division(setting, num_micro_batches, {})
    longest_first = np.argsort(-np.array(setting.batch.seq_lens), kind="stable").tolist()
    for number, seq_id in enumerate(longest_first):
        if number % 4 == 0 and division.step_s() > enough_s:
            return []
        ((norm_s, spot),) = division.moves([seq_id])
        if norm_s == inf:
            return []
        division.put(seq_id, spot)
    return [division]


def smallest(setting: Setting, is_short: NDArray[np.bool_]) -> Kinds:
    """Return the index of a group size for each sequence: the smallest size that fits in memory and
    satisfies `is_short`, or else the largest size. `is_short`: (K, Z), whether each sequence is
    short enough (in seconds or tokens) on a group of each size."""
    fits = is_short & setting.fits
    last = len(setting.batch.sizes) - 1
    return tuple(np.where(fits.any(axis=1), fits.argmax(axis=1), last).tolist())


def earliest_first(setting: Setting, num_micro_batches: int, kinds: Kinds) -> Division | None:
    """Return a division that assigns each sequence to the group of processes where it ends
    earliest, or None if a sequence does not fit in memory. `kinds`: index of each sequence's group
    size; if no group of this size has room, larger sizes are tried. Sequences on larger groups come
    first, then those with more work: aligned groups of falling sizes leave no gaps."""
    batch, num_kinds = setting.batch, len(setting.batch.sizes)
    held = setting.held(batch.added.transpose(2, 0, 1)).tolist()
    alone_s = setting.alone_s.tolist()
    busy_s, tokens = np.zeros((2, num_micro_batches, batch.pool_size))
    work_s = [own[kind] for own, kind in zip(alone_s, kinds, strict=True)]
    spots: dict[int, Spot] = {}
    size = 0
    for seq_id in sorted(range(len(kinds)), key=lambda i: (-kinds[i], -work_s[i])):
        for kind in range(kinds[seq_id], num_kinds):
            if size != batch.sizes[kind]:
                size = batch.sizes[kind]
                until, full = (_by_place(n, size).max(axis=2).ravel() for n in (busy_s, tokens))
                fullest = full.max()
            more_s, more_tokens, free = alone_s[seq_id][kind], held[seq_id][kind], until
            if fullest + more_tokens > setting.device_tokens:
                free = np.where(full + more_tokens > setting.device_tokens, inf, until)
            place = int(free.argmin())
            if free[place] < inf:
                until[place] += more_s
                full[place] += more_tokens
                fullest = max(fullest, full[place])
                number, place = divmod(place, batch.pool_size // size)
                slots = slice(place * size, (place + 1) * size)
                busy_s[number, slots] += more_s
                tokens[number, slots] += more_tokens
                spots[seq_id] = Spot(number, kind, place * size)
                break
        else:
            return None
    return Division(setting, num_micro_batches, spots)


_NUM_TRIED = 6
"""Number of sequences whose moves are compared for each change."""
_TENURE = 6
"""Least number of changes for which a moved sequence stays (tabu); at most nearly twice as many."""


def improve(division: Division, num_changes: int) -> None:
    """Improve a division by tabu search, and keep the best assignment. Each of `num_changes`
    changes is the best move of a few sequences on the slowest processes."""
    draw = random.Random(0)
    best_s, best = division.step_s(), dict(division.spots)
    stays: dict[int, int] = {}
    """seq_id -> last change during which it may not move."""
    for change in range(num_changes):
        free = [i for i in division.slowest() if stays.get(i, -1) < change] or [*division.spots]
        chosen = draw.sample(free, min(_NUM_TRIED, len(free)))
        moves = zip(division.moves(chosen), chosen, strict=True)
        (least_s, spot), seq_id = min(moves, key=lambda move: move[0][0])
        if least_s < inf:
            division.put(seq_id, spot)
            stays[seq_id] = change + _TENURE + draw.randrange(_TENURE)
        if division.step_s() < best_s:
            best_s, best = division.step_s(), dict(division.spots)
    division.reset(best)


def plan_of(
    batch: PoolBatch, spots: Spots, recompute_layers: int, budget_bytes: int | None
) -> ChunkPlan:
    """Return the checked plan of one rank, the pool. Each micro-batch is a chunk; those with most
    tokens come first."""
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
