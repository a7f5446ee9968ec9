"""FlexSP: sequence-parallel groups of different sizes side by side; a baseline as an estimate.

FlexSP (Wang et al., ASPLOS 2025, as InfiniPipe describes it) divides the devices anew for every
micro-batch: long sequences on large groups, short ones on small groups that stay within a node,
under ZeRO-3 over all devices. Its groups of one micro-batch run side by side and all wait for the
slowest. A plan has one sp_size, so this cannot be a ChunkPlan: here are its groups and the seconds
that the cost model gives them. It solves an integer program per micro-batch; here every way to
divide the devices into powers of two that divide the heads is tried, and the longest sequence goes
first to the group that would be done with it earliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from furlong.cost.model import CostModel
from furlong.plan.values import Chunk, Place, Reduce, Slice
from furlong.planners.chunks.groups import refuse_unusable
from furlong.planners.chunks.micro_batches import (
    chunk_by_chunk,
    chunk_seconds,
    does_not_fit,
    fitting_tokens,
    recompute_choices,
)

_TRIED_COUNTS = 4
"""Numbers of micro-batches that are tried, from the fewest that fit."""
_MOST_GROUPS = 64
"""Side by side; beyond as many devices the smallest group is larger than one."""


@dataclass(frozen=True, slots=True)
class SpGroup:
    """Devices that share their sequences."""

    sp_size: int
    seq_ids: tuple[int, ...]
    seconds: float
    """Forward and backward of all of them."""


@dataclass(frozen=True, slots=True)
class FlexSpEstimate:
    """How a batch is divided, and what the cost model predicts."""

    micro_batches: tuple[tuple[SpGroup, ...], ...]
    recompute_layers: int
    reduce_s: float
    """Of gradients, once at the end; 0 under ZeRO-3, whose backwards have reduced them."""

    @property
    def step_s(self) -> float:
        """Micro-batches one after the other, each as slow as its slowest group."""
        return self.reduce_s + sum(
            max(group.seconds for group in groups) for groups in self.micro_batches
        )


@dataclass(frozen=True, slots=True)
class _Rates:
    """What the search adds up instead of asking the cost model, which has the last word."""

    sizes: NDArray[np.int64]
    """(G,) sizes of groups."""
    fixed_s: NDArray[np.float64]
    """(G,) of a group that has anything to do."""
    sequence_s: NDArray[np.float64]
    """(G, K) of each sequence beyond that."""
    device_tokens: int


def estimate_flexsp(
    seq_lens: Sequence[int],
    model: CostModel,
    *,
    num_devices: int,
    budget_bytes: int | None = None,
    recompute_layers: int | None = None,
) -> FlexSpEstimate:
    """The fastest division that is found.

    `model`: as `ulysses.with_zero_3` for FlexSP's way. `budget_bytes` of a device: None takes the
    hardware's. `recompute_layers`: checkpointed layers of every sequence; None tries a few numbers.
    Raises ConfigError where the longest sequence does not fit on all devices.
    """
    refuse_unusable(seq_lens)
    num_layers = model.shape.num_layers
    budget = model.hardware.budget_bytes if budget_bytes is None else budget_bytes
    tried = recompute_choices(num_layers) if recompute_layers is None else [recompute_layers]
    largest = min(num_devices, _largest_power_of_two(model.shape.num_heads))
    partitions = _partitions(num_devices, largest)
    best: FlexSpEstimate | None = None
    for layers in tried:
        tokens = fitting_tokens(
            model, budget, dp_size=num_devices, sp_size=1, recompute_layers=layers
        )
        if tokens * largest < max(seq_lens):
            continue
        rates = _rates(seq_lens, model, num_devices, tokens, layers)
        for micro_batches in _divisions(seq_lens, rates, partitions, num_devices):
            estimate = _estimate(micro_batches, seq_lens, model, num_devices, layers)
            if best is None or estimate.step_s < best.step_s:
                best = estimate
    if best is None:
        raise does_not_fit(
            seq_lens,
            model,
            budget,
            dp_size=num_devices // largest,
            sp_size=largest,
            recompute_layers=tried[-1],
        )
    return best


_Groups = list[tuple[int, list[int]]]
"""(sp_size, seq_ids) of the groups of one micro-batch."""


def _divisions(
    seq_lens: Sequence[int], rates: _Rates, partitions: NDArray[np.int64], num_devices: int
) -> Iterator[list[_Groups]]:
    """The batch in a few numbers of micro-batches: of similar lengths (as FlexSP cuts it), or of
    lengths as mixed as possible."""
    order = sorted(range(len(seq_lens)), key=lambda seq_id: -seq_lens[seq_id])
    capacity = rates.device_tokens * num_devices
    found = 0
    for count in range(-(-sum(seq_lens) // capacity), len(order) + 1):
        mixed = [order[first::count] for first in range(count)]
        cuts = [mixed] if count == 1 else [_runs(order, seq_lens, count), mixed]
        before = found
        for cut in cuts:
            if any(sum(seq_lens[i] for i in batch) > capacity for batch in cut):
                continue
            groups = [_divide(batch, seq_lens, rates, partitions) for batch in cut]
            whole = [own for own in groups if own is not None]
            if len(whole) == len(groups):
                found = before + 1
                yield whole
        if found == _TRIED_COUNTS:
            return


def _runs(order: Sequence[int], seq_lens: Sequence[int], count: int) -> list[list[int]]:
    """`order` cut into at most `count` runs of about equal tokens."""
    total = sum(seq_lens)
    runs: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for seq_id in order:
        middle = before + seq_lens[seq_id] / 2
        runs[min(count - 1, int(middle * count / total))].append(seq_id)
        before += seq_lens[seq_id]
    return [run for run in runs if run]


def _divide(
    seq_ids: Sequence[int],
    seq_lens: Sequence[int],
    rates: _Rates,
    partitions: NDArray[np.int64],
) -> _Groups | None:
    """The groups of one micro-batch whose sequences come by falling length, for the best of the
    partitions (A of them, each of up to B groups); None where no partition has room."""
    exists = partitions >= 0
    kind = np.maximum(partitions, 0)
    room = np.where(exists, rates.sizes[kind] * rates.device_tokens, -1)
    busy_s = np.where(exists, rates.fixed_s[kind], np.inf)
    used = np.zeros(partitions.shape, dtype=bool)
    rows = np.arange(len(partitions))
    choices = []
    for seq_id in seq_ids:
        done_s = np.where(room >= seq_lens[seq_id], busy_s + rates.sequence_s[kind, seq_id], np.inf)
        choice = done_s.argmin(axis=1)
        # a partition without room keeps an infinite time from here on
        busy_s[rows, choice] = done_s[rows, choice]
        room[rows, choice] -= seq_lens[seq_id]
        used[rows, choice] = True
        choices.append(choice)
    slowest_s = np.where(used, busy_s, 0.0).max(axis=1)
    best = int(slowest_s.argmin())
    if not np.isfinite(slowest_s[best]):
        return None
    groups: dict[int, list[int]] = {}
    for seq_id, choice in zip(seq_ids, choices, strict=True):
        groups.setdefault(int(choice[best]), []).append(seq_id)
    return [(int(rates.sizes[kind[best, at]]), own) for at, own in sorted(groups.items())]


def _largest_power_of_two(number: int) -> int:
    """That divides `number`."""
    return number & -number


def _partitions(num_devices: int, largest: int) -> NDArray[np.int64]:
    """(A, B) every way to divide the devices into powers of two up to `largest`, the largest group
    first, as exponents above the smallest size; -1: no group."""
    smallest = _smallest(num_devices)

    def divide(rest: int, exponent: int) -> Iterator[tuple[int, ...]]:
        if not rest:
            yield ()
            return
        for own in range(min(exponent, rest.bit_length() - 1), -1, -1):
            for others in divide(rest - 2**own, own):
                yield (own, *others)

    units = num_devices // smallest
    found = list(divide(units, min(units, max(1, largest // smallest)).bit_length() - 1))
    table = np.full((len(found), units), -1)
    for row, exponents in enumerate(found):
        table[row, : len(exponents)] = exponents
    return table


def _smallest(num_devices: int) -> int:
    """Size of the smallest group."""
    size = 1
    while num_devices // size > _MOST_GROUPS:
        size *= 2
    return size


def _rates(
    seq_lens: Sequence[int], model: CostModel, num_devices: int, device_tokens: int, layers: int
) -> _Rates:
    """Seconds as sums: what has a floor (launches, gathered weights) is left out."""
    smooth = replace(
        model,
        hardware=replace(model.hardware, layer_launch_s=0.0),
        training=replace(model.training, zero_stage=min(model.training.zero_stage, 2)),
    )
    smallest = _smallest(num_devices)
    sizes = [smallest * 2**i for i in range((num_devices // smallest).bit_length())]
    lens = (*seq_lens, 1)
    alone: list[Sequence[int]] = [(seq_id,) for seq_id in range(len(lens))]
    seconds = np.array(
        [_group_seconds(alone, lens, smooth, size, num_devices, layers) for size in sizes]
    )
    fixed = seconds[:, -1]
    return _Rates(np.array(sizes), fixed, seconds[:, :-1] - fixed[:, None], device_tokens)


def _estimate(
    micro_batches: Sequence[_Groups],
    seq_lens: Sequence[int],
    model: CostModel,
    num_devices: int,
    layers: int,
) -> FlexSpEstimate:
    """What the cost model makes of every group."""
    by_size: dict[int, list[tuple[int, list[int]]]] = {}
    for index, groups in enumerate(micro_batches):
        for size, seq_ids in groups:
            by_size.setdefault(size, []).append((index, seq_ids))
    timed: list[list[SpGroup]] = [[] for _ in micro_batches]
    for size, own in sorted(by_size.items(), reverse=True):
        members = [ids for _, ids in own]
        seconds = _group_seconds(members, seq_lens, model, size, num_devices, layers)
        for (index, ids), group_s in zip(own, seconds, strict=True):
            timed[index].append(SpGroup(size, tuple(ids), group_s))
    return FlexSpEstimate(tuple(map(tuple, timed)), layers, _reduce_s(model, num_devices))


def _group_seconds(
    groups: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    model: CostModel,
    sp_size: int,
    num_devices: int,
    layers: int,
) -> list[float]:
    """Forward and backward of each group of `sp_size` devices."""
    whole = Place(0, sp_size)
    chunks = [Chunk(tuple(Slice(i, 0, seq_lens[i], whole) for i in own)) for own in groups]
    # weights and gradients are sharded over all devices, whatever the groups are
    dp_size = max(1, num_devices // sp_size)
    layout = {"sp_size": sp_size, "dp_size": dp_size, "recompute_layers": layers}
    return chunk_seconds(seq_lens, chunks, model, **layout)


def _reduce_s(model: CostModel, num_devices: int) -> float:
    """What ends a step on all devices."""
    chunk = Chunk((Slice(0, 0, 1),))
    plan = chunk_by_chunk([1], [[chunk]], num_layers=model.shape.num_layers)
    costs = model.costs(replace(plan, actions=plan.actions * num_devices))
    return costs.compute_s(Reduce(0), 0)
